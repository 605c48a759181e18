"""Solvers choose codes for a float weight.

A file here defines ``class Solver``: a frozen pydantic-style dataclass whose fields are its recipe options,
with

    needs: ClassVar[frozenset[str]]      # of {"hessian", "cross"}; empty for data-free solvers
    def solve(self, weight, seen, scheme) -> Solution

``weight`` is float32 ``[out, in]``; ``seen`` a :class:`quantkit.activations.Seen` or None. ``solve`` is a
pure
function of its arguments: no hooks, no global state, no random numbers that are not seeded in the options.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quantkit.qweight import QuantWeight


@dataclass(slots=True)
class Solution:
    """A solver's answer.

    error: relative output error ``tr(D H DT) / tr(W H WT)`` with D = target - W_hat; the target is W, or W
        corrected for upstream error (relative weight error when there is no Hessian). baseline: the same for
        rounding W to the plain range. A solver never hands out an error above its baseline.
    notes: what the user must hear (damping raised, fell back to rounding, dead columns, ...).
    """

    weight: QuantWeight
    error: float
    baseline: float
    notes: list[str] = field(default_factory=list)
