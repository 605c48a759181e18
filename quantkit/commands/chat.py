"""quantkit chat"""

from __future__ import annotations

import click

from quantkit.commands._generate_ui import describe, generation_options, samplers, show, timings


@click.command("chat")
@click.argument("model")
@generation_options
@click.option("--system", help="System message.")
@click.option("--context", default="4k", show_default=True, help="Longest conversation, in tokens.")
def command(
    model: str, max_new_tokens: int, temperature: float, top_p: float, seed: int, stop: tuple[str, ...],
    engine: str, kv: str, head: str | None, trust_remote_code: bool, system: str | None, context: str,
) -> None:  # fmt: skip
    """Talk with MODEL. An empty line or end of input ends the conversation."""
    from quantkit.decode.loop import generate
    from quantkit.engine import encode_messages, open_engine
    from quantkit.sizes import parse_count

    make = samplers(temperature, top_p, seed)
    opened = open_engine(
        model, engine, kv, head, parse_count(context), reuse=True, trust_remote_code=trust_remote_code
    )
    messages = [{"role": "system", "content": system}] if system else []
    encode_messages(opened.tokenizer, [*messages, {"role": "user", "content": "x"}])  # is there a template?
    describe(opened)
    sampler = make(0)
    while True:
        try:
            said = click.prompt("you", default="", show_default=False, err=True)
        except click.exceptions.Abort:
            break
        if not said.strip():
            break
        messages.append({"role": "user", "content": said})
        ids = encode_messages(opened.tokenizer, messages)
        found, clock = generate(
            opened.engine,
            [ids],
            opened.tokenizer,
            max_new_tokens,
            lambda row: sampler,
            opened.stop_ids,
            stop,
            show,
        )
        click.echo()
        timings(clock, len(found[0].ids))
        messages.append({"role": "assistant", "content": found[0].text})
