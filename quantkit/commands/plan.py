"""quantkit plan"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from quantkit.commands._recipe_options import build_recipe, recipe_options


@click.command("plan")
@recipe_options
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option(
    "--for",
    "runtime",
    metavar="RUNTIME",
    help="What vllm, vllm-cpu, sglang, tgi, transformers or llama.cpp refuses.",
)
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks, for --for."
)
@click.option("--all", "show_all", is_flag=True, help="Every module, not one line per kind.")
@click.pass_context
def command(
    ctx: click.Context, model: str, trust_remote_code: bool, as_json: bool, show_all: bool, runtime: str | None, tp: int, **options,
) -> None:  # fmt: skip
    """Show what `quantize MODEL` with the same options would do. No weight is read, nothing is written.

    With --for the exit code is 1 when that runtime would refuse the result.
    """
    from rich.console import Console
    from rich.table import Table

    from quantkit.quantize import prepare, refusals
    from quantkit.sizes import show_size

    job = prepare(model, build_recipe(**options), trust_remote_code)
    plan = job.plan
    refused = refusals(job, runtime, tp) if runtime else []
    if as_json:
        click.echo(
            json.dumps(
                {
                    "format": plan.format,
                    "output_bytes": plan.output_bytes,
                    "source_bytes": plan.source_bytes,
                    "peak_bytes": plan.peak_bytes,
                    "disk_bytes": plan.disk_bytes,
                    "bits_per_weight": plan.bits_per_weight,
                    "warnings": plan.warnings,
                    "refused": refused,
                    "modules": [
                        {
                            "module": p.module,
                            "shape": [p.rows, p.columns],
                            "scheme": None if p.scheme is None else asdict(p.scheme),
                            "solver": p.rule.solver if p.scheme else None,
                            "reason": p.reason,
                        }
                        for p in plan.layers
                    ],
                },
                indent=2,
            )
        )
        ctx.exit(1 if refused else 0)
    console = Console()
    table = Table()
    for head in ("module", "shape", "scheme", "solver", "reason"):
        table.add_column(head, overflow="fold")
    rows: dict[tuple, list[str]] = {}
    for p in plan.layers:
        kind = (
            p.module
            if show_all
            else ".".join("*" if part.isdigit() else part for part in p.module.split("."))
        )
        key = (
            kind,
            f"{p.rows}x{p.columns}",
            str(p.scheme or "kept"),
            p.rule.solver if p.scheme else "",
            p.reason,
        )
        rows.setdefault(key, []).append(p.module)
    for key, modules in rows.items():
        name = key[0] if len(modules) == 1 else f"{key[0]}  ({len(modules)})"
        table.add_row(name, *key[1:])
    console.print(table)
    console.print(
        f"{len(plan.quantized)} linears at {plan.bits_per_weight:.4f} bits per weight, format {plan.format}"
    )
    console.print(
        f"weights on disk: {plan.output_bytes:,} bytes ({show_size(plan.output_bytes)}), now {show_size(plan.source_bytes)}"
    )
    console.print(
        f"peak memory about {show_size(plan.peak_bytes)} above the interpreter; disk {show_size(plan.disk_bytes)}"
    )
    for warning in plan.warnings:
        console.print(f"[yellow]note:[/] {warning}")
    for sentence in refused:
        console.print(f"[red]{runtime}:[/] {sentence}", highlight=False)
    if runtime and not refused:
        console.print(f"nothing known stands against {runtime}" + (f" on {tp} ranks" if tp > 1 else ""))
    if refused:
        ctx.exit(1)
