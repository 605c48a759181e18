"""Coordinate descent over codes: every code may move to the best place given all others.

CDQuant (arXiv 2406.17542), QuantEase (arXiv 2309.01885). Feedback never looks back; this does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.scheme import Scheme
from quantkit.stages.feedback import rows_of, sweep
from quantkit.stages.grid import Grid


def descend(
    target: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, group_of: list[int], scheme: Scheme
) -> Tensor:
    """One sweep: centred codes ``[in, out]`` with no larger ``d H dT`` (d = target - value) in any output.

    target: float32 ``[in, out]``. hessian: ``[in, in]``, positive diagonal. Column j in turn takes the code
    nearest to ``q_j + (H d)_j / H_jj``, the minimum of the quadratic along that column; the gradient follows
    at once. An output whose cost did not fall (the arithmetic is float32) keeps its codes.
    """
    rows = rows_of(grid, group_of, scheme)
    spread = grid.scale[group_of]
    diagonal = hessian.diagonal()[:, None]
    coupling = hessian / hessian.diagonal()
    current = codes * spread
    difference = target - current
    gradient = hessian @ difference
    values = torch.addcdiv(current, gradient, diagonal.expand_as(gradient))
    moved, change = torch.empty_like(codes), torch.empty_like(codes)
    sweep(values, coupling, rows, moved, change, current)
    before = (difference * gradient).sum(0)
    difference -= change
    gradient.addmm_(hessian, change, alpha=-1)
    return torch.where((difference * gradient).sum(0) < before, moved, codes)
