"""GPTQ (arXiv 2210.17323): error feedback through the inverse Hessian, as published."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from quantkit.activations import Seen
from quantkit.scheme import Scheme
from quantkit.solvers._rows import Answer, RowSolver, hessian_notes, searched
from quantkit.stages import feedback
from quantkit.stages.damping import Factor, NotPositive, descending, factorize
from quantkit.stages.grid import Grid, group_of, minmax, per_group, search, squared


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Solver(RowSolver):
    """GPTQ with lazy block updates.

    damping: fraction of the Hessian's mean diagonal added to it; raised threefold while the factorization
        fails.
    act_order: "static" walks columns by falling activation energy with groups and scales fixed beforehand
        (plain files, no index); "dynamic" also forms the groups in that order (files carry g_idx); "none"
        walks in natural order and chooses each group's scale when it gets there (the paper).
    block: columns corrected among themselves before the rest of the row; speed only, the result is the same
        up to rounding of the arithmetic.
    grid: "minmax", "mse" (smallest squared weight error) or "omega" (each column weighted by what GPTQ pays
        for an error in it, 1/U_jj**2).
    signed: let symmetric scales take either sign, so that the extra code serves the larger side.
    """

    damping: float = Field(default=0.01, ge=0)
    act_order: Literal["static", "dynamic", "none"] = "static"
    block: int = Field(default=128, ge=1)
    grid: Literal["minmax", "mse", "omega"] = "minmax"
    signed: bool = False

    needs: ClassVar[frozenset[str]] = frozenset({"hessian"})

    def prepare(self, seen: Seen | None) -> Factor | NotPositive:
        if seen is None:
            raise ValueError("gptq needs calibration data (a Hessian)")
        order = None if self.act_order == "none" else descending(seen.hessian)
        try:
            return factorize(seen.hessian, self.damping, order)
        except NotPositive as failure:
            return failure

    def answer(
        self, weight: Tensor, prepared: Factor | NotPositive, seen: Seen | None, scheme: Scheme
    ) -> Answer:
        assert seen is not None  # prepare has refused
        if isinstance(prepared, NotPositive):
            return searched(weight, scheme, seen, self.signed, f"Hessian {prepared}")
        notes = hessian_notes(prepared, self.damping, seen.tokens)
        walk = prepared.walk(weight).clone()
        walk[prepared.dead] = 0.0  # as published: an input that is always zero may have any weight
        coupling = feedback.normalised(prepared.upper)
        price = prepared.price

        if self.act_order == "static" or scheme.group == 0:
            natural, own_price = prepared.unwalk(walk), prepared.unwalk(price)
            grid = per_group(natural, scheme, lambda run, at: self._choose(run, own_price[at], scheme))
            index = group_of(len(walk), scheme.group, prepared.order)
            codes = feedback.static(walk, coupling, grid, index, scheme, self.block)
            stored_order = None
        else:
            codes, grid = feedback.dynamic(
                walk, coupling, lambda run, at: self._choose(run, price[at], scheme), scheme, self.block
            )
            stored_order = prepared.order
        return Answer(prepared.unwalk(codes), grid, order=stored_order, notes=notes)

    def _choose(self, run: Tensor, price: Tensor, scheme: Scheme) -> Grid:
        if self.grid == "minmax":
            return minmax(run, scheme, self.signed)
        return search(run, scheme, squared(price if self.grid == "omega" else None), self.signed)
