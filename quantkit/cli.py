"""The ``quantkit`` command: a thin skin. Each command's file is imported only when it runs."""

from __future__ import annotations

import importlib
import os
import sys

import click

import quantkit

# command -> (module under quantkit.commands, help shown in the list); the module holds ``command``
COMMANDS = {
    "quantize": "Quantize a model into a folder that other runtimes load.",
    "plan": "Show what quantize would do, from headers alone: schemes, bytes, memory.",
    "eval": "Measure a model: perplexity, and divergence from the original.",
    "compare": "Models side by side: one table, and a page with plots, Markdown and CSV.",
    "export": "Convert a quantized model to another format without rounding anew.",
    "verify": "Check a checkpoint, and compare a runtime's answers with our own arithmetic.",
    "repair": "Find and mend what is wrong with a checkpoint of any tool.",
    "card": "Write the model card anew, with measured rows.",
    "push": "Verify a folder and upload it to the hub.",
    "inspect": "Show what a model folder holds.",
    "recipes": "List, show and check recipes.",
    "generate": "Continue a prompt, streamed.",
    "chat": "Talk with a model.",
    "fit": "Will a model fit, and how fast can it decode, with each weight and cache scheme.",
    "doctor": "Check this machine and installation, the kernels against the oracle.",
    "serve": "Serve a folder with vLLM or llama.cpp, or print the command.",
    "bench": "Time models side by side, the kernels alone, or a server.",
    "demo": "Quantize the embedded default model and compare it with the original.",
}


class Lazy(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"quantkit.commands.{name.replace('-', '_')}").command

    def resolve_command(self, ctx: click.Context, args: list[str]):
        if args and args[0] not in COMMANDS:
            from quantkit.plugins import suggest

            raise click.UsageError(f"no command {args[0]!r}: {suggest(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(quantkit.__version__, prog_name="quantkit")
@click.option("--debug", is_flag=True, help="Show the full traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Make language models smaller and faster without making them worse."""
    ctx.ensure_object(dict)["debug"] = debug


def main(argv: list[str] | None = None) -> None:
    """Entry point. Errors that a user can mend are one sentence on stderr and exit code 2."""
    from quantkit.errors import UserError

    arguments = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        code = cli.main(args=arguments, prog_name="quantkit", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except UserError as e:
        if "--debug" in arguments:
            raise
        click.echo(f"Error: {e}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
