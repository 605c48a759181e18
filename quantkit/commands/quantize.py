"""quantkit quantize"""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.commands._recipe_options import build_recipe, recipe_options


@click.command("quantize")
@recipe_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Output folder.  [default: MODEL-wBITS]"
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output folder.")
@click.option("--restart", is_flag=True, help="Drop an unfinished run of this output instead of resuming it.")
def command(
    model: str, output: Path | None, overwrite: bool, restart: bool, trust_remote_code: bool, **options
) -> None:
    """Quantize MODEL (a Hugging Face folder, a hub id or a .gguf file).

    An interrupted run goes on where it stopped when the same command is given again. The written folder is
    re-opened and compared with what was solved before success is reported.
    """
    from quantkit.commands._quantize_ui import quantize_with_ui

    recipe = build_recipe(**options)
    out = output or Path(default_output(model, recipe))
    quantize_with_ui(model, out, recipe, overwrite, restart, trust_remote_code)


def default_output(model: str, recipe) -> str:
    """SmolLM2-135M -> SmolLM2-135M-w4."""
    bits = "-".join(dict.fromkeys(str(r.weights.bits) for r in recipe.rules if r.weights is not None))
    return f"{Path(model).name.removesuffix('.gguf')}-w{bits}"
