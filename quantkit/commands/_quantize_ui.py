"""The terminal side of a quantization: progress bar, audit, summary."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from quantkit.quantize import Outcome, execute, prepare
from quantkit.recipe import Recipe
from quantkit.sizes import show_size
from quantkit.workdir import ModuleReport


def resident_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class TerminalProgress:
    """Draws the walk: block i of n, ETA, last module with its error, peak memory."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("[bold]blocks"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
        )
        self._task = self._bar.add_task("blocks", total=None, now="")

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def block(self, index: int, total: int) -> None:
        self._bar.update(self._task, completed=index, total=total)

    def module(self, report: ModuleReport) -> None:
        short = ".".join(report.module.split(".")[-2:])
        now = f"{short} error {report.error:.2e}, memory {show_size(resident_bytes())}"
        self._bar.update(self._task, now=now)


def quantize_with_ui(
    model: str, out: Path, recipe: Recipe, overwrite: bool, restart: bool, trust_remote_code: bool = False
) -> Outcome:
    console = Console(stderr=True)
    job = prepare(model, recipe, trust_remote_code)
    plan = job.plan
    console.print(
        f"{len(plan.quantized)} linears at {plan.bits_per_weight:.3f} bits per weight, "
        f"{show_size(plan.source_bytes)} -> {show_size(plan.output_bytes)}, format {plan.format}"
    )
    for warning in plan.warnings:
        console.print(f"[yellow]note:[/] {warning}")
    say: Callable[[str], None] = lambda text: console.print(f"[dim]{text}[/]")  # noqa: E731
    try:
        with TerminalProgress(console) as progress:
            outcome = execute(
                job,
                out,
                overwrite=overwrite,
                restart=restart,
                progress=progress,
                tell=say,
                on_audit=lambda audit: console.print(audit.table()),
            )
    except KeyboardInterrupt:
        raise click.ClickException(
            "interrupted; finished blocks are kept, give the same command again to go on"
        ) from None
    summarize(outcome, console)
    click.echo(str(outcome.folder))
    return outcome


def summarize(outcome: Outcome, console: Console) -> None:
    """Errors by kind of module, what fell back or was noted, where the time went."""
    kinds: dict[str, list[ModuleReport]] = {}
    for report in outcome.reports:
        kinds.setdefault(report.module.rpartition(".")[2], []).append(report)
    table = Table(title="relative output error (mean over blocks)", title_justify="left")
    for head in ("linears", "count", "rounding", "solved", "worst block"):
        table.add_column(head, justify="left" if head == "linears" else "right")
    for kind, reports in kinds.items():
        n = len(reports)
        worst = max(reports, key=lambda r: r.error)
        table.add_row(
            kind, str(n), f"{sum(r.baseline for r in reports) / n:.3e}", f"{sum(r.error for r in reports) / n:.3e}",
            f"{worst.error:.3e}",
        )  # fmt: skip
    console.print(table)
    noted = [(r.module, note) for r in outcome.reports for note in r.notes]
    by_note: dict[str, list[str]] = {}
    for module, note in noted:
        by_note.setdefault(note, []).append(module)
    for note, modules in list(by_note.items())[:12]:
        console.print(
            f"[yellow]note:[/] {modules[0]}{f' and {len(modules) - 1} more' if len(modules) > 1 else ''}: {note}"
        )
    total = sum(outcome.seconds.values())
    shares = ", ".join(f"{k} {v:.1f} s" for k, v in sorted(outcome.seconds.items(), key=lambda kv: -kv[1]))
    console.print(f"{total:.1f} s ({shares}); peak memory {show_size(resident_bytes())}")
    console.print("[green]verified:[/] every written tensor was read back and equals what was solved")
