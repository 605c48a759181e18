"""HQQ's zero points: half-quadratic splitting of a robust rounding error, without data."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.scheme import Scheme
from quantkit.stages.grid import Grid, minmax, round_to

TINY = torch.finfo(torch.float32).tiny


def robust(error: Tensor, power: float) -> Tensor:
    """Sum of ``|error|**power`` over a group, ``[1, out]``; a power below 1 forgives few large errors."""
    return error.abs().clamp_min(TINY).pow(power).sum(0, keepdim=True)


def fit_zero(weight: Tensor, scheme: Scheme, power: float, steps: int, strength: float = 10.0) -> Grid:
    """The integer zero point of one group ``weight [columns, out]`` that a robust error prefers.

    HQQ (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", Mobius Labs 2023).
    Alternates between the outlying part e of the error, a generalized soft threshold of it, and the zero
    point that fits the rest: ``zero = mean(code - (w - e) / s)``. Errors are in units of the scale, so the
    result does not depend on the weight's size. HQQ stores a real zero point, plain formats an integer: it is
    rounded before it is judged, and an output takes it only where the robust error falls and the squared one
    does not rise.
    """
    best = minmax(weight, scheme)
    units = weight / best.scale

    def measure(grid: Grid) -> tuple[Tensor, Tensor]:
        error = units - round_to(weight, grid, scheme)
        return robust(error, power), error.square().sum(0, keepdim=True)

    lowest, plain = measure(best)
    assert best.zero is not None, "a symmetric scheme has no zero point to fit"
    zero = best.zero
    for _ in range(steps):
        code = (units + zero).round().clamp(0, scheme.max_code)
        error = units - (code - zero)
        size = error.abs()
        outlying = error.sign() * (size - size.clamp_min(TINY).pow(power - 1) / strength).clamp_min(0)
        zero = (code - (units - outlying)).mean(0, keepdim=True)
        strength *= 1.01
        rounded = zero.round().clamp(0, scheme.max_code)
        value, square = measure(Grid(best.scale, rounded))
        better = (value < lowest) & (square <= plain)
        lowest = torch.where(better, value, lowest)
        best = Grid(best.scale, torch.where(better, rounded, best.zero))
    return best
