"""quantkit verify"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER|FILE.gguf")
@click.option(
    "--runtime",
    metavar="NAME",
    help="Load it in transformers, vllm or llama.cpp and compare log-probabilities.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The base model, to hold the weights to.",
)
@click.option(
    "--gate",
    type=float,
    default=1e-3,
    show_default=True,
    help="Largest KL to our own arithmetic, nats per token.",
)
@click.option("--trust-remote-code", is_flag=True)
@click.pass_context
def command(
    ctx: click.Context,
    folder: Path,
    runtime: str | None,
    against: Path | None,
    gate: float,
    trust_remote_code: bool,
) -> None:
    """Check FOLDER: files, hashes, every tensor against the manifest, configuration, tokenizer; exit code
    1 if unsound."""
    from quantkit.verify import verify

    report = verify(folder, runtime, against, gate=gate, trust_remote_code=trust_remote_code)
    for key, value in report.facts.items():
        click.echo(f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}")
    for finding in report.findings:
        click.echo(f"{'FAIL' if finding.severe else 'note'} {finding}")
    click.echo(f"{folder.name}: {'sound' if report.sound else 'not sound'}")
    if not report.sound:
        ctx.exit(1)
