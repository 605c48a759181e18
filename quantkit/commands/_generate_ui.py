"""What ``generate`` and ``chat`` share: options, streaming to the terminal, the line of timings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from quantkit.decode.loop import Clock
    from quantkit.engine import Opened


def generation_options(command: Callable) -> Callable:
    """Sampling, stopping and engine options."""
    options = [
        click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus sampling."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of a generator of its own."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
        click.option("--engine", type=click.Choice(["auto", "native", "transformers"]), default="auto"),
        click.option(
            "--kv", default="none", show_default=True, metavar="FORMAT", help="Cache: none, int8, int4."
        ),
        click.option(
            "--head", type=click.Choice(["int8", "bfloat16"]), help="Output head on the native step."
        ),
        click.option("--trust-remote-code", is_flag=True),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def describe(opened: Opened) -> None:
    """Says on stderr what runs, and why nothing faster does."""
    click.echo(click.style(f"engine: {opened.backend}", dim=True), err=True)
    for note in opened.notes:
        click.echo(click.style(f"note: {note}", dim=True), err=True)


def timings(clock: Clock, tokens: int) -> None:
    """TTFT, median ITL and rate on stderr."""
    import statistics

    words = [f"{tokens} tokens", f"first after {1000 * clock.ttft:.0f} ms"]
    if clock.itl:
        words.append(
            f"then {1000 * statistics.median(clock.itl):.2f} ms each (median), {clock.rate:.1f} steps/s"
        )
    click.echo(click.style(", ".join(words), dim=True), err=True)


def show(row: int, piece: str) -> None:
    """Text to the terminal as it comes."""
    click.echo(piece, nl=False)


def samplers(temperature: float, top_p: float, seed: int) -> Callable[[int], Any]:
    """row -> Sampler. Raises UserError at once for settings that cannot be."""
    from quantkit.decode.sampling import Sampler

    Sampler(temperature, top_p, seed)
    return lambda row: Sampler(temperature, top_p, seed + row)
