"""quantkit generate"""

from __future__ import annotations

import click

from quantkit.commands._generate_ui import describe, generation_options, samplers, show, timings


@click.command("generate")
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@generation_options
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt through the model's chat template.")
def command(
    model: str, prompts: tuple[str, ...], max_new_tokens: int, temperature: float, top_p: float, seed: int,
    stop: tuple[str, ...], engine: str, kv: str, head: str | None, trust_remote_code: bool, as_chat: bool,
) -> None:  # fmt: skip
    """Continue each PROMPT with MODEL (any folder that quantkit reads), streamed to the terminal.

    One prompt runs on quantkit's native step where that knows the model; several run as a batch on transformers.
    """
    from quantkit.decode.loop import generate
    from quantkit.engine import encode, open_engine
    from quantkit.load import load_tokenizer
    from quantkit.resolve import resolve_model

    make = samplers(temperature, top_p, seed)
    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    ids = [encode(tokenizer, text, as_chat) for text in prompts]
    if len(ids) > 1 and engine == "auto":
        engine = "transformers"
    opened = open_engine(
        folder, engine, kv, head, max(map(len, ids)) + max_new_tokens, trust_remote_code=trust_remote_code
    )
    describe(opened)
    one = len(ids) == 1
    found, clock = generate(
        opened.engine, ids, tokenizer, max_new_tokens, make, opened.stop_ids, stop, show if one else None
    )
    if one:
        click.echo()
    else:
        for prompt, result in zip(prompts, found):
            click.echo(f"--- {prompt}\n{result.text}")
    timings(clock, sum(len(r.ids) for r in found))
