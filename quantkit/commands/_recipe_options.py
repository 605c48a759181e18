"""The options that quantize and plan share, and how they become a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from quantkit import recipe as recipes
from quantkit.errors import UserError
from quantkit.recipe import Recipe

DEFAULT_RECIPE = "balanced"


def recipe_options(command: Callable) -> Callable:
    """Adds --bits, --group-size, --method, --recipe, --format and the calibration options."""
    options = [
        click.argument("model"),
        click.option("--bits", type=click.Choice(["2", "3", "4", "8"]), help="Bits per weight.  [default: 4]"),
        click.option("--group-size", type=int, help="Input columns that share a scale; 0: one scale per row.  [default: 128]"),
        click.option("--asymmetric", is_flag=True, default=None, help="Store a zero point per group."),
        click.option("--activations", type=click.Choice(["int8"]), help="Quantize activations too (W8A8)."),
        click.option("--method", metavar="NAME", help="Solver: gptq, rtn, ... (quantkit recipes list)."),
        click.option("--recipe", "recipe_name", metavar="NAME|FILE", help=f"Recipe by name or YAML file.  [default: {DEFAULT_RECIPE}]"),
        click.option("--format", "format_name", metavar="NAME", help="compressed-tensors, gptq, awq.  [default: compressed-tensors]"),
        click.option("--calib", metavar="SOURCE", help="default, self, hub:NAME, or a .txt, .jsonl, .parquet, .safetensors file or folder."),
        click.option("--samples", type=click.IntRange(1), help="Calibration windows.  [default: 128]"),
        click.option("--seq-len", type=click.IntRange(8), help="Tokens per window.  [default: 512]"),
        click.option("--seed", type=int, help="Seed of every random choice.  [default: 0]"),
        click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def build_recipe(
    bits: str | None,
    group_size: int | None,
    asymmetric: bool | None,
    activations: str | None,
    method: str | None,
    recipe_name: str | None,
    format_name: str | None,
    calib: str | None,
    samples: int | None,
    seq_len: int | None,
    seed: int | None,
) -> Recipe:
    """The named (or default) recipe with the options laid over it. Raises UserError."""
    base = recipes.load(recipe_name or DEFAULT_RECIPE)
    data: dict[str, Any] = base.model_dump(mode="json")
    changed = {
        "bits": None if bits is None else int(bits),
        "group": group_size,
        "symmetric": None if not asymmetric else False,
        "activation": activations,
    }
    changed = {k: v for k, v in changed.items() if v is not None}
    if activations:
        changed = {"bits": 8, "group": 0, **changed}
    quantizing = [r for r in data["rules"] if r["weights"] is not None]
    if (changed or method) and len(quantizing) > 1 and recipe_name:
        raise UserError(
            f"recipe {recipe_name!r} has {len(quantizing)} quantizing rules, so --bits, --group-size and --method do "
            "not say which one they mean; change the recipe file instead (quantkit recipes show)"
        )
    for rule in quantizing:
        rule["weights"].update(changed)
        if method and method != rule["solver"]:
            rule["solver"], rule["options"] = method, {}
    for key, value in (("source", calib), ("samples", samples), ("seq_len", seq_len), ("seed", seed)):
        if value is not None:
            data["calib"][key] = value
    if format_name:
        data["export"]["format"] = format_name
    return recipes.parse(data, "options")
