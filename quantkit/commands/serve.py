"""quantkit serve"""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("serve")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--context", default="4k", show_default=True, help="Longest sequence.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--print", "only_print", is_flag=True, help="Print the command, start nothing.")
def command(folder: Path, context: str, port: int, only_print: bool) -> None:
    """Serve FOLDER (or a .gguf file) with vLLM or llama.cpp, whichever reads its format.

    Measure the server with `quantkit bench --url http://localhost:PORT`.
    """
    import torch

    from quantkit.errors import UserError
    from quantkit.serve import command_for
    from quantkit.sizes import parse_count

    found = command_for(folder, parse_count(context), port, torch.cuda.is_available())
    for reason in found.reasons:
        click.echo(f"# {reason}", err=True)
    click.echo(str(found))
    if found.missing and not only_print:
        raise UserError(found.missing)
    if found.missing:
        click.echo(f"# {found.missing}", err=True)
    if not only_print:
        os.execvpe(found.argv[0], found.argv, {**os.environ, **found.env})
