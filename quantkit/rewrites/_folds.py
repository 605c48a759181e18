"""Applying one rescale pair with proof, and what the fold rewrites share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.activations import Seen
from quantkit.models import _folding
from quantkit.modelspec import Fold, ModelSpec
from quantkit.rewrites import TOLERANCE, Probe
from quantkit.scheme import Scheme
from quantkit.skeleton import run_block
from quantkit.stages.grid import minmax, round_to


def title(fold: Fold) -> str:
    """ "mlp.up_proj -> mlp.down_proj"."""
    return f"{fold.producer} -> {', '.join(fold.consumers)}"


def statistics(
    block: nn.Module, spec: ModelSpec, seen: Mapping[str, Seen], fold: Fold
) -> tuple[str, Seen] | None:
    """First linear of the group that reads the fold's output, and its statistics; None when unknown."""
    for group in spec.groups_in(block):
        if set(group) & set(fold.consumers) and group[0] in seen:
            return group[0], seen[group[0]]
    return None


@torch.no_grad()
def fold_if_kept(
    block: nn.Module, spec: ModelSpec, fold: Fold, s: Tensor, config: Any, probe: Probe
) -> str | None:
    """Apply ``s [producer channels]``; None when the block's function is kept, else it is undone and the
    reason comes back."""
    if not bool(torch.isfinite(s).all()) or bool((s <= 0).any()):
        return "the scales are not all positive and finite"
    before = run_block(block, probe.hidden, probe.call)
    saved = [(tensor, tensor.clone()) for tensor in _folding.touched(block, fold)]
    _folding.scale(block, spec, fold, s, config)
    after = run_block(block, probe.hidden, probe.call)
    moved = float((after - before).abs().max() / before.abs().max())
    if moved <= TOLERANCE:  # a NaN fails this too
        return None
    for tensor, old in saved:
        tensor.copy_(old)
    return f"the block's output moved by {moved:.1e} (relative; {TOLERANCE:.0e} is allowed)"


def rounded(weight: Tensor, scheme: Scheme, signed: bool) -> Tensor:
    """``weight [out, in]`` on the plain grid of the scheme, dequantized: what rounding alone would store."""
    rows, columns = weight.shape
    size = scheme.group or columns
    whole = columns - columns % size
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    # all groups of one size at once, each a column of the grid's layout: one call instead of one per group
    for part, width in ((slice(0, whole), size), (slice(whole, columns), columns - whole)):
        if part.start == part.stop:
            continue
        groups = weight[:, part].reshape(-1, width).t()
        grid = minmax(groups, scheme, signed and scheme.activation is None)
        out[:, part] = (round_to(groups, grid, scheme) * grid.scale).t().reshape(rows, -1)
    return out
