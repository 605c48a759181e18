"""Does it fit, and how fast will it be: weights, cache and activations for each scheme, from a config alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UserError
from quantkit.evals.memory import cache_bytes, cache_layers
from quantkit.kvscheme import PRESETS
from quantkit.roofline import bytes_per_step, decode_rate
from quantkit.scheme import Scheme

WEIGHTS: dict[str, Scheme | None] = {
    "bf16": None,
    "W8 channel": Scheme(8, True, 0),
    "W4 g128": Scheme(4, True, 128),
    "W4 g32": Scheme(4, True, 32),
}
CACHES = ("none", "int8", "int4")
PREFILL_CHUNK = 2048  # tokens that serving engines read at once


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts. linears: (rows, columns, count) of the decoder's matrices. head: 0 where tied to the embedding."""

    linears: tuple[tuple[int, int, int], ...]
    embedding: int
    head: int
    other: int

    @property
    def total(self) -> int:
        return sum(r * c * n for r, c, n in self.linears) + self.embedding + self.head + self.other


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes, and tokens a second of the whole batch at most (None where the bandwidth is not known)."""

    weights_name: str
    cache_name: str
    weights: float
    cache: float
    activations: float
    rate: float | None

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.activations


def read_config(model: str | Path) -> Any:
    """The transformers config of a folder, a bare config.json, or a hub id. Raises UserError."""
    from transformers import AutoConfig

    from quantkit.resolve import resolve_model

    path = Path(model)
    if path.suffix != ".json":
        path = resolve_model(str(model)) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path} is no config of a model that the installed transformers knows: {error}"
        ) from error


def count(config: Any) -> Parameters:
    """Parameters by kind, from an empty model: no weight is needed."""
    from torch import nn

    from quantkit.skeleton import build_skeleton, has_tied_head

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = build_skeleton(config)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    shapes: dict[tuple[int, int], int] = {}
    linears = 0
    for module in model.modules():
        if module is head:
            continue
        for name, p in module.named_parameters(recurse=False):
            matrix = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or p.dim() == 3
            if name == "bias" or not matrix or p.dim() < 2:
                continue
            rows, columns = p.shape[-2:]
            n = p.shape[0] if p.dim() == 3 else 1  # a stack of experts
            shapes[rows, columns] = shapes.get((rows, columns), 0) + n
            linears += p.numel()
    tied = has_tied_head(model)
    head_size = 0 if tied or head is None else head.weight.numel()
    total = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    if tied and head is not None and head.weight is not embedding:
        total -= head.weight.numel()
    other = total - linears - embedding.numel() - head_size
    return Parameters(tuple((r, c, n) for (r, c), n in shapes.items()), embedding.numel(), head_size, other)


def weight_bytes(parameters: Parameters, scheme: Scheme | None) -> tuple[float, float]:
    """(bytes in memory, bytes that a decode step reads); embedding, head and norms stay in 16 bits."""
    linears = sum(
        r * c * n * (16 if scheme is None else scheme.bits_per_weight(c)) / 8
        for r, c, n in parameters.linears
    )
    rest = 2.0 * (parameters.embedding + parameters.head + parameters.other)
    unread = 2.0 * parameters.embedding if parameters.head else 0.0
    return linears + rest, linears + rest - unread


def cache_bits(config: Any, name: str) -> float:
    """Bits per stored number of a cache format, scales included, in full pages."""
    layer = cache_layers(config)[0]
    per_token = PRESETS[name].bytes_per_token(layer.kv_heads, layer.key_dim)
    return 8 * per_token / (layer.kv_heads * (layer.key_dim + layer.value_dim))


def activation_bytes(config: Any, batch: int, context: int) -> float:
    """Peak besides weights and cache, 16 bits: one chunk of a prefill (hidden states, q/k/v, gate and up), and
    float32 logits of one position a sequence."""
    text = config.get_text_config()
    hidden = text.hidden_size
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    tokens = min(PREFILL_CHUNK, batch * context)
    return tokens * (2 * wide + 6 * hidden) * 2.0 + batch * text.vocab_size * 4.0


def fit(config: Any, context: int, batch: int, bandwidth: float | None) -> list[Fit]:
    """Every weight scheme with every cache format. bandwidth: bytes a second, None when not known."""
    parameters = count(config)
    found = []
    for weights_name, scheme in WEIGHTS.items():
        held, read = weight_bytes(parameters, scheme)
        for cache_name in CACHES:
            cache = cache_bytes(config, context, cache_bits(config, cache_name), batch)
            step = bytes_per_step(read, cache / (batch * context), context, batch)
            rate = decode_rate(bandwidth, step, batch) if bandwidth else None
            found.append(
                Fit(weights_name, cache_name, held, cache, activation_bytes(config, batch, context), rate)
            )
    return found
