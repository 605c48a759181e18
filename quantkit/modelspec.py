"""ModelSpec: what quantkit must know of an architecture, as data.

A file ``quantkit/models/<model_type>.py`` holds one constant ``SPEC``. All names are relative: ``embed``,
``blocks``, ``norm`` and ``head`` to the model, everything else to one decoder block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fold:
    """A rescale pair: dividing the producer's outputs by s and multiplying the consumers' input columns by s
    keeps the block's function, for any s > 0 per channel.

    producer: a norm or a linear of the block.
    consumers: linears (any modules with ``weight [out, in]``) that read exactly the producer's output.
    kind: "norm" (weight and bias are divided), "linear" (rows and bias of a linear are divided), or "value"
        (as linear, but under grouped queries one value channel feeds the same channel of several query heads,
        so s is shared between them: consumer channels are ``[heads, head_dim]``, producer channels
        ``[kv_heads, head_dim]``).
    rows: slice of the producer's rows that carry the scaled output, as fractions of its height or as
        "gate_up:up" / "qkv:v" for fused projections.
    """

    producer: str
    consumers: tuple[str, ...]
    kind: str = "norm"
    rows: str = ""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture as data. ``groups`` are in forward order; linears of one group read the same input."""

    groups: tuple[tuple[str, ...], ...]
    embed: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    folds: tuple[Fold, ...] = ()
    norm_offset: float = 0.0  # gemma's RMSNorm multiplies by 1 + weight
    transposed: bool = False  # GPT-2's Conv1D stores [in, out]
    fused: tuple[tuple[str, ...], ...] = ()  # sets that serving engines fuse and that must share a scheme
    unquantized: tuple[str, ...] = ()  # block submodules with weights that are listed as never quantized (routers)
    gguf_arch: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # block-relative HF name -> gguf name
