"""HQQ's zero points: half-quadratic splitting of a robust rounding error, without data."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.scheme import Scheme
from quantkit.stages.grid import Grid, minmax, round_to


def robust(error: Tensor, power: float) -> Tensor:
    """Sum of ``|error|**power`` over a group, ``[1, out]``; power below 1 forgives few large errors."""
    return error.abs().clamp_min(torch.finfo(torch.float32).tiny).pow(power).sum(0, keepdim=True)


def fit_zero(
    weight: Tensor, scheme: Scheme, power: float = 0.7, steps: int = 20, strength: float = 10.0
) -> Grid:
    """The integer zero point of one group ``weight [columns, out]`` that a robust error prefers.

    HQQ (Mobius Labs, 2023: "Half-Quadratic Quantization of Large Machine Learning Models"). Alternates between
    the outlier part of the error, e = generalized soft threshold of ``w - w_hat``, and the zero point that fits
    ``w - e``: ``zero = mean(q - (w - e) / s)``. HQQ stores a real zero point, plain formats an integer one, so
    each step's zero is rounded before it is judged, and the best seen, the plain range among them, is kept.
    """
    grid = minmax(weight, scheme)
    assert grid.zero is not None
    zero, best = grid.zero, grid
    lowest = robust(weight - round_to(weight, grid, scheme) * grid.scale, power)
    for _ in range(steps):
        code = (torch.round(weight / grid.scale) + zero).round().clamp(0, scheme.max_code)
        error = weight - (code - zero) * grid.scale
        size = error.abs()
        threshold = size.clamp_min(torch.finfo(torch.float32).tiny).pow(power - 1) / strength
        outlier = error.sign() * (size - threshold).clamp_min(0)
        zero = (code - (weight - outlier) / grid.scale).mean(0, keepdim=True)
        strength *= 1.01
        trial = Grid(grid.scale, zero.round().clamp(0, scheme.max_code))
        value = robust(weight - round_to(weight, trial, scheme) * trial.scale, power)
        better = value < lowest
        lowest = torch.where(better, value, lowest)
        assert best.zero is not None and trial.zero is not None
        best = Grid(grid.scale, torch.where(better, trial.zero, best.zero))
    return best
