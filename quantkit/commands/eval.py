"""quantkit eval"""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("eval")
@click.argument("model")
@click.option("--against", metavar="MODEL", help="The original model, for KL divergence and top-1 agreement.")
@click.option(
    "--corpus",
    default="heldout",
    show_default=True,
    help="heldout, wikitext2-test, wikitext2-valid, or a text file.",
)
@click.option("--windows", type=click.IntRange(1), default=8, show_default=True, help="Number of windows.")
@click.option(
    "--spread/--first",
    default=True,
    show_default=True,
    help="Windows spread over the text, or the first ones.",
)
@click.option("--seq-len", type=click.IntRange(2), default=512, show_default=True, help="Tokens per window.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Append the rows to this JSON-lines file."
)
@click.option("--label", help="Name of the model in the rows.  [default: the folder's name]")
@click.option("--tasks", metavar="NAME,...", help="lm-eval tasks.")
@click.option("--include-path", type=click.Path(path_type=Path), help="Folder of lm-eval task files.")
@click.option(
    "--data-root", type=click.Path(path_type=Path), help="Where relative paths in task files start."
)
@click.option("--limit", type=click.IntRange(1), help="Documents per task.")
@click.option("--memory", is_flag=True, help="Also weights by tensor class and the cache's bytes per token.")
@click.option(
    "--kv", metavar="FORMAT", help="Also KL of decoding with this cache (int8, int4) against a 16-bit one."
)
@click.option("--trust-remote-code", is_flag=True)
def command(
    model: str, against: str | None, corpus: str, windows: int, spread: bool, seq_len: int, json_file: Path | None,
    label: str | None, tasks: str | None, include_path: Path | None, data_root: Path | None, limit: int | None,
    memory: bool, kv: str | None, trust_remote_code: bool,
) -> None:  # fmt: skip
    """Perplexity of MODEL, and how far it is from the original (--against). Any folder that quantkit reads.

    Both models run block by block in float32 arithmetic, so neither is ever whole in memory; --tasks and --kv
    load MODEL whole.
    """
    from rich.console import Console

    from quantkit.evals import provenance
    from quantkit.evals.corpus import windows as make_windows
    from quantkit.load import load_tokenizer
    from quantkit.measure import measure_cache, measure_folder, measure_memory
    from quantkit.resolve import resolve_model

    folder = resolve_model(model)
    reference = resolve_model(against) if against else None
    tokenizer = load_tokenizer(reference or folder, trust_remote_code)
    chosen = make_windows(corpus, tokenizer, seq_len, windows, spread)
    rows = measure_folder(folder, chosen, reference, trust_remote_code)
    if memory:
        rows += measure_memory(folder, trust_remote_code)
    if kv:
        rows += measure_cache(folder, kv, chosen, trust_remote_code)
    if tasks:
        from quantkit.evals.tasks import evaluate
        from quantkit.load import load

        whole = load(folder, trust_remote_code=trust_remote_code)
        rows += evaluate(
            whole, tokenizer, tasks.split(","), limit, include_path=include_path, data_root=data_root
        )
    console = Console()
    console.print(f"[bold]{label or folder.name}[/] on {chosen.name}")
    for row in rows:
        error = "" if row.get("stderr") is None else f" ± {row['stderr']:.4g}"
        console.print(f"  {row['metric']:<16} {row['value']:.5g}{error} {row['unit']}", highlight=False)
    if json_file:
        about = provenance(data_sha256=chosen.sha256)
        with json_file.open("a", encoding="utf-8") as f:
            for row in rows:
                f.write(
                    json.dumps({"model": label or folder.name, **row, **about}, ensure_ascii=False) + "\n"
                )
