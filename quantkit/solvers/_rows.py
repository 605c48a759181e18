"""What every solver needs around its mathematics: checks, solving siblings together, judging the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.activations import NonFinite, Seen
from quantkit.qweight import QuantWeight, group_index
from quantkit.scheme import Scheme
from quantkit.solvers import Solution
from quantkit.stages.damping import Factor
from quantkit.stages.grid import Grid, minmax, per_group, round_to, search, spans, squared

# Weights solved at once. The work arrays of a solve are about eight times this many float32 numbers.
AT_ONCE = 2**21


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

    def value(self, scheme: Scheme) -> Tensor:
        """The weight ``[in, out]`` that the codes stand for."""
        return self.codes * self.grid.scale[group_index(len(self.codes), scheme.group, self.order)]

    def packed(self, scheme: Scheme) -> QuantWeight:
        """The same as a QuantWeight ``[out, in]``."""
        zero = self.grid.zero
        index = group_index(len(self.codes), scheme.group, self.order)
        codes = self.codes + (scheme.midpoint if zero is None else zero[index])
        return QuantWeight(
            scheme,
            codes.to(torch.uint8).T.contiguous(),
            self.grid.scale.to(getattr(torch, scheme.scale_dtype)).T.contiguous(),
            None if zero is None else zero.to(torch.uint8).T.contiguous(),
            self.order,
        )


class RowSolver(ABC):
    """Base of the solvers. A solver writes ``prepare`` (per Hessian) and ``answer`` (per stack of outputs).

    The outputs of a linear are separate problems that share the Hessian, and so are those of all linears with
    the same input: q, k and v are solved as one tall weight, with one factorization and one walk over
        columns.
    """

    def solve(self, weight: Tensor, seen: Seen | None, scheme: Scheme) -> Solution:
        """One linear, ``weight`` ``[out, in]``: :meth:`solve_group` of one."""
        return self.solve_group([weight], seen, scheme)[0]

    def solve_group(
        self, weights: Sequence[Tensor], seen: Seen | None, schemes: Scheme | Sequence[Scheme]
    ) -> list[Solution]:
        """Linears that share an input, each ``[out, in]``; one scheme for all or one each; answers in order.

        Raises NonFinite when a weight or a statistic holds NaN or infinity, ValueError when shapes disagree
        or when statistics are missing that the solver's options ask for.
        """
        if isinstance(schemes, Scheme):
            schemes = [schemes] * len(weights)
        if len(schemes) != len(weights):
            raise ValueError(f"{len(schemes)} schemes for {len(weights)} weights")
        _check(weights, seen)
        prepared = self.prepare(seen)
        found: dict[int, Solution] = {}
        for scheme in dict.fromkeys(schemes):
            members = [i for i, own in enumerate(schemes) if own == scheme]
            stacked = self._solve_stack([weights[i].float() for i in members], prepared, seen, scheme)
            found.update(zip(members, stacked, strict=True))
        return [found[i] for i in range(len(weights))]

    def prepare(self, seen: Seen | None) -> Any:
        """Work that depends on the statistics alone; handed to every ``answer`` of the group."""
        return None

    @abstractmethod
    def answer(self, weight: Tensor, prepared: Any, seen: Seen | None, scheme: Scheme) -> Answer:
        """Codes for ``weight`` ``[in, out]`` (transposed), float32."""

    def _solve_stack(
        self, weights: list[Tensor], prepared: Any, seen: Seen | None, scheme: Scheme
    ) -> list[Solution]:
        hessian = None if seen is None else seen.hessian
        notes: dict[str, None] = {}
        parts, costs = [], []
        tall = torch.cat(weights)
        for piece in tall.split(max(1, AT_ONCE // tall.shape[1])):
            weight = piece.T.contiguous()
            answer = self.answer(weight, prepared, seen, scheme)
            target = weight if answer.target is None else answer.target
            rivals = (answer.value(scheme), plain(weight, scheme).value(scheme))
            differences = [target - rivals[0], target - rivals[1], weight]
            costs.append(torch.stack([_cost(d, hessian) for d in differences]))
            parts.append(answer.packed(scheme))
            notes.update(dict.fromkeys(answer.notes))
        solved, cost = _joined(parts), torch.cat(costs, dim=1).double()

        solutions, first = [], 0
        for weight in weights:
            rows = slice(first, first + len(weight))
            first = rows.stop
            ours, theirs, energy = cost[:, rows].sum(1).clamp_min(0).tolist()
            error, baseline = ours / (energy or 1.0), theirs / (energy or 1.0)
            solution = Solution(_rows(solved, rows), error, baseline, list(notes))
            if error > baseline:
                solution.weight = plain(weight.T.contiguous(), scheme).packed(scheme)
                solution.error = baseline
                solution.notes.append(
                    f"worse than rounding ({error:.4g} against {baseline:.4g}): rounding is used instead"
                )
            solutions.append(solution)
        return solutions


def rounded(weight: Tensor, scheme: Scheme, choose: Callable[[Tensor, slice], Grid]) -> Answer:
    """Nearest codes of ``weight`` ``[in, out]``; choose(its weights, its columns) gives a group's grid."""
    grid = per_group(weight, scheme, choose)
    places = (slice(*span) for span in spans(len(weight), scheme.group))
    codes = [round_to(weight[at], row, scheme) for at, row in zip(places, grid.rows(), strict=True)]
    return Answer(torch.cat(codes), grid)


def plain(weight: Tensor, scheme: Scheme) -> Answer:
    """Rounding to the plain range: the yardstick."""
    return rounded(weight, scheme, lambda run, at: minmax(run, scheme))


def searched(weight: Tensor, scheme: Scheme, seen: Seen, signed: bool, why: str) -> Answer:
    """The fallback: rounding, scales chosen with each column weighted by its activation energy."""
    energy = seen.hessian.diagonal().clamp_min(0)
    answer = rounded(weight, scheme, lambda run, at: search(run, scheme, squared(energy[at]), signed))
    answer.notes.append(f"{why}: rounded with activation-weighted scales instead")
    return answer


def hessian_notes(factor: Factor, asked: float, tokens: int) -> list[str]:
    """What the user must hear about the statistics that a solve stands on."""
    notes = []
    width = len(factor.dead)
    if factor.escalations:
        notes.append(f"damping raised from {asked:g} to {factor.damping:.3g} of the mean diagonal")
    if dead := int(factor.dead.sum()):
        notes.append(f"{dead} of {width} input channels were always zero in calibration")
    if tokens < width:
        notes.append(f"{tokens} calibration tokens cannot determine {width} input channels; use more")
    return notes


def _cost(difference: Tensor, hessian: Tensor | None) -> Tensor:
    """``d H dT`` of every output, ``[out]``, for differences ``[in, out]``; ``d dT`` without a Hessian."""
    if hessian is None:
        return difference.square().sum(0)
    total = torch.zeros(difference.shape[1])
    for start, stop in spans(len(difference), 192):
        # H is symmetric: what lies beyond the diagonal block counts twice, what lies before was counted.
        own = difference[start:stop]
        moved = hessian[start:stop, start:stop] @ own
        moved.addmm_(hessian[start:stop, stop:], difference[stop:], alpha=2)
        total += (moved * own).sum(0)
    return total


def _rows(weight: QuantWeight, rows: slice) -> QuantWeight:
    zero = None if weight.zero is None else weight.zero[rows].clone()
    codes, scale = weight.codes[rows].clone(), weight.scale[rows].clone()
    return QuantWeight(weight.scheme, codes, scale, zero, weight.order)


def _joined(parts: list[QuantWeight]) -> QuantWeight:
    """Outputs of several solves with the same Hessian as one weight."""
    zeros = [p.zero for p in parts if p.zero is not None]
    return QuantWeight(
        parts[0].scheme,
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat(zeros) if zeros else None,
        parts[0].order,
    )


def _check(weights: Sequence[Tensor], seen: Seen | None) -> None:
    width = weights[0].shape[-1]
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != width:
            raise ValueError(f"weights of one group are [out, in] of equal width, not {tuple(weight.shape)}")
        _finite("weights", weight)
    if seen is None:
        return
    for name, matrix in (("Hessian entries", seen.hessian), ("cross-term entries", seen.cross)):
        if matrix is None:
            continue
        if tuple(matrix.shape) != (width, width):
            raise ValueError(f"statistics of shape {tuple(matrix.shape)} for a weight of width {width}")
        _finite(name, matrix)


def _finite(name: str, tensor: Tensor) -> None:
    # A sum is NaN or infinite as soon as one entry is: one pass without a mask in the good case.
    if not torch.isfinite(tensor.sum(dtype=torch.float64)):
        bad = int((~torch.isfinite(tensor)).sum())
        raise NonFinite(f"{bad} of {tensor.numel()} {name} are NaN or infinite")
