"""Any checkpoint that quantkit reads, opened: a Hugging Face folder (ours or foreign) or a .gguf file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.checkpoint import Source, write_json
from quantkit.errors import UserError
from quantkit.formats import gguf
from quantkit.load import format_of, iterate
from quantkit.qweight import QuantWeight

UNQUANTIZED = "unquantized"


@dataclass(frozen=True, slots=True)
class Opened:
    """path: as given. format: the format's name, or "unquantized". config: config.json without its
    quantization_config. quantization: that dictionary, {} for none. kinds: GGML type by tensor name, for
    gguf."""

    path: Path
    format: str
    config: dict[str, Any]
    quantization: dict[str, Any]
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        return self.format == gguf.NAME

    def items(self) -> Iterator[tuple[str, Tensor | QuantWeight]]:
        """Everything in it, one at a time: ("model...q_proj", QuantWeight) and ("model.norm.weight",
        Tensor)."""
        return gguf.read(self.path).items() if self.is_gguf else iterate(self.path)

    def write_side_files(self, folder: Path) -> None:
        """Tokenizer, chat template, generation config and the like; for GGUF made from its metadata."""
        if self.is_gguf:
            _gguf_side_files(self, folder)
            return
        for file in Source(self.path).side_files():
            if file.name not in ("quantize_config.json", "quant_config.json"):  # of the format that is left
                shutil.copyfile(file, folder / file.name)


def open_any(path: str | Path) -> Opened:
    """Open a folder or file. Raises UserError when there is none, or none that quantkit reads."""
    path = Path(path)
    if gguf.is_gguf(path):
        model = gguf.read(path)
        spec = gguf.arch.spec_of(model.config["model_type"])
        kinds = {gguf.arch.from_gguf(n, spec): info.kind for n, info in model.file.tensors.items()}
        return Opened(path, gguf.NAME, model.config, {}, kinds)
    if path.is_file():
        raise UserError(f"{path} is no GGUF file; give a model folder or a .gguf file")
    source = Source(path)
    fmt = format_of(source.config)
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    quantization = source.config.get("quantization_config") or {}
    return Opened(path, UNQUANTIZED if fmt is None else fmt.NAME, config, quantization)


def _gguf_side_files(opened: Opened, folder: Path) -> None:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(opened.path.parent), gguf_file=opened.path.name
        )
    except ImportError as e:
        raise UserError(
            "reading a GGUF file's tokenizer needs the gguf package: pip install 'quantkit[gguf]'"
        ) from e
    except (ValueError, KeyError, OSError, NotImplementedError) as e:
        raise UserError(f"{opened.path} has no tokenizer that transformers can read: {e}") from e
    tokenizer.save_pretrained(folder)
    ids = {
        k: opened.config[k]
        for k in ("bos_token_id", "eos_token_id", "pad_token_id")
        if opened.config.get(k) is not None
    }
    write_json(folder / "generation_config.json", ids)
