"""The least-squares scale of a group for fixed codes (two-stage scales, arXiv 2602.02126), as stored."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.qweight import round_scale
from quantkit.scheme import Scheme

TINY = torch.finfo(torch.float32).tiny


def refit(
    codes: Tensor, scale: Tensor, gradient: Tensor, hessian: Tensor, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Step of one group's scales, ``[out]``, and ``H c`` ``[columns, out]``, by which the gradient follows.

    codes: centred, c ``[columns, out]``; gradient: g = ``H d`` at these columns; hessian: their own block.
    Along the scale ``d H dT`` is a parabola with its minimum at ``scale + cT g / cT H c``. The step goes to
    the nearest storable scale, only where that lowers the cost, and never beyond half or twice the old scale.
    """
    pull = hessian @ codes
    curvature = (codes * pull).sum(0)
    slope = (codes * gradient).sum(0)
    wanted = round_scale(scale + slope / curvature.clamp_min(TINY), scheme)
    step, ratio = wanted - scale, wanted / scale
    good = (step * (2 * slope - step * curvature) > 0) & (ratio > 0.5) & (ratio < 2.0)
    return torch.where(good, step, 0.0), pull
