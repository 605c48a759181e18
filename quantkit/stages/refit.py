"""Least-squares scales for fixed codes (two-stage scales, arXiv 2602.02126), rounded as they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.qweight import round_scale
from quantkit.scheme import Scheme
from quantkit.stages.grid import Grid


def refit(
    target: Tensor,
    hessian: Tensor,
    codes: Tensor,
    grid: Grid,
    members: list[Tensor],
    scheme: Scheme,
    passes: int = 1,
) -> Grid:
    """Scales with no larger ``d H dT`` (d = target - value) in any output; codes and zero points stay.

    target, codes: float32 ``[in, out]``. members: for each group the positions of its columns, int64.

    One group after the other: with c the group's codes and g = H d, the quadratic along its scale has its
    minimum at ``s + cT g / cT H c``. The step is taken to the nearest storable scale, only where that lowers
    the cost, and never beyond half or twice the old scale. Enough passes reach the joint least-squares
    solution.
    """
    scale = grid.scale.clone()
    difference = target.clone()
    for g, columns in enumerate(members):
        difference[columns] -= codes[columns] * scale[g]
    gradient = hessian @ difference
    for _ in range(passes):
        for g, columns in enumerate(members):
            own = codes[columns]
            curvature = (own * (hessian[columns][:, columns] @ own)).sum(0)
            slope = (own * gradient[columns]).sum(0)
            new = round_scale(scale[g] + slope / curvature.clamp_min(torch.finfo(torch.float32).tiny), scheme)
            step = new - scale[g]
            ratio = new / scale[g]
            good = (step * (2 * slope - step * curvature) > 0) & (ratio > 0.5) & (ratio < 2.0)
            step = torch.where(good, step, 0.0)
            scale[g] += step
            gradient.addmm_(hessian[:, columns], own * step, alpha=-1)
    return Grid(scale, grid.zero)
