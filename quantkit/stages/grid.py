"""Choosing scales and zero points before codes exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.qweight import group_index, round_scale
from quantkit.scheme import Scheme

# Shrinking (and slightly growing) the plain range: the first pass, and the half step that refines its winner.
COARSE = tuple(1.09 - 0.06 * i for i in range(12))
FINE = (0.03, -0.03, 0.015, -0.015)


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zero points, ``[groups, out]``; with ``centred = code - zero`` a weight is ``centred *
    scale``.

    scale: float32, already rounded to the stored dtype. zero: float32 integers, or None when symmetric.
    """

    scale: Tensor
    zero: Tensor | None

    def bounds(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Smallest and largest centred code, each ``[groups, out]``."""
        zero = torch.full_like(self.scale, scheme.midpoint) if self.zero is None else self.zero
        return -zero, scheme.max_code - zero

    def rows(self) -> list[Grid]:
        """One grid ``[1, out]`` per group."""
        zeros = [None] * len(self.scale) if self.zero is None else self.zero.split(1)
        return [Grid(scale, zero) for scale, zero in zip(self.scale.split(1), zeros, strict=True)]


def stack(grids: list[Grid]) -> Grid:
    """Grids of consecutive groups as one."""
    zeros = [g.zero for g in grids if g.zero is not None]
    return Grid(torch.cat([g.scale for g in grids]), torch.cat(zeros) if zeros else None)


def spans(columns: int, group: int) -> list[tuple[int, int]]:
    """First and last-plus-one position of each group; the last may be short."""
    step = group or columns
    return [(start, min(start + step, columns)) for start in range(0, columns, step)]


def group_of(columns: int, group: int, order: Tensor | None) -> list[int]:
    """The group of each position of a walk when groups are runs of the weight's own columns."""
    index = group_index(columns, group)
    return (index if order is None else index[order]).tolist()


def per_group(weight: Tensor, scheme: Scheme, choose: Callable[[Tensor, slice], Grid]) -> Grid:
    """choose(group's weights ``[columns, out]``, their columns) for every group, as one grid."""
    places = [slice(*span) for span in spans(len(weight), scheme.group)]
    return stack([choose(weight[at], at) for at in places])


def minmax(weight: Tensor, scheme: Scheme, signed: bool = False, shrink: float | Tensor = 1.0) -> Grid:
    """The plain range of one group ``weight [columns, out]``, times ``shrink``.

    Symmetric: ``s = max|w| / (2**(b-1) - 1/2)`` (GPTQ), or signed full range: ``s = -w_ext / 2**(b-1)`` with
    w_ext the element of largest magnitude, which then gets the extra negative code exactly (llama.cpp Q4_0,
    AutoRound).
    Asymmetric: ``s = (hi - lo) / (2**b - 1)`` over a range that holds 0, ``zero = round(-lo / s)``.
    """
    low, high = weight.amin(0, keepdim=True), weight.amax(0, keepdim=True)
    if not scheme.symmetric:
        low, high = low.clamp_max(0) * shrink, high.clamp_min(0) * shrink
        scale = round_scale((high - low) / scheme.max_code, scheme)
        return Grid(scale, torch.round(-low / scale).clamp_(0, scheme.max_code))
    reach = torch.maximum(-low, high) * shrink
    if not signed:
        return Grid(round_scale(reach / (scheme.max_code / 2), scheme), None)
    sign = torch.where(high >= -low, -1.0, 1.0)
    return Grid(round_scale(sign * reach / scheme.midpoint, scheme), None)


def round_to(weight: Tensor, grid: Grid, scheme: Scheme) -> Tensor:
    """Nearest centred codes of one group, float32 ``[columns, out]``; grid ``[1, out]``.

    The same numbers as :func:`quantkit.qweight.to_codes` less the zero point.
    """
    low, high = grid.bounds(scheme)
    return (weight / grid.scale).round_().clamp_(low, high)


# loss(error [columns, out]) -> [1, out], one number per output
Loss = Callable[[Tensor], Tensor]


def squared(weights: Tensor | None = None) -> Loss:
    """Sum over the group of ``weights_j * error_j**2``; weights ``[columns]``, or 1."""
    if weights is None:
        return lambda error: error.square_().sum(0, keepdim=True)
    row = weights[None]
    return lambda error: row @ error.square_()


def quadratic(hessian: Tensor) -> Loss:
    """``errorT H_gg error`` with the group's own block of the Hessian, for rounding without compensation."""
    return lambda error: ((hessian @ error).mul_(error)).sum(0, keepdim=True)


def search(weight: Tensor, scheme: Scheme, loss: Loss, signed: bool = False) -> Grid:
    """The candidate of smallest loss for every output of one group ``weight [columns, out]``.

    Candidates are the plain range times 0.4 to 1.1, first in steps of .06, then two halvings around each
    output's best; ``signed`` tries both signs of the scale. The plain range itself is the first candidate, so
    the result is never worse than it. Scales are rounded to their stored dtype before they are judged.
    """
    best = _Best(weight, scheme, loss)
    for sign in (1, -1) if signed and scheme.symmetric else (1,):
        for shrink in (1.0, *COARSE):
            best.offer(shrink, sign)
    for step in FINE:
        best.offer(best.shrink + step, best.sign)
    return best.grid


class _Best:
    """The best candidate so far, output by output."""

    def __init__(self, weight: Tensor, scheme: Scheme, loss: Loss) -> None:
        self.weight, self.scheme, self.loss = weight, scheme, loss
        self.grid = minmax(weight, scheme)
        self.value = torch.full_like(self.grid.scale, torch.inf)
        self.shrink, self.sign = torch.ones_like(self.value), torch.ones_like(self.value)
        self._low, self._high = weight.amin(0, keepdim=True), weight.amax(0, keepdim=True)

    def offer(self, shrink: float | Tensor, sign: float | Tensor) -> None:
        grid = self._grid(shrink, sign)
        error = round_to(self.weight, grid, self.scheme).mul_(grid.scale).sub_(self.weight)
        value = self.loss(error)
        better = value < self.value
        self.value = torch.where(better, value, self.value)
        self.shrink = torch.where(better, torch.as_tensor(shrink), self.shrink)
        self.sign = torch.where(better, torch.as_tensor(sign, dtype=value.dtype), self.sign)
        zero = None
        if grid.zero is not None and self.grid.zero is not None:
            zero = torch.where(better, grid.zero, self.grid.zero)
        self.grid = Grid(torch.where(better, grid.scale, self.grid.scale), zero)

    def _grid(self, shrink: float | Tensor, sign: float | Tensor) -> Grid:
        # The two extremes stand for the group: its plain range depends on nothing else.
        grid = minmax(torch.cat([self._low, self._high]), self.scheme, shrink=shrink)
        return grid if grid.zero is not None else Grid(grid.scale * sign, None)
