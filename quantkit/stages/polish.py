"""Lowering the output error of a finished rounding, group by group: codes descend, scales are refitted."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.qweight import group_index
from quantkit.scheme import Scheme
from quantkit.stages.descent import descend
from quantkit.stages.feedback import rows_of
from quantkit.stages.grid import Grid, spans
from quantkit.stages.refit import refit


def polish(
    target: Tensor,
    hessian: Tensor,
    codes: Tensor,
    grid: Grid,
    scheme: Scheme,
    passes: int = 1,
    move_codes: bool = True,
    move_scales: bool = True,
) -> tuple[Tensor, Grid]:
    """Centred codes ``[in, out]`` and a grid with no larger ``d H dT`` (d = target - value) in any output.

    target: float32 ``[in, out]``, columns in the weight's own order, groups side by side. hessian: ``[in,
    in]`` with positive diagonal. One product with H at the start, one per pass: while a group is worked on
    only its own gradient must follow, the rest follows once per group.
    """
    scale = grid.scale.clone()
    best = codes.clone()
    value = codes * scale[group_index(len(codes), scheme.group)]
    difference = target - value
    gradient = hessian @ difference
    before = (difference * gradient).sum(0)
    for _ in range(passes):
        for g, (start, stop) in enumerate(spans(len(codes), scheme.group)):
            own = slice(start, stop)
            block, old = hessian[own, own], value[own].clone()
            if move_codes:
                rows = rows_of(Grid(scale, grid.zero), [g] * (stop - start), scheme)
                best[own], change = descend(old, gradient[own], block, rows)
                gradient[own].addmm_(block, change, alpha=-1)
            if move_scales:
                step, pull = refit(best[own], scale[g], gradient[own], block, scheme)
                scale[g] += step
                gradient[own] -= pull * step
            torch.mul(best[own], scale[g], out=value[own])
            moved = value[own] - old
            gradient[:start].addmm_(hessian[:start, own], moved, alpha=-1)
            gradient[stop:].addmm_(hessian[stop:, own], moved, alpha=-1)
    # Exact arithmetic cannot raise the cost; where float32 did, the output stays as it was.
    better = ((target - value) * gradient).sum(0) < before
    return torch.where(better, best, codes), Grid(torch.where(better, scale, grid.scale), grid.zero)
