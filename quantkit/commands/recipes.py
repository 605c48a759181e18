"""quantkit recipes list | show | check"""

from __future__ import annotations

import click


@click.group("recipes")
def command() -> None:
    """List, show and check recipes."""


@command.command("list")
def list_() -> None:
    """Bundled recipes, solvers, rewrites and formats."""
    from rich.console import Console

    from quantkit import plugins, recipe

    console = Console()
    for name, path in recipe.recipe_files().items():
        console.print(f"[bold]{name}[/]  {recipe.load(str(path)).about}")
    for kind in ("solvers", "rewrites", "formats"):
        console.print(f"{kind}: {', '.join(plugins.names(kind))}")


@command.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe with all its defaults filled in."""
    from quantkit import recipe

    click.echo(recipe.dump(recipe.load(name)), nl=False)


@command.command("check")
@click.argument("file")
def check(file: str) -> None:
    """Check a recipe file: keys, schemes, solvers, options, shadowed rules."""
    from quantkit import recipe

    found = recipe.load(file)
    click.echo(f"{found.name}: ok ({len(found.rules)} rules, format {found.export.format})")
