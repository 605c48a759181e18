"""Correcting a layer for the errors that the layers before it already made."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.stages.damping import Factor


def qep_target(weight: Tensor, cross: Tensor, lower: Tensor, strength: float) -> Tensor:
    """What to round instead of W: ``W* = W + strength * W A (H + damping)**-1`` (QEP, arXiv 2504.09629).

    weight: ``[in, out]``; cross: A ``[in, in]``, ``sum (x_float - x) xT`` in the Hessian's units; lower: the
    damped Hessian's Cholesky factor; columns of all three in the same order. With strength 1 and no damping,
    W* times the inputs seen here is the least-squares fit of the unquantized layer's output, so feedback from
    W* is exact greedy least squares for ``|W X_float - W^ X|``.
    """
    return weight + strength * torch.cholesky_solve(cross.T @ weight, lower.to(weight.dtype))


def gptaq(weight: Tensor, cross: Tensor, factor: Factor, strength: float) -> tuple[Tensor, Tensor]:
    """GPTAQ (arXiv 2504.02692) as an ordinary feedback problem: ``(weight, coupling)`` for :mod:`feedback`.

    GPTAQ adds ``v_j P[j, k]`` to every later column k as the walk passes value v_j, with
    ``P = strength * triu(A UT, 1) U``. The recursion ``V = W - D M + V P`` (D: rounding errors, M: plain
    coupling) is linear in V: ``V = W (1 - P)**-1 - D M (1 - P)**-1``, plain feedback with another weight and
    coupling.
    """
    upper = factor.upper
    spread = torch.triu(strength * torch.triu(cross @ upper.T, 1) @ upper, 1)
    unit = torch.eye(len(upper)) - spread
    coupling = torch.triu(upper / upper.diagonal()[:, None], 1)
    changed = torch.linalg.solve_triangular(unit, coupling, upper=True, left=False, unitriangular=True)
    moved = torch.linalg.solve_triangular(unit.T, weight, upper=False, unitriangular=True)
    return moved, changed
