"""From what a user names (a folder, a hub id, a GGUF file) to a model folder on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from quantkit.errors import UserError


def cache_folder() -> Path:
    """Where converted and downloaded models are kept: $QUANTKIT_CACHE or ~/.cache/quantkit."""
    return Path(os.environ.get("QUANTKIT_CACHE") or Path.home() / ".cache" / "quantkit")


def resolve_model(name: str) -> Path:
    """A Hugging Face model folder for ``name``.

    A folder is returned as it is; a ``.gguf`` file is dequantized once into the cache; a hub id is looked up with
    huggingface_hub (cache first). Raises UserError that says what is missing.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{path} does not exist")
        return from_gguf(path)
    if path.is_file():
        raise UserError(f"{path} is a file; give a Hugging Face model folder, a hub id or a .gguf file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(
            f"{name!r} is neither a folder, nor a .gguf file, nor a hub id of the form owner/name"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "*.md"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as e:
        raise UserError(f"{name} is gated: accept its licence on the hub and run `hf auth login`") from e
    except RepositoryNotFoundError as e:
        raise UserError(f"the hub has no model {name!r} (or it is private: `hf auth login`)") from e
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as e:
        raise UserError(
            f"{name!r} is no folder here, it is not in the hub cache, and the hub cannot be reached "
            f"({type(e).__name__}); download the model on a machine with network access and give its folder"
        ) from e


def from_gguf(path: Path, dtype: str = "bfloat16") -> Path:
    """Dequantize a GGUF file into a cached Hugging Face folder (weights in ``dtype``), with its tokenizer."""
    stamp = hashlib.sha256(
        f"{path.resolve()}|{path.stat().st_size}|{path.stat().st_mtime_ns}|{dtype}".encode()
    ).hexdigest()
    out = cache_folder() / "gguf" / f"{path.stem}-{stamp[:12]}"
    if (out / "complete").is_file():
        return out
    convert_gguf(path, out, dtype)
    return out


def convert_gguf(path: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Write ``path`` as a Hugging Face folder ``out``; a folder that is there is whole (renamed at the end)."""
    import torch
    import transformers

    try:
        import gguf  # noqa: F401
    except ImportError as e:
        raise UserError("reading GGUF files needs the gguf package: pip install 'quantkit[gguf]'") from e
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    where = str(path.parent)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where,
            gguf_file=path.name,
            dtype=getattr(torch, dtype),
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=path.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as e:
        raise UserError(f"{path} cannot be read as a GGUF model: {e}") from e
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "complete").write_text(json.dumps({"source": path.name}) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)
