"""What every solver needs around its mathematics: checks, solving siblings together, judging the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.activations import NonFinite, Seen
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from quantkit.solvers import Solution
from quantkit.stages.damping import Factor
from quantkit.stages.grid import Grid, minmax, round_to, search, spans, squared, stack


@dataclass(slots=True)
class Answer:
    """Codes for a stack of outputs, columns in the weight's own order.

    codes: centred, float32 ``[in, out]``. target: what they approximate, ``[in, out]``; None means the
        weight.
    order: see :class:`quantkit.qweight.QuantWeight`.
    """

    codes: Tensor
    grid: Grid
    target: Tensor | None = None
    order: Tensor | None = None
    notes: list[str] = field(default_factory=list)

    def rows(self, first: int, last: int, scheme: Scheme) -> QuantWeight:
        """The outputs ``first .. last`` as a QuantWeight."""
        scale = self.grid.scale[:, first:last].T.contiguous()
        zero = None if self.grid.zero is None else self.grid.zero[:, first:last].T.contiguous()
        index = spans(len(self.codes), scheme.group)
        centred = self.codes[:, first:last].T
        if zero is None:
            codes = centred + scheme.midpoint
        else:
            sizes = torch.tensor([stop - start for start, stop in index])
            spread = torch.repeat_interleave(zero, sizes, dim=1)
            if self.order is not None:
                by_column = torch.empty_like(spread)
                by_column[:, self.order] = spread
                spread = by_column
            codes = centred + spread
        return QuantWeight(
            scheme,
            codes.to(torch.uint8).contiguous(),
            scale.to(getattr(torch, scheme.scale_dtype)),
            None if zero is None else zero.to(torch.uint8),
            self.order,
        )


class RowSolver(ABC):
    """Base of the solvers. A solver writes ``prepare`` (per Hessian) and ``answer`` (per stack of outputs).

    The outputs of a linear are separate problems that share the Hessian, and so are those of all linears with
    the
    same input: q, k and v are solved as one tall weight. That shares the factorization and the walk over
        columns.
    """

    def solve(self, weight: Tensor, seen: Seen | None, scheme: Scheme) -> Solution:
        """One linear, ``weight`` ``[out, in]``. Raises NonFinite. The same as :meth:`solve_group` of one."""
        return self.solve_group([weight], seen, scheme)[0]

    def solve_group(
        self, weights: Sequence[Tensor], seen: Seen | None, schemes: Scheme | Sequence[Scheme]
    ) -> list[Solution]:
        """Linears that share an input, each ``[out, in]``; one scheme for all or one each; answers in their
        order.

        Raises NonFinite when a weight or a statistic holds NaN or infinity, ValueError when shapes disagree.
        """
        if isinstance(schemes, Scheme):
            schemes = [schemes] * len(weights)
        if len(schemes) != len(weights):
            raise ValueError(f"{len(schemes)} schemes for {len(weights)} weights")
        _check(weights, seen)
        prepared = self.prepare(seen)
        solutions: list[Solution | None] = [None] * len(weights)
        for scheme in dict.fromkeys(schemes):
            members = [i for i, own in enumerate(schemes) if own == scheme]
            tall = torch.cat([weights[i].float() for i in members]).T.contiguous()
            answer = self.answer(tall, prepared, seen, scheme)
            heights = [len(weights[i]) for i in members]
            for i, solution in zip(members, _judge(tall, answer, heights, seen, scheme), strict=True):
                solutions[i] = solution
        return [s for s in solutions if s is not None]

    def prepare(self, seen: Seen | None):
        """Work that depends on the statistics alone; handed to every ``answer`` of the group."""
        return None

    @abstractmethod
    def answer(self, weight: Tensor, prepared, seen: Seen | None, scheme: Scheme) -> Answer:
        """Codes for ``weight`` ``[in, out]`` (transposed), float32."""


def _check(weights: Sequence[Tensor], seen: Seen | None) -> None:
    for weight in weights:
        _finite("weights", weight)
        if weight.ndim != 2 or weight.shape[1] != weights[0].shape[1]:
            raise ValueError(f"weights of one group must be [out, in] of equal width, not {tuple(weight.shape)}")
    if seen is None:
        return
    width = weights[0].shape[1]
    for name, matrix in (("Hessian entries", seen.hessian), ("cross-term entries", seen.cross)):
        if matrix is None:
            continue
        if tuple(matrix.shape) != (width, width):
            raise ValueError(f"statistics of width {tuple(matrix.shape)} for a weight of width {width}")
        _finite(name, matrix)


def _finite(name: str, tensor: Tensor) -> None:
    # A sum is NaN or infinite as soon as one entry is: one pass without a mask in the good case.
    if not torch.isfinite(tensor.sum(dtype=torch.float64)):
        bad = int((~torch.isfinite(tensor)).sum())
        raise NonFinite(f"{bad} of {tensor.numel()} {name} are NaN or infinite")


def rounded(weight: Tensor, scheme: Scheme, choose: Callable[[Tensor, slice], Grid]) -> Answer:
    """Nearest codes of ``weight`` ``[in, out]``; choose(group's weights, its columns) gives each group's grid."""
    places = [slice(*span) for span in spans(len(weight), scheme.group)]
    grids = [choose(weight[at], at) for at in places]
    codes = torch.cat([round_to(weight[at], grid, scheme) for at, grid in zip(places, grids, strict=True)])
    return Answer(codes, stack(grids))


def plain(weight: Tensor, scheme: Scheme) -> Answer:
    """Rounding to the plain range: the yardstick."""
    return rounded(weight, scheme, lambda run, at: minmax(run, scheme))


def searched(weight: Tensor, scheme: Scheme, seen: Seen, signed: bool) -> Answer:
    """Rounding with scales that weight each column by its activation energy; needs no factorization."""
    energy = seen.hessian.diagonal().clamp_min(0)
    return rounded(weight, scheme, lambda run, at: search(run, scheme, squared(energy[at]), signed))


def hessian_notes(factor: Factor, asked: float, tokens: int) -> list[str]:
    """What the user must hear about the statistics a solve stands on."""
    notes = []
    width = len(factor.dead)
    if factor.escalations:
        notes.append(f"damping raised from {asked:g} to {factor.damping:.3g} of the mean diagonal to factorize")
    if dead := int(factor.dead.sum()):
        notes.append(f"{dead} of {width} input channels were always zero in calibration")
    if tokens < width:
        notes.append(f"{tokens} calibration tokens cannot determine {width} input channels; use more")
    return notes


def costs(difference: Tensor, hessian: Tensor | None) -> Tensor:
    """``d H dT`` of every output, ``[out]``, for differences ``[in, out]``; ``d dT`` without a Hessian."""
    moved = difference if hessian is None else hessian @ difference
    return (moved * difference).sum(0)


def value(codes: Tensor, grid: Grid, group: int, order: Tensor | None = None) -> Tensor:
    """The weight ``[in, out]`` that centred codes stand for."""
    width = len(codes)
    positions = codes if order is None else codes[order]
    parts = [positions[a:b] * grid.scale[g] for g, (a, b) in enumerate(spans(width, group))]
    together = torch.cat(parts)
    if order is None:
        return together
    by_column = torch.empty_like(together)
    by_column[order] = together
    return by_column


def _judge(
    weight: Tensor, answer: Answer, heights: list[int], seen: Seen | None, scheme: Scheme
) -> list[Solution]:
    """Compare with plain rounding, linear by linear, on the answer's own target; hand out the better of the two."""
    hessian = None if seen is None else seen.hessian
    target = weight if answer.target is None else answer.target
    yardstick = plain(weight, scheme)
    ours = costs(target - value(answer.codes, answer.grid, scheme.group, answer.order), hessian)
    theirs = costs(target - value(yardstick.codes, yardstick.grid, scheme.group), hessian)
    energy = costs(weight, hessian)
    solutions, first = [], 0
    for height in heights:
        last = first + height
        total = float(energy[first:last].sum().clamp_min(torch.finfo(torch.float32).tiny))
        error, baseline = (float(c[first:last].sum().clamp_min(0)) / total for c in (ours, theirs))
        notes, chosen = list(answer.notes), answer
        if error > baseline:
            notes.append(f"worse than rounding ({error:.4g} against {baseline:.4g}): rounding is used instead")
            chosen, error = yardstick, baseline
        solutions.append(Solution(chosen.rows(first, last, scheme), error, baseline, notes))
        first = last
    return solutions
