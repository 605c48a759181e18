"""Rounding to the nearest code: no feedback, and no data unless the scale search wants it."""

from __future__ import annotations

from typing import ClassVar, Literal

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
        weighted by the Hessian's diagonal, "hessian": by the group's block of it; both fall back to "mse"
        without calibration data.
    signed: let symmetric scales take either sign, so that the extra code serves the larger side.
    """

    grid: Literal["minmax", "mse", "diagonal", "hessian"] = "minmax"
    signed: bool = False

    needs: ClassVar[frozenset[str]] = frozenset()

    def answer(self, weight: Tensor, prepared: None, seen: Seen | None, scheme: Scheme) -> Answer:
        return rounded(weight, scheme, lambda run, at: self._choose(run, at, seen, scheme))

    def _choose(self, run: Tensor, at: slice, seen: Seen | None, scheme: Scheme) -> Grid:
        if self.grid == "minmax":
            return minmax(run, scheme, self.signed)
        if seen is None or self.grid == "mse":
            loss = squared()
        elif self.grid == "diagonal":
            loss = squared(seen.hessian.diagonal()[at])
        else:
            loss = quadratic(seen.hessian[at, at])
        return search(run, scheme, loss, self.signed)
