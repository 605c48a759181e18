"""AWQ: input channels that carry large activations get a finer grid (Lin et al., arXiv 2306.00978).

Multiplying column j of W by s_j and dividing the input channel by s_j (folded into the producer: a norm, the
value projection, the up projection) leaves the function alone, but the rounding error of that column shrinks
by s_j relative to its weight. s = mean|x|**alpha, with alpha from a grid. The measure is the exact expected
output error on the calibration data, summed over all linears that read the input:

    loss(s) = sum_W tr((W - Q(W s) / s) H (W - Q(W s) / s)T)

alpha = 0 is among the candidates, so the loss never rises. Only the diagonal of H judges all of them
(rounding errors of different columns are nearly uncorrelated) on some of the rows; the best few are
judged by the full loss on all of them.
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
    """Activation-aware scales.

    grid: how many values of alpha are tried, from 0 in steps of 1/grid.
    exact: how many of the best (by the Hessian's diagonal) are judged by the full loss, beside alpha = 0.
    rows: how many output rows, evenly spread, the diagonal judges; the full loss always takes all.
    kinds: which rescale pairs are used: "norm", "value" (v to o), "linear" (up to down).
    signed: judge with the signed full-range grid that the solvers use.
    limit: largest ratio of a scale to 1, so that folded norms stay ordinary numbers.
    """

    grid: int = Field(default=20, ge=2, le=100)
    exact: int = Field(default=3, ge=1)
    rows: int = Field(default=512, ge=1)
    kinds: tuple[str, ...] = ("norm", "value", "linear")
    signed: bool = True
    limit: float = Field(default=100.0, gt=1.0)

    scope: ClassVar[str] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"hessian", "abs_mean"})

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
        """Scale what pays; see the module's docstring and ``quantkit.rewrites`` for the contract."""
        report = RewriteReport()
        for fold in spec.folds_in(block):
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
        if fold.kind not in self.kinds:
            return f"pairs of kind {fold.kind!r} are switched off"
        if (why := _folding.misfit(block, spec, fold, config)) is not None:
            return why
        linears = [name for name in fold.consumers if name in schemes]
        found = statistics(block, spec, seen, fold)
        if not linears or found is None:
            return "none of the consumers is quantized"
        group, stats = found
        if stats.abs_mean is None:
            raise ValueError(f"awq needs the mean absolute input of {group}")
        weights = [(_folding.matrix(block, name, spec), schemes[name]) for name in linears]
        size = _folding.pooled(fold, stats.abs_mean, config)
        alpha, s, loss, plain = self.search(size, weights, stats.hessian, fold, config)
        if alpha == 0:
            return "no scale lowers the loss"
        if (why := fold_if_kept(block, spec, fold, s, config, probe)) is not None:
            return why
        columns = _folding.to_columns(fold, s, config)
        report.input_scales[group] = columns * report.input_scales.get(group, 1.0)
        report.changes[title(fold)] = f"alpha {alpha:.2f}, loss {loss / plain - 1:+.1%}"
        return None

    def search(
        self,
        size: Tensor,
        weights: Sequence[tuple[Tensor, Scheme]],
        hessian: Tensor,
        fold: Fold,
        config: Any,
    ) -> tuple[float, Tensor, float, float]:
        """Best alpha, its scale ``[producer channels]``, its loss and the loss without scales.

        size: mean ``|x|`` per producer channel. weights: the consumers' ``[out, in]`` and schemes.
        """
        alphas = [step / self.grid for step in range(self.grid)]
        scales = [self.scale(size, alpha) for alpha in alphas]
        columns = [_folding.to_columns(fold, s, config) for s in scales]
        step = -(-sum(w.shape[0] for w, _ in weights) // self.rows)
        some = [(w[::step], scheme) for w, scheme in weights]
        quick = [self.loss(some, c, hessian.diagonal()) for c in columns]
        best = sorted(range(1, self.grid), key=quick.__getitem__)[: self.exact]
        full = {index: self.loss(weights, columns[index], hessian) for index in (0, *best)}
        winner = min(full, key=full.__getitem__)
        return alphas[winner], scales[winner], full[winner], full[0]

    def scale(self, size: Tensor, alpha: float) -> Tensor:
        """``size**alpha``, centred so that its largest and smallest value are reciprocal. Channels that are
        (almost) never active count as a ten-thousandth of the mean, so that nothing is divided by zero."""
        floor = (1e-4 * size.mean()).clamp_min(torch.finfo(size.dtype).tiny)
        s = size.clamp_min(float(floor)).pow(alpha)
        s = s / (s.max() * s.min()).sqrt()
        return s.clamp(1 / self.limit, self.limit)

    def loss(self, weights: Sequence[tuple[Tensor, Scheme]], s: Tensor, hessian: Tensor) -> float:
        """``sum tr(E H ET)`` with ``E = W - Q(W s) / s``; a vector ``hessian`` stands for its diagonal."""
        total = 0.0
        for weight, scheme in weights:
            error = weight - rounded(weight * s, scheme, self.signed) / s
            if hessian.dim() == 1:
                total += float((error.square().sum(0) * hessian).sum())
            else:
                total += float(((error @ hessian) * error).sum())
        return total
