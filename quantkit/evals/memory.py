"""Memory: weights by tensor class from file headers or a live model, KV cache, and the process's peak."""

from __future__ import annotations

import gc
import json
import re
import resource
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UserError
from quantkit.evals._rows import Row, row

CLASSES = ("embedding", "attention", "mlp", "norm", "head", "other")

# First match wins. Names of Hugging Face checkpoints (llama, gpt2, mixtral, …) and of GGUF files.
_PATTERNS = [
    ("head", r"(^|\.)(lm_head|embed_out|output)\.[^.]+$"),
    ("norm", r"norm|(^|\.)ln_|layernorm|_ln\."),
    ("embedding", r"embed|(^|\.)w[tp]e\.|token_embd|position_embd"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|ffn|feed_forward|expert|block_sparse_moe|router|(^|\.)(fc|dense|gate|up|down)"),
]


def tensor_class(name: str) -> str:
    """Which of CLASSES a tensor belongs to, by its name."""
    return next((label for label, pattern in _PATTERNS if re.search(pattern, name)), "other")


@dataclass(frozen=True, slots=True)
class Weights:
    """bytes by class; ``total`` their sum. files: size on disk, headers included (0 for a live model)."""

    by_class: dict[str, int]
    files: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_class.values())

    def rows(self) -> list[Row]:
        rows = [
            row(f"weights_{name}", self.by_class[name], "bytes") for name in CLASSES if self.by_class[name]
        ]
        rows.append(row("weights_total", self.total, "bytes"))
        if self.files:
            rows.append(row("file_bytes", self.files, "bytes"))
        return rows


def from_folder(folder: str | Path) -> Weights:
    """Weights of a checkpoint folder, from the headers of its safetensors files (or of a .gguf file).

    Raises UserError where there is neither, or a header is broken.
    """
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    if not files:
        raise UserError(f"{folder} holds no .safetensors and no .gguf file")
    count: Counter[str] = Counter(dict.fromkeys(CLASSES, 0))
    for path in files:
        for name, size in (_gguf if path.suffix == ".gguf" else _safetensors)(path):
            count[tensor_class(name)] += size
    return Weights(dict(count), sum(path.stat().st_size for path in files))


def _safetensors(path: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every tensor: 8 bytes little-endian header length, then JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length + 8 > size:
            raise UserError(f"{path} is cut off or no safetensors file: its header does not fit its size")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise UserError(f"{path} has a broken safetensors header: {error}") from error
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, last - first


def _gguf(path: Path) -> Iterator[tuple[str, int]]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            f"reading {path.name} needs the gguf package: pip install 'quantkit[gguf]'"
        ) from error
    for tensor in GGUFReader(path).tensors:
        yield tensor.name, int(tensor.n_bytes)


def from_model(model: torch.nn.Module) -> Weights:
    """Weights of a live model: parameters and buffers, shared storage (tied embeddings) counted once."""
    count: Counter[str] = Counter(dict.fromkeys(CLASSES, 0))
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no memory to count")
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            count[tensor_class(name)] += storage.nbytes()
    return Weights(dict(count))


# --- KV cache ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's cache: heads x (key width + value width) numbers a token; ``window`` 0: no limit."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0

    def values(self, context: int) -> int:
        """Numbers stored after ``context`` tokens. A sliding window keeps its last ``window - 1``."""
        held = min(context, self.window - 1) if self.window else context
        return held * self.kv_heads * (self.key_dim + self.value_dim)


def cache_layers(config: Any) -> list[CacheLayer]:
    """The caches of a model, from its transformers config. Layers without a growing cache are left out."""
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise UserError(f"{text.model_type} keeps a latent cache (MLA); its size is not modelled yet")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None) or 0
    # Mistral of old: a window for all layers, and no list of layer types.
    everywhere = (
        bool(window) and not getattr(text, "layer_types", None) and getattr(text, "use_sliding_window", True)
    )
    return [
        CacheLayer(heads, width, width, window if everywhere or kind == "sliding_attention" else 0)
        for kind in kinds
        if kind in ("full_attention", "sliding_attention")
    ]


def cache_bytes(config: Any, context: int, bits: float = 16, batch: int = 1) -> float:
    """Bytes of the KV cache after ``context`` tokens; ``bits``: per stored number, scales included."""
    return batch * sum(layer.values(context) for layer in cache_layers(config)) * bits / 8


def cache_bytes_per_token(config: Any, bits: float = 16) -> float:
    """What each further token costs while no sliding window is full. SmolLM2-135M in 16 bits: 23,040."""
    return cache_bytes(config, 1, bits)


def cache_growth(config: Any, contexts: list[int], bits: float = 16) -> list[Row]:
    """Rows "cache_bytes" with their context, for a plot of growth."""
    return [row("cache_bytes", cache_bytes(config, c, bits), "bytes", context=c, bits=bits) for c in contexts]


def measured_cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache object holds (storage counted once), whatever its class."""
    seen: dict[int, int] = {}
    visited: set[int] = set()
    todo = [cache]
    while todo:
        value = todo.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
            todo += vars(value).values()
    return sum(seen.values())


# --- the process ------------------------------------------------------------------------------------


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes (Linux: kilobytes from the kernel)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def current_rss() -> int | None:
    """Resident memory now, in bytes; None where the kernel does not tell (no /proc)."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * resource.getpagesize() if path.is_file() else None


@dataclass(slots=True)
class Peak:
    """Filled when the ``with`` block ends. rss: highest resident bytes inside; over_start: above the start.

    exact: False where the kernel's mark could not be reset; then ``rss`` may stem from before the block.
    """

    rss: int = 0
    over_start: int = 0
    exact: bool = False

    def rows(self) -> list[Row]:
        return [
            row("peak_rss", self.rss, "bytes", exact=self.exact),
            row("peak_rss_over_start", self.over_start, "bytes", exact=self.exact),
        ]


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Peak resident memory of the block. Linux's high-water mark is reset first (/proc/self/clear_refs)."""
    gc.collect()
    found = Peak()
    start = current_rss() or peak_rss()
    found.exact = _reset_mark()
    try:
        yield found
    finally:
        found.rss = _high_water() if found.exact else peak_rss()
        found.over_start = max(0, found.rss - start)


def _reset_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
