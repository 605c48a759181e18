"""SmoothQuant: move the outliers of activations into the weights (Xiao et al., arXiv 2211.10438).

With int8 activations (one scale per token) a single large channel costs all others their resolution. Dividing
the input channels by s = max|x|**alpha / max|w|**(1 - alpha), folded into the norm before them, and
multiplying the weights' columns by s balances the two. Only norms take part: they feed all of a token's
resolution at once, and scaling them costs nothing at run time.

Where calibration kept sample inputs, alpha is the one (0, meaning no change, included) whose W8A8 product is
nearest to the float product; otherwise ``alpha`` is used as given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from quantkit.activations import Seen
from quantkit.models import _folding
from quantkit.modelspec import Fold, ModelSpec
from quantkit.rewrites import Probe, RewriteReport
from quantkit.rewrites._folds import fold_if_kept, rounded, statistics, title
from quantkit.scheme import Scheme


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rewrite:
    """Smoothing of int8 activations.

    alpha: share of the difficulty that moves to the weights, used where there are no sample inputs.
    alphas: the values that the search tries where there are.
    """

    alpha: float = Field(default=0.8, gt=0.0, lt=1.0)
    alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)

    scope: ClassVar[str] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"abs_max", "sample"})

    @torch.no_grad()
    def apply(
        self,
        block: nn.Module,
        spec: ModelSpec,
        seen: Mapping[str, Seen],
        schemes: Mapping[str, Scheme],
        config: Any,
        *,
        probe: Probe,
    ) -> RewriteReport:
        """Smooth the inputs of linears with int8 activations; see ``quantkit.rewrites`` for the contract."""
        report = RewriteReport()
        for fold in spec.folds_in(block):
            if fold.kind != "norm":
                continue
            reason = self._one(block, spec, fold, seen, schemes, config, probe, report)
            if reason is not None:
                report.skipped[title(fold)] = reason
        return report

    def _one(
        self,
        block: nn.Module,
        spec: ModelSpec,
        fold: Fold,
        seen: Mapping[str, Seen],
        schemes: Mapping[str, Scheme],
        config: Any,
        probe: Probe,
        report: RewriteReport,
    ) -> str | None:
        linears = [name for name in fold.consumers if name in schemes and schemes[name].activation]
        found = statistics(block, spec, seen, fold)
        if not linears or found is None:
            return "none of the consumers has int8 activations"
        group, stats = found
        if stats.abs_max is None:
            raise ValueError(f"smoothquant needs the largest absolute input of {group}")
        weights = [(_folding.matrix(block, name, spec), schemes[name]) for name in linears]
        every = [_folding.matrix(block, name, spec) for name in fold.consumers]
        peak = torch.stack([w.abs().reshape(-1, w.shape[-1]).amax(0) for w in every]).amax(0)
        alpha, note = self.alpha, ""
        if stats.sample is not None:
            alpha, note = self._search(stats.sample, stats.abs_max, peak, weights)
            if alpha == 0:
                return "no alpha lowers the error on the sample inputs"
        s = self.scale(stats.abs_max, peak, alpha)
        if (why := fold_if_kept(block, spec, fold, s, config, probe)) is not None:
            return why
        report.input_scales[group] = s
        report.changes[title(fold)] = f"alpha {alpha:.2f}{note}"
        return None

    @staticmethod
    def scale(abs_max: Tensor, peak: Tensor, alpha: float) -> Tensor:
        """``abs_max**alpha / peak**(1 - alpha)``, ``[channels]``; 1 where either side is always zero."""
        s = abs_max.pow(alpha) / peak.pow(1 - alpha)
        return torch.where((abs_max > 0) & (peak > 0), s, 1.0).clamp(1e-5, 1e5)

    def _search(
        self, x: Tensor, abs_max: Tensor, peak: Tensor, weights: Sequence[tuple[Tensor, Scheme]]
    ) -> tuple[float, str]:
        plain = self.loss(x, torch.ones_like(abs_max), weights)
        losses = {alpha: self.loss(x, self.scale(abs_max, peak, alpha), weights) for alpha in self.alphas}
        best = min(losses, key=losses.__getitem__)
        return (best, f", error {losses[best] / plain - 1:+.1%}") if losses[best] < plain else (0.0, "")

    @staticmethod
    def loss(x: Tensor, s: Tensor, weights: Sequence[tuple[Tensor, Scheme]]) -> float:
        """Squared error of the W8A8 product over sample inputs ``x [rows, in]``, all linears together."""
        rounded_x = int8_tokens(x / s)
        total = 0.0
        for weight, scheme in weights:
            product = rounded_x @ rounded(weight * s, scheme, signed=False).t()
            total += float((product - x @ weight.t()).square().sum())
        return total


def int8_tokens(x: Tensor) -> Tensor:
    """``x [..., in]`` after dynamic symmetric int8 rounding with one scale per token."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(x / scale).clamp_(-127, 127) * scale
