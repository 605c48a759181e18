"""The balanced stack: GPTQ on a searched grid, corrected for upstream error, then polished."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from quantkit.activations import Seen
from quantkit.scheme import Scheme
from quantkit.solvers._rows import Answer, RowSolver, hessian_notes, searched
from quantkit.stages import feedback
from quantkit.stages.damping import Factor, NotPositive, descending, factorize
from quantkit.stages.descent import descend
from quantkit.stages.grid import Grid, minmax, search, spans, squared, stack
from quantkit.stages.refit import refit
from quantkit.stages.upstream import qep_target


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Solver(RowSolver):
    """Static act-order GPTQ, scales searched by GPTQ's own prices, QEP target, descent and scale refits.

    damping: fraction of the Hessian's mean diagonal added to it; raised threefold while the factorization fails.
    polish_damping: the same for descent and refit.
    correction: strength of the upstream correction (QEP), 0 to 1; needs the cross term when above 0.
    correction_damping: fraction of the mean diagonal used in the correction's inverse.
    grid: "omega" (weighted by 1/U_jj**2), "mse" or "minmax"; 8-bit codes always take "minmax".
    signed: let symmetric scales take either sign, so that the extra code serves the larger side.
    rounds: how often codes descend and scales are refitted, alternately.
    sweeps: passes over the columns in each descent.
    """

    damping: float = Field(default=0.1, ge=0)
    polish_damping: float = Field(default=0.01, ge=0)
    correction: float = Field(default=0.5, ge=0, le=1)
    correction_damping: float = Field(default=0.01, ge=0)
    grid: Literal["omega", "mse", "minmax"] = "omega"
    signed: bool = True
    rounds: int = Field(default=2, ge=0)
    sweeps: int = Field(default=1, ge=1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hessian", "cross"} if self.correction else {"hessian"})

    def prepare(self, seen: Seen | None):
        if seen is None:
            raise ValueError("stack needs calibration data (a Hessian)")
        order = descending(seen.hessian)
        try:
            f = factorize(seen.hessian, self.damping, order)
            p = factorize(seen.hessian, self.polish_damping, order)
            c = factorize(seen.hessian, self.correction_damping, order)
            return f, p, c
        except NotPositive as failure:
            return failure

    def answer(self, weight, prepared, seen, scheme):
        f, p, c = prepared
        order = f.order
        walk = weight[order]
        target = walk
        if self.correction and seen.cross is not None:
            target = qep_target(walk, seen.cross[order][:, order], c, self.correction)
        coupling = feedback.normalised(f.upper)
        natural = torch.empty_like(walk); natural[order] = target
        price = torch.empty_like(f.price); price[order] = f.price
        gs = spans(len(weight), scheme.group)
        grid = stack([self._choose(natural[a:b], price[a:b], scheme) for a, b in gs])
        gid = order // (scheme.group or len(weight))
        group_of = gid.tolist()
        codes = feedback.static(target, coupling, grid, group_of, scheme)
        members = [(gid == g).nonzero().flatten() for g in range(len(gs))]
        for _ in range(self.rounds):
            codes = descend(target, p.hessian, codes, grid, group_of, scheme, self.sweeps)
            grid = refit(target, p.hessian, codes, grid, members, scheme)
        by_column = torch.empty_like(codes)
        by_column[order] = codes
        return Answer(by_column, grid, target=natural, notes=hessian_notes(f, self.damping, seen.tokens))

    def _choose(self, run: Tensor, price: Tensor, scheme: Scheme) -> Grid:
        if self.grid == "minmax" or scheme.bits == 8:
            return minmax(run, scheme, self.signed)
        return search(run, scheme, squared(price if self.grid == "omega" else None), self.signed)
