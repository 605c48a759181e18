"""Turning a Hessian into the triangular factor that GPTQ walks along."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RAISE = 3.0
ATTEMPTS = 8
SMALLEST_RAISED = 1e-4


class NotPositive(ArithmeticError):
    """The Hessian could not be factorized at any damping that was tried."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A damped Hessian ``[in, in]`` and its factor, columns in the order of the walk.

    order: int64 ``[in]`` or None (natural): position p holds column ``order[p]``.
    upper: float32 U, upper triangular, ``UT U = H**-1`` of the damped H (1 on the diagonal of dead columns): row j is how an error in column j spreads over
        the columns that follow, and ``1 / U[j, j]**2`` is what a unit error in column j costs after they
        compensated.
    dead: bool ``[in]``, columns whose input was always zero.
    damping: the fraction of the mean diagonal that was added in the end.
    escalations: how often the damping had to be raised; 0 when the first worked.
    """

    order: Tensor | None
    upper: Tensor
    dead: Tensor
    damping: float
    escalations: int

    @property
    def price(self) -> Tensor:
        """float32 ``[in]``, ``1 / U_jj**2`` in walk order: what GPTQ pays for a unit error in each column."""
        return self.upper.diagonal().square().reciprocal()

    def walk(self, by_column: Tensor) -> Tensor:
        """Rows of ``[in, ...]`` put into walk order."""
        return by_column if self.order is None else by_column[self.order]

    def unwalk(self, by_position: Tensor) -> Tensor:
        """Rows in walk order put back into the weight's own order."""
        if self.order is None:
            return by_position
        by_column = torch.empty_like(by_position)
        by_column[self.order] = by_position
        return by_column


def descending(hessian: Tensor) -> Tensor:
    """Act-order: columns by falling diagonal; equal ones keep their order, so that runs repeat."""
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def damped(hessian: Tensor, fraction: float) -> Tensor:
    """A copy with ``fraction`` of the mean diagonal added, and 1 on the diagonal of dead columns."""
    dead = hessian.diagonal() == 0
    copy = hessian.clone()
    copy.diagonal().add_(fraction * copy.diagonal().mean())
    copy.diagonal()[dead] = 1.0
    return copy


def cholesky(hessian: Tensor, damping: float, order: Tensor | None = None) -> tuple[Tensor, float, int]:
    """Damp and factorize in float64, raising the damping threefold while that fails. Raises NotPositive.

    order: rows and columns are taken in it. Returns the lower factor (float64), the damping it took, how often it
    was raised.
    """
    diagonal = hessian.diagonal().double()
    if order is not None:
        diagonal = diagonal[order]
    mean = float(diagonal.mean()) or 1.0
    fraction = damping
    for attempt in range(ATTEMPTS):
        # Factorized in place, in the column-major view that LAPACK wants: for wide layers each copy of the matrix
        # is a tenth of a gigabyte or two.
        now = _ordered(hessian, order, torch.float64).mT
        now.diagonal().copy_(_damp(diagonal, fraction))
        lower, failed = torch.linalg.cholesky_ex(now, out=(now, torch.empty((), dtype=torch.int32)))
        # Sums in float32 leave noise of 1e-7: a pivot down there is noise, and dividing by it amplifies it.
        if not failed and float(lower.diagonal().min()) ** 2 > 1e-9 * mean:
            return lower, fraction, attempt
        del lower, now
        fraction = max(RAISE * fraction, SMALLEST_RAISED)
    raise NotPositive(f"not positive definite even with {fraction / RAISE:.2g} of its mean diagonal added")


def factorize(hessian: Tensor, damping: float, order: Tensor | None = None) -> Factor:
    """GPTQ's factor. hessian: ``[in, in]`` symmetric, any scale; damping: fraction of the mean diagonal.

    H**-1 = UT U with U upper needs no inverse of H: reversing rows and columns turns Cholesky's lower factor
    into an upper one, H = R RT, and U = R**-1. A third of the work, and better conditioned.
    Raises NotPositive.
    """
    natural = torch.arange(hessian.shape[0])
    walk = natural if order is None else order
    lower, fraction, escalations = cholesky(hessian, damping, walk.flip(0))
    upper = lower.float()
    del lower
    upper = upper.flip(0, 1)
    invert_upper_(upper)
    dead = hessian.diagonal()[walk] == 0
    return Factor(order, upper, dead, fraction, escalations)


def _damp(diagonal: Tensor, fraction: float) -> Tensor:
    """``fraction`` of the mean added; 1 where a column is dead."""
    return torch.where(diagonal == 0, 1.0, diagonal + fraction * diagonal.mean())


def _ordered(matrix: Tensor, order: Tensor | None, dtype: torch.dtype, rows: int = 512) -> Tensor:
    """A private copy with rows and columns in ``order``, made a few rows at a time."""
    if order is None:
        return matrix.to(dtype, copy=True)
    out = torch.empty(matrix.shape, dtype=dtype)
    for at in range(0, len(order), rows):
        out[at : at + rows] = matrix[order[at : at + rows]][:, order]
    return out


def invert_upper_(upper: Tensor, leaf: int = 64) -> None:
    """Invert an upper triangular matrix in place, by halves: matrix products, and no work on the zeros below."""
    size = upper.shape[0]
    if size <= leaf:
        upper.copy_(torch.linalg.solve_triangular(upper, torch.eye(size, dtype=upper.dtype), upper=True))
        return
    half = size // 2
    left, right, corner = upper[:half, :half], upper[half:, half:], upper[:half, half:]
    invert_upper_(left, leaf)
    invert_upper_(right, leaf)
    corner.copy_((left @ corner @ right).neg_())
