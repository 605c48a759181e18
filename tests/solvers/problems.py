"""Small random problems and slow, obvious versions of what the stages compute fast. All brute force is float64."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.activations import HessianSum, Seen
from quantkit.scheme import Scheme

ALL_SCHEMES = [
    Scheme(bits, symmetric, group)
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for group in (0, 32, 64, 128)
]


def correlated(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Inputs ``[tokens, width]`` whose channels are correlated and of very different size."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g) / width**0.5
    size = torch.exp(torch.randn(width, generator=g))
    return (
        torch.randn(tokens, width, generator=g) @ mix + torch.randn(tokens, width, generator=g) * 0.3
    ) * size


def seen_of(x: Tensor, x_float: Tensor | None = None) -> Seen:
    total = HessianSum(x.shape[1], cross=x_float is not None)
    total.add(x, x_float)
    return total.seen()


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """``tr(D H DT) / tr(W H WT)`` in float64."""
    w, d, h = weight.double(), (weight - approximation).double(), hessian.double()
    return float(((d @ h) * d).sum() / ((w @ h) * w).sum())


def nearest(values: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Nearest symmetric grid value."""
    return (
        torch.clamp(torch.round(values / scale), -scheme.midpoint, scheme.max_code - scheme.midpoint) * scale
    )


def greedy(outputs: Tensor, inputs: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Exact greedy least squares, ``[rows, in]``: fix columns in turn, every time re-solving for all free ones.

    outputs ``[tokens, rows]`` are to be matched by ``inputs [tokens, in]``; scale ``[rows]``.
    """
    width = inputs.shape[1]
    fixed = torch.zeros(outputs.shape[1], width, dtype=torch.float64)
    for j in range(width):
        rest = outputs - inputs[:, :j] @ fixed[:, :j].T
        free = torch.linalg.lstsq(inputs[:, j:], rest).solution.T
        fixed[:, j] = nearest(free[:, 0], scale, scheme)
    return fixed


def brain_surgeon(weight: Tensor, hessian: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """OBQ (arXiv 2208.11580) in column order: after each column the inverse Hessian loses its row and column."""
    w, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    for j in range(w.shape[1]):
        q = nearest(w[:, j], scale, scheme)
        step = (w[:, j] - q) / inverse[j, j]
        w -= step[:, None] * inverse[j]
        w[:, j] = q
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, :] = 0
        inverse[:, j] = 0
    return w
