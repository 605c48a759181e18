"""Rounding to the nearest code: no feedback, and no data unless the scale search wants it."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from quantkit.activations import Seen
from quantkit.scheme import Scheme
from quantkit.solvers._rows import Answer, RowSolver, rounded
from quantkit.stages.grid import Grid, minmax, quadratic, search, squared


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Solver(RowSolver):
    """Round to nearest.

    grid: how scales are chosen. "minmax": the plain range. "mse": smallest squared weight error. "diagonal":
        columns weighted by the Hessian's diagonal; "hessian": by the group's whole block of it. The last two
        need calibration data.
    signed: let symmetric scales take either sign, so that the extra code serves the larger side.
    """

    grid: Literal["minmax", "mse", "diagonal", "hessian"] = "minmax"
    signed: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hessian"} if self.grid in ("diagonal", "hessian") else ())

    def answer(self, weight: Tensor, prepared: None, seen: Seen | None, scheme: Scheme) -> Answer:
        if self.needs and seen is None:
            raise ValueError(f"rtn with grid {self.grid!r} needs calibration data (a Hessian)")
        return rounded(weight, scheme, lambda run, at: self._choose(run, at, seen, scheme))

    def _choose(self, run: Tensor, at: slice, seen: Seen | None, scheme: Scheme) -> Grid:
        if self.grid == "minmax":
            return minmax(run, scheme, self.signed)
        loss = squared()
        if seen is not None and self.grid == "diagonal":
            loss = squared(seen.hessian.diagonal()[at])
        elif seen is not None and self.grid == "hessian":
            loss = quadratic(seen.hessian[at, at])
        return search(run, scheme, loss, self.signed)
