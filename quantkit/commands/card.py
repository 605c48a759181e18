"""quantkit card"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("card")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--rows",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measured rows (`quantkit eval --json FILE`).",
)
def command(folder: Path, rows: Path | None) -> None:
    """Write the model card (README.md) of FOLDER anew, with the measured rows of --rows in its table."""
    from quantkit.model_card import read_rows, write_card

    click.echo(str(write_card(folder, read_rows(rows) if rows else ())))
