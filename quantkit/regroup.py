"""The same weight with other groups, another scale dtype, or an explicit zero point: nothing is rounded
unseen."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.qweight import QuantWeight


def split_groups(weight: QuantWeight, group: int) -> QuantWeight:
    """Give every group's scale to smaller groups: exact. ``group`` must divide the old one (or the row).

    One scale per row of 128 columns becomes four equal scales of group 32. Raises ValueError.
    """
    columns = weight.shape[1]
    old = weight.scheme.group or columns
    if group == weight.scheme.group:
        return weight
    if not group or old % group or columns % group:
        raise ValueError(f"groups of {old} columns cannot be split into groups of {group}")
    index = torch.arange(columns // group) * group // old
    zero = None if weight.zero is None else weight.zero[:, index]
    return QuantWeight(
        weight.scheme.with_(group=group), weight.codes, weight.scale[:, index], zero, weight.order
    )


def cast_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The scales in ``dtype`` and the largest error that the cast made (0.0: exact)."""
    out = scale.to(dtype)
    error = (out.double() - scale.double()).abs()
    return out, float(error.max()) if error.numel() else 0.0


def with_scale_dtype(weight: QuantWeight, name: str) -> QuantWeight:
    """The weight with its scales in another dtype ("float16"); see :func:`cast_scale` for what that costs."""
    scale, _ = cast_scale(weight.scale, getattr(torch, name))
    return QuantWeight(weight.scheme.with_(scale_dtype=name), weight.codes, scale, weight.zero, weight.order)


def with_zero(weight: QuantWeight) -> QuantWeight:
    """A symmetric weight with its implied zero point written out."""
    if weight.zero is not None:
        return weight
    zero = torch.full(weight.scale.shape, weight.scheme.midpoint, dtype=torch.uint8)
    return QuantWeight(weight.scheme.with_(symmetric=False), weight.codes, weight.scale, zero, weight.order)


def difference(a: QuantWeight, b: QuantWeight) -> str | None:
    """None when both stand for the same weights, however grouped and whether or not the zero point is
    implied; else a sentence naming the first difference."""
    if a.scheme.bits != b.scheme.bits:
        return f"{b.scheme.bits} bits instead of {a.scheme.bits}"
    if a.scheme.activation != b.scheme.activation:
        return f"activations {b.scheme.activation} instead of {a.scheme.activation}"
    if a.scheme.symmetric != b.scheme.symmetric:
        a, b = with_zero(a), with_zero(b)
    if a.shape == b.shape and a.scheme.group != b.scheme.group:
        columns = a.shape[1]
        one, two = a.scheme.group or columns, b.scheme.group or columns
        finer = min(one, two)
        if max(one, two) % finer or columns % finer:
            return f"groups of {two} instead of {one}"
        a = a if one == finer else split_groups(a, finer)
        b = b if two == finer else split_groups(b, finer)
        if a.scheme.group != b.scheme.group:  # one of them says 0 for the same row
            a = QuantWeight(a.scheme.with_(group=b.scheme.group), a.codes, a.scale, a.zero, a.order)
    return a.same_as(b)
