"""quantkit export"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("export")
@click.argument("source", metavar="FOLDER|FILE.gguf")
@click.option(
    "--format", "format_name", required=True, metavar="NAME", help="compressed-tensors, gptq, awq or gguf."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="New folder, or file ending in .gguf.  [default: SOURCE-FORMAT]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--allow-rounding", is_flag=True, help="Accept what the format rounds; its size is printed.")
@click.option("--keep-floats", is_flag=True, help="Store weights that lie on no integer grid as floats.")
def command(
    source: str,
    format_name: str,
    output: Path | None,
    overwrite: bool,
    allow_rounding: bool,
    keep_floats: bool,
) -> None:
    """Convert a quantized model, ours or another tool's, to another format without rounding anew.

    What cannot be converted exactly is refused, with the largest error that it would cost. The output is read
    back and compared before it appears.
    """
    from quantkit.convert import export, size_line

    stem = Path(source).name.removesuffix(".gguf")
    out = output or Path(f"{stem}.gguf" if format_name == "gguf" else f"{stem}-{format_name}")
    done = export(
        source,
        format_name,
        out,
        overwrite=overwrite,
        allow_rounding=allow_rounding,
        keep_floats=keep_floats,
        tell=lambda text: click.echo(text, err=True),
    )
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"verified: {size_line(done)}", err=True)
    click.echo(str(done.out))
