"""HQQ: zero points from a robust error, no data (Mobius Labs 2023). For asymmetric groups of 64 or less."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from quantkit.activations import Seen
from quantkit.scheme import Scheme, SchemeError
from quantkit.solvers._rows import Answer, RowSolver, rounded
from quantkit.stages.halfquadratic import fit_zero


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Solver(RowSolver):
    """Round to nearest over half-quadratic zero points.

    power: p of the error norm ``|error|**p``; below 1 it forgives outliers.
    steps: alternations between outliers and zero point.
    """

    power: float = Field(default=0.7, gt=0, le=1)
    steps: int = Field(default=20, ge=1)

    needs: ClassVar[frozenset[str]] = frozenset()

    def answer(self, weight: Tensor, prepared: None, seen: Seen | None, scheme: Scheme) -> Answer:
        """Raises SchemeError for a symmetric scheme."""
        if scheme.symmetric:
            raise SchemeError(f"hqq fits zero points and {scheme} has none; choose an asymmetric scheme")
        return rounded(weight, scheme, lambda run, at: fit_zero(run, scheme, self.power, self.steps))
