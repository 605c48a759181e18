"""quantkit repair"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("repair")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Carry the remedies out; without it they are only explained.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="New folder.  [default: FOLDER-repaired]"
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the base model.",
)
@click.option("--in-place", is_flag=True, help="Replace FOLDER itself.")
@click.pass_context
def command(
    ctx: click.Context, folder: Path, yes: bool, output: Path | None, against: Path | None, in_place: bool
) -> None:
    """Find what is wrong with a checkpoint, ours or another tool's, and mend what can be mended.

    Zero-point convention, group size, ignore list, tie flag, missing side files and chat template, exchanged
    nibbles. Exit code 1 when something is (still) wrong.
    """
    from quantkit.repair import diagnose, repair

    remedies = diagnose(folder, against)
    for remedy in remedies:
        click.echo(str(remedy.finding))
        help_ = "" if against else "; a base model (--against) may help"
        click.echo(f"    remedy: {remedy.text or 'none that quantkit knows' + help_}")
    possible = [r for r in remedies if r.possible]
    if not possible:
        wrong = any(r.finding.severe for r in remedies)
        click.echo("nothing can be mended" if remedies else "nothing is wrong")
        ctx.exit(1 if wrong else 0)
    if not yes:
        click.echo(f"{len(possible)} of {len(remedies)} can be mended; give --yes to write them")
        ctx.exit(1)
    out = folder if in_place else output or folder.with_name(folder.name + "-repaired")
    left = repair(folder, possible, out, in_place=in_place)
    for finding in left:
        click.echo(f"still {finding}")
    click.echo(str(out))
    if any(f.severe for f in left):
        ctx.exit(1)
