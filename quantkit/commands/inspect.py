"""quantkit inspect"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("inspect")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--modules", is_flag=True, help="Every module with its scheme and error.")
def command(folder: Path, modules: bool) -> None:
    """Show what a model FOLDER holds: format, schemes, bytes by kind of tensor, recipe, errors."""
    from collections import Counter

    from rich.console import Console
    from rich.table import Table

    from quantkit.checkpoint import Source, read_manifest
    from quantkit.load import format_of, quantized_modules
    from quantkit.sizes import show_size

    source = Source(folder)
    fmt = format_of(source.config)
    console = Console()
    console.print(
        f"[bold]{folder.name}[/]: {source.config.get('model_type')}, {len(source.files)} weight file(s), {show_size(source.nbytes)}"
    )
    stored = {} if fmt is None else quantized_modules(source, fmt)
    console.print(f"format: {'unquantized' if fmt is None else fmt.NAME}; {len(stored)} quantized modules")
    taken = {t for tensors in stored.values() for t in tensors}
    sizes: Counter[str] = Counter()
    for name, info in source.tensors.items():
        kind = (
            "quantized linears"
            if name in taken
            else "embedding and head"
            if "embed" in name or "lm_head" in name or "wte" in name
            else "other floats"
        )
        sizes[kind] += info.nbytes
    for kind, size in sizes.most_common():
        console.print(f"  {kind:<20} {show_size(size):>10}")
    manifest = read_manifest(folder)
    if manifest is None:
        console.print("no quantkit.json: this folder was not written by quantkit")
        return
    recipe = (manifest["recipe"] or {}).get("name", "unknown")
    console.print(
        f"made by quantkit {manifest['quantkit']} from {manifest['base_model'] or 'an unnamed model'}, recipe {recipe}, {manifest['bits_per_weight']} bits per weight"
    )
    if origin := manifest.get("converted_from"):
        console.print(f"converted from {origin['name']} ({origin['format']})")
    reports = manifest["modules"]
    if reports:
        worst = max(reports, key=lambda r: r["error"])
        console.print(
            f"largest relative error: {worst['error']:.3e} in {worst['module']} (rounding: {worst['baseline']:.3e})"
        )
    if modules:
        table = Table()
        for head in ("module", "scheme", "solver", "error", "rounding", "notes"):
            table.add_column(head, overflow="fold")
        for r in reports:
            table.add_row(
                r["module"],
                r["scheme"],
                r["solver"],
                f"{r['error']:.3e}",
                f"{r['baseline']:.3e}",
                "; ".join(r["notes"]),
            )
        console.print(table)
