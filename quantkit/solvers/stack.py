"""The balanced stack: GPTQ on a searched grid, corrected for upstream error, then polished."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from quantkit.activations import Seen
from quantkit.scheme import Scheme
from quantkit.solvers._rows import Answer, RowSolver, hessian_notes, searched
from quantkit.stages import feedback
from quantkit.stages.damping import Factor, NotPositive, cholesky, damped, descending, factorize
from quantkit.stages.grid import Grid, group_of, minmax, per_group, search, squared
from quantkit.stages.polish import polish
from quantkit.stages.upstream import qep_target


@plain_dataclass(slots=True)
class Prepared:
    """Shared by all linears of one input."""

    factor: Factor
    correction: Tensor | None  # Cholesky factor of the Hessian with the correction's damping
    metric: Tensor  # the damped Hessian that polishing lowers


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Solver(RowSolver):
    """Static act-order GPTQ, scales searched by GPTQ's own prices, QEP target, descent and scale refits.

    damping: fraction of the Hessian's mean diagonal added to it; raised threefold while the factorization
        fails.
    correction: strength of the upstream correction (QEP), 0 to 1; above 0 it needs the cross term.
    correction_damping: the same fraction inside the correction's inverse. Full strength with little damping
        fits the calibration text better and other text worse.
    grid: "omega" (weighted by 1/U_jj**2), "mse" or "minmax"; 8-bit codes always take "minmax", where clipping
        costs more than it gains.
    signed: let symmetric scales take either sign, so that the extra code serves the larger side.
    rounds: how often codes descend and scales are refitted, in turn. Each step only lowers the output error,
        in the damped metric, which held up better on text from another domain.
    """

    damping: float = Field(default=0.1, ge=0)
    correction: float = Field(default=0.5, ge=0, le=1)
    correction_damping: float = Field(default=0.1, ge=0)
    grid: Literal["omega", "mse", "minmax"] = "omega"
    signed: bool = True
    rounds: int = Field(default=2, ge=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hessian", "cross"} if self.correction else {"hessian"})

    def prepare(self, seen: Seen | None) -> Prepared | NotPositive:
        if seen is None or (self.correction and seen.cross is None):
            what = "a Hessian" if seen is None else "the cross term of the upstream correction"
            raise ValueError(f"stack needs calibration data: {what} is missing")
        order = descending(seen.hessian)
        try:
            factor = factorize(seen.hessian, self.damping, order)
            correction = None
            if self.correction:
                correction = cholesky(seen.hessian, self.correction_damping)[0].float()
        except NotPositive as failure:
            return failure
        return Prepared(factor, correction, damped(seen.hessian, factor.damping))

    def answer(
        self, weight: Tensor, prepared: Prepared | NotPositive, seen: Seen | None, scheme: Scheme
    ) -> Answer:
        assert seen is not None  # prepare has refused
        if isinstance(prepared, NotPositive):
            return searched(weight, scheme, seen, self.signed, f"Hessian {prepared}")
        factor = prepared.factor
        target = weight
        if prepared.correction is not None and seen.cross is not None:
            target = qep_target(weight, seen.cross, prepared.correction, self.correction)
        price = factor.unwalk(factor.price)
        grid = per_group(target, scheme, lambda run, at: self._choose(run, price[at], scheme))
        index = group_of(len(weight), scheme.group, factor.order)
        walk = factor.walk(target)
        codes = feedback.static(walk, feedback.normalised(factor.upper), grid, index, scheme)
        codes = factor.unwalk(codes)
        if self.rounds:
            codes, grid = polish(target, prepared.metric, codes, grid, scheme, self.rounds)
        notes = hessian_notes(factor, self.damping, seen.tokens)
        return Answer(codes, grid, target=target, notes=notes)

    def _choose(self, run: Tensor, price: Tensor, scheme: Scheme) -> Grid:
        if self.grid == "minmax" or scheme.bits == 8:
            return minmax(run, scheme, self.signed)
        return search(run, scheme, squared(price if self.grid == "omega" else None), self.signed)
