"""quantkit compare"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("compare")
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option(
    "--against", metavar="MODEL", help="The original: measured too, and the others' divergence to it."
)
@click.option(
    "--corpus",
    default="heldout",
    show_default=True,
    help="heldout, wikitext2-test, wikitext2-valid, or a text file.",
)
@click.option("--windows", type=click.IntRange(1), default=8, show_default=True, help="Number of windows.")
@click.option("--seq-len", type=click.IntRange(2), default=512, show_default=True, help="Tokens per window.")
@click.option(
    "--rows",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Rows that `quantkit eval --json` wrote, added without measuring; may be repeated.",
)
@click.option(
    "--samples/--no-samples", default=True, show_default=True, help="Let each model write a sentence."
)
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page; Markdown and CSV are written beside it.",
)
@click.option("--trust-remote-code", is_flag=True)
def command(
    models: tuple[str, ...], against: str | None, corpus: str, windows: int, seq_len: int, rows: tuple[Path, ...],
    samples: bool, out: Path, trust_remote_code: bool,
) -> None:  # fmt: skip
    """MODELs side by side: size, perplexity, divergence from the original, error of each layer, a text sample.

    All are measured on the same windows, so that differences between them are compared window by window.
    """
    from rich.console import Console

    from quantkit.comparison import check_output, compare, write
    from quantkit.report import terminal

    def tell(line: str) -> None:
        click.echo(line, err=True)

    check_output(out)
    report = compare(models, against, corpus, windows, seq_len, rows, samples, trust_remote_code, tell)
    table, console = terminal(report), Console()
    if not console.is_terminal:  # a file has no width: no cell is folded, only the line below the table
        caption, table.caption = table.caption, None
        console.width = max(80, Console(width=10_000).measure(table).maximum)
        table.caption = caption
    console.print(table)
    for path in write(report, out, tell):
        click.echo(f"wrote {path}", err=True)
