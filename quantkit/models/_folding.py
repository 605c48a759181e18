"""The mechanics of rescale pairs: which rows and columns a Fold touches, and how its scale is applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.modelspec import Fold, ModelSpec, has, weight_of


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry: query heads, key/value heads, channels per head."""

    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.query // self.kv


def heads_of(config: Any) -> Heads:
    query = int(config.num_attention_heads)
    kv = int(getattr(config, "num_key_value_heads", None) or query)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // query)
    return Heads(query, kv, dim)


def matrix(block: nn.Module, name: str, spec: ModelSpec) -> Tensor:
    """The weight as a view ``[out, in]`` (experts: ``[experts, out, in]``) that may be changed in place."""
    weight = weight_of(block, name).detach()
    return weight.t() if spec.transposed and weight.dim() == 2 else weight


def has_width(block: nn.Module, name: str, spec: ModelSpec, width: int) -> bool:
    """Whether ``name`` exists in the block and reads ``width`` input channels."""
    return has(block, name) and matrix(block, name, spec).shape[-1] == width


def bias_of(block: nn.Module, name: str) -> Tensor | None:
    """The bias ``[out]`` of a module, or None; a fused expert parameter has none."""
    owner: Any = block
    for part in name.split("."):
        owner = getattr(owner, part)
    bias = None if isinstance(owner, Tensor) else getattr(owner, "bias", None)
    return None if bias is None else bias.detach()


def producer_rows(block: nn.Module, spec: ModelSpec, fold: Fold, config: Any) -> slice:
    """The rows of the producer's output that the fold scales."""
    height = matrix(block, fold.producer, spec).shape[0 if fold.kind == "norm" else -2]
    if fold.rows == "":
        return slice(0, height)
    if fold.rows == "gate_up:up":
        return slice(height // 2, height)
    if fold.rows == "qkv:v":
        heads = heads_of(config)
        return slice(height - heads.kv * heads.dim, height)
    raise ValueError(f"unknown rows {fold.rows!r} of {fold.producer}; known are 'gate_up:up' and 'qkv:v'")


def width_of(block: nn.Module, spec: ModelSpec, fold: Fold, config: Any) -> int:
    """How many free scales the fold has."""
    rows = producer_rows(block, spec, fold, config)
    return rows.stop - rows.start


def to_columns(fold: Fold, s: Tensor, config: Any) -> Tensor:
    """Producer scale ``[channels]`` -> scale of the consumers' columns ``[in]`` (repeated per query head)."""
    if fold.kind != "value":
        return s
    heads = heads_of(config)
    return s.view(heads.kv, 1, heads.dim).expand(-1, heads.group, -1).reshape(-1)


def pooled(fold: Fold, x: Tensor, config: Any, reduce: str = "mean") -> Tensor:
    """A statistic of the consumers' columns ``[in]`` -> of the producer's channels: "mean" or "max"
    over the query heads that one value channel feeds."""
    if fold.kind != "value":
        return x
    heads = heads_of(config)
    by_head = x.view(heads.kv, heads.group, heads.dim)
    return (by_head.mean(1) if reduce == "mean" else by_head.amax(1)).reshape(-1)


def misfit(block: nn.Module, spec: ModelSpec, fold: Fold, config: Any) -> str | None:
    """Why the fold's shapes do not fit this block, or None."""
    if fold.kind == "value":
        heads = heads_of(config)
        if heads.query % heads.kv:
            return f"{heads.query} query heads are no multiple of {heads.kv} value heads"
        want, columns = heads.kv * heads.dim, heads.query * heads.dim
    else:
        want = columns = width_of(block, spec, fold, config)
    if width_of(block, spec, fold, config) != want:
        return f"{fold.producer} gives {width_of(block, spec, fold, config)} channels instead of {want}"
    for name in fold.consumers:
        have = matrix(block, name, spec).shape[-1]
        if have != columns:
            return f"{name} reads {have} channels, {fold.producer} gives {columns}"
    return None


@torch.no_grad()
def scale(block: nn.Module, spec: ModelSpec, fold: Fold, s: Tensor, config: Any) -> None:
    """Divide the producer's outputs by ``s [channels]`` (positive) and multiply the consumers' columns."""
    weight, bias = matrix(block, fold.producer, spec), bias_of(block, fold.producer)
    s = s.to(weight.dtype)
    if fold.kind == "norm":
        weight.copy_((weight + spec.norm_offset) / s - spec.norm_offset)
        if bias is not None:
            bias.div_(s)
    else:
        rows = producer_rows(block, spec, fold, config)
        weight[..., rows, :].div_(s[:, None])
        if bias is not None:
            bias[rows].div_(s)
    columns = to_columns(fold, s, config)
    for name in fold.consumers:
        matrix(block, name, spec).mul_(columns)


def touched(block: nn.Module, fold: Fold) -> list[Tensor]:
    """All tensors that the fold changes (to save before, and put back when a proof fails)."""
    tensors = [weight_of(block, name).detach() for name in (fold.producer, *fold.consumers)]
    bias = bias_of(block, fold.producer)
    return tensors if bias is None else [*tensors, bias]
