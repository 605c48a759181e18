"""Coordinate descent over codes: every code may move to the best place given all others.

CDQuant (arXiv 2406.17542), QuantEase (arXiv 2309.01885). Feedback never looks back; this does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.stages.feedback import Rows, sweep


def descend(value: Tensor, gradient: Tensor, hessian: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """One sweep over a run of columns: new centred codes and the change of value, each ``[columns, out]``.

    value: what the present codes stand for. gradient: ``H d`` (d = target - value) at these columns. hessian:
    their own block, positive diagonal. rows: scale and bounds of each column. Column j takes the code nearest
    to ``value_j + (H d)_j / H_jj``, the minimum of ``d H dT`` along it; the gradient follows at once, so the
    cost never rises.
    """
    diagonal = hessian.diagonal()
    values = torch.addcmul(value, gradient, diagonal.reciprocal()[:, None])
    moved, change = torch.empty_like(value), torch.empty_like(value)
    sweep(values, hessian / diagonal, rows, moved, change, value)
    return moved, change
