"""GPTQ (arXiv 2210.17323): error feedback through the inverse Hessian, as published."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from quantkit.activations import Seen
from quantkit.scheme import Scheme
from quantkit.solvers._rows import Answer, RowSolver, hessian_notes, searched
from quantkit.stages import feedback
from quantkit.stages.damping import Factor, NotPositive, descending, factorize
from quantkit.stages.grid import Grid, Loss, minmax, search, spans, squared, stack


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Solver(RowSolver):
    """GPTQ with lazy block updates.

    damping: fraction of the Hessian's mean diagonal added to it; raised threefold while the factorization
        fails.
    act_order: "static" walks columns by falling activation energy with groups and scales fixed beforehand
        (plain files, no index); "dynamic" also forms the groups in that order (files carry g_idx); "none" walks in natural
        order and chooses each group's scale when it gets there (the paper).
    block: columns corrected among themselves before the rest of the row; speed only, the result is the same
        up to rounding of the arithmetic.
    grid: "minmax", "mse" (smallest squared weight error) or "omega" (each column weighted by what GPTQ pays for an
        error in it, 1/U_jj**2).
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

    def answer(self, weight: Tensor, prepared: Factor | NotPositive, seen: Seen | None, scheme: Scheme) -> Answer:
        assert seen is not None  # prepare has refused
        if isinstance(prepared, NotPositive):
            answer = searched(weight, scheme, seen, self.signed)
            answer.notes.append(f"Hessian {prepared}: rounded with activation-weighted scales instead")
            return answer
        notes = hessian_notes(prepared, self.damping, seen.tokens)
        order = torch.arange(len(weight)) if prepared.order is None else prepared.order
        dead = prepared.dead.nonzero().flatten()
        walk = weight[order]
        walk[dead] = 0.0  # as published: an input that is always zero may have any weight
        coupling = feedback.normalised(prepared.upper)
        if self.act_order == "static" or scheme.group == 0:
            natural = torch.empty_like(walk)
            natural[order] = walk
            price = torch.empty_like(prepared.price)
            price[order] = prepared.price
            grid = stack([self._choose(natural[a:b], price[a:b], scheme) for a, b in spans(len(weight), scheme.group)])
            group_of = (order // (scheme.group or len(weight))).tolist()
            codes = feedback.static(walk, coupling, grid, group_of, scheme, self.block)
            stored_order = None
        else:
            price = prepared.price

            def choose(values: Tensor, start: int, stop: int) -> Grid:
                return self._choose(values, price[start:stop], scheme)

            codes, grid = feedback.dynamic(walk, coupling, choose, scheme, self.block)
            stored_order = prepared.order
        by_column = torch.empty_like(codes)
        by_column[order] = codes
        return Answer(by_column, grid, order=stored_order, notes=notes)

    def _choose(self, run: Tensor, price: Tensor, scheme: Scheme) -> Grid:
        if self.grid == "minmax":
            return minmax(run, scheme, self.signed)
        loss: Loss = squared(price) if self.grid == "omega" else squared()
        return search(run, scheme, loss, self.signed)
