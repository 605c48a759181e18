"""quantkit fit"""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("fit")
@click.argument("model")
@click.option("--device", "device_name", help="A device of the table, such as L4, RTX-4090, H100-SXM.")
@click.option("--memory", help="What there is, such as 8GB; overrides the device's.")
@click.option(
    "--bandwidth", help="Bytes a second, such as 60GB.  [default: the device's, else measured here]"
)
@click.option("--context", default="4k", show_default=True, help="Tokens of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at a time.")
@click.option("--json", "as_json", is_flag=True)
def command(
    model: str, device_name: str | None, memory: str | None, bandwidth: str | None, context: str, batch: int, as_json: bool
) -> None:  # fmt: skip
    """Will MODEL (a folder, or just its config.json) fit, and how fast can it decode, with each weight and cache?"""
    from rich.console import Console
    from rich.table import Table

    from quantkit.doctor import best_bandwidth
    from quantkit.errors import UserError
    from quantkit.fit import count, fit, read_config
    from quantkit.roofline import device
    from quantkit.sizes import parse_count, parse_size, show_size

    named = device(device_name) if device_name else None
    room = parse_size(memory) if memory else int(named.memory) if named else 0
    if not room:
        raise UserError("how much memory is there? give --memory 8GB, or --device NAME of a GPU")
    rate, source = (float(parse_size(bandwidth)), "as given") if bandwidth else (0.0, "")
    if not rate and named:
        rate, source = named.bandwidth, f"peak of {named.name}: {named.source}"
    if not rate:
        rate, source = best_bandwidth()
    tokens = parse_count(context)
    config = read_config(model)
    rows = fit(config, tokens, batch, rate)
    if as_json:
        click.echo(
            json.dumps([{**asdict(r), "total": r.total, "fits": r.total <= room} for r in rows], indent=1)
        )
        return
    title = f"{count(config).total:,} parameters, {batch} x {tokens} tokens, {show_size(room)}, {rate / 1e9:.0f} GB/s ({source})"
    table = Table(title=title, title_justify="left")
    for head in (
        "weights",
        "cache",
        "weights in memory",
        "cache",
        "activations",
        "total",
        "fits",
        "tok/s at most",
    ):
        table.add_column(head, justify="left" if head in ("weights", "fits") else "right")
    for r in rows:
        verdict = "yes" if r.total <= room else f"no, {show_size(r.total - room)} short"
        table.add_row(
            r.weights_name, r.cache_name, show_size(r.weights), show_size(r.cache), show_size(r.activations),
            show_size(r.total), verdict, "–" if r.rate is None else f"{r.rate:.0f}",
        )  # fmt: skip
    Console().print(table)
