"""Rotation: spread outlier channels over all channels by orthogonal matrices that cancel out.

R1 turns the residual stream and R2 the values inside each head; both are multiplied into the weights, so the
result is a plain checkpoint of the same architecture (QuaRot, Ashkboos et al., arXiv 2404.00456; SpinQuant,
Liu et al., arXiv 2405.16406). RMSNorm commutes with R1 once its weight has moved into the linears after it:

    E <- E R1,   readers W <- W diag(norm) R1,   writers W <- R1T W (bias too),   v <- R2T v,   o <- o R2

The head's norm is not the embedding's, so a tied head becomes a matrix of its own. R1 and R2 are randomized
Hadamard matrices where the width has one. All products are taken in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from quantkit.errors import UserError
from quantkit.models import _folding
from quantkit.modelspec import Fold, ModelSpec, has
from quantkit.rewrites import TOLERANCE, Probe, RewriteReport
from quantkit.rewrites._orthogonal import Orthogonal
from quantkit.skeleton import decoder_blocks, embedding_modules, has_tied_head, run_block

_ROWS = 4096  # rows of a large matrix that are turned at a time: bounds the float64 copies


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rewrite:
    """Offline rotation.

    values: also rotate the values inside each head (R2).
    seed: of the random signs.
    """

    values: bool = True
    seed: int = 0

    scope: ClassVar[str] = "model"
    needs: ClassVar[frozenset[str]] = frozenset()

    def why_not(self, model: nn.Module, spec: ModelSpec) -> str | None:
        """Why this architecture cannot be rotated, or None. The empty (meta) model is enough."""
        if spec.post_norms:
            between = " and ".join(spec.post_norms)
            return f"the outputs of attention and MLP pass {between}, which a rotation changes"
        if not spec.writers:
            return (
                "it is not known which linears write to the residual stream (no `writers` in the data file)"
            )
        for index, block in enumerate(decoder_blocks(model, spec)):
            norms = [f.producer for f in spec.folds_in(block) if f.kind == "norm"]
            for name in (*norms, ""):
                module = block.get_submodule(name) if name else model.get_submodule(spec.norm)
                if type(module).__name__ == "LayerNorm" or getattr(module, "bias", None) is not None:
                    return f"{name or spec.norm} is a LayerNorm, which subtracts a mean"
            covered = {n for f in spec.folds_in(block) for n in f.consumers} | set(spec.writers)
            named = (n for n in (*spec.linears_in(block), *spec.unquantized) if has(block, n))
            if stray := [n for n in named if n not in covered]:
                return f"block {index}: it is not known what {', '.join(stray)} read"
        others = [
            name
            for name in embedding_modules(model, spec)
            if name != spec.embed and any(True for _ in model.get_submodule(name).parameters())
        ]
        if others:
            return f"{', '.join(others)} add to the residual stream"
        return None

    def start(self, model: nn.Module, spec: ModelSpec) -> Rotation:
        """The rotation of this model. Raises UserError with :meth:`why_not`'s reason."""
        if (why := self.why_not(model, spec)) is not None:
            kind = model.config.model_type  # type: ignore[union-attr]
            raise UserError(f"rotate does not apply to {kind!r} models: {why}; remove it from the recipe")
        return Rotation(model, spec, self.values, self.seed)


class Rotation:
    """A :class:`quantkit.rewrites.ModelRewrite`: the pieces of one model, rotated as they stream by."""

    def __init__(self, model: nn.Module, spec: ModelSpec, values: bool, seed: int) -> None:
        self.spec, self.values, self.seed = spec, values, seed
        self.config: Any = model.config
        width = model.get_submodule(spec.norm).weight.shape[0]  # type: ignore[union-attr, index]
        self.r1 = Orthogonal(int(width), seed)  # type: ignore[arg-type]
        self.config_changes: dict[str, Any] = {"tie_word_embeddings": False} if has_tied_head(model) else {}

    @torch.no_grad()
    def embedding(self, embed: nn.Module) -> None:
        """``E [vocab, hidden] <- E R1``, in place."""
        _turn_columns(embed.weight.detach(), self.r1)  # type: ignore[union-attr, operator]

    @torch.no_grad()
    def block(self, block: nn.Module, probe: Probe | None = None) -> RewriteReport:
        """Rotate one block in place. With a probe (hidden states of the rotated stream) it is proven;
        a deviation beyond the tolerance raises UserError, for half a rotation cannot be left behind."""
        spec, report = self.spec, RewriteReport()
        before = None
        if probe is not None:
            plain = self.r1.undo(probe.hidden).to(probe.hidden.dtype)
            before = self.r1.apply(run_block(block, plain, probe.call))
        for fold in spec.folds_in(block):
            if fold.kind == "norm":
                self._fuse(block, fold)
        for name in self._readers(block):
            _turn_columns(_folding.matrix(block, name, spec), self.r1)
        for name in spec.writers:
            if has(block, name):
                _turn_rows(_folding.matrix(block, name, spec), self.r1)
                bias = _folding.bias_of(block, name)
                if bias is not None:
                    bias.copy_(self.r1.apply(bias))
        report.changes["residual stream"] = f"R1 {self.r1.kind}, width {self.r1.width}"
        self._values(block, report)
        if probe is not None and before is not None:
            moved = float(
                (run_block(block, probe.hidden, probe.call) - before).abs().max() / before.abs().max()
            )
            if not moved <= TOLERANCE:
                raise UserError(
                    f"rotation changed a block's output by {moved:.1e} (relative); nothing is written"
                )
        return report

    @torch.no_grad()
    def head(self, norm: nn.Module, head: nn.Module) -> None:
        """``W [vocab, hidden] <- W diag(norm) R1`` and norm <- 1, in place."""
        weight: Tensor = head.weight.detach()  # type: ignore[union-attr, operator, assignment]
        scale: Tensor = norm.weight.detach()  # type: ignore[union-attr, operator, assignment]
        weight.mul_(scale + self.spec.norm_offset)
        scale.fill_(1.0 - self.spec.norm_offset)
        _turn_columns(weight, self.r1)

    def _readers(self, block: nn.Module) -> list[str]:
        folds = self.spec.folds_in(block)
        return list(dict.fromkeys(n for f in folds if f.kind == "norm" for n in f.consumers))

    def _fuse(self, block: nn.Module, fold: Fold) -> None:
        norm: Tensor = block.get_submodule(fold.producer).weight.detach()  # type: ignore[union-attr, operator, assignment]
        for name in fold.consumers:
            _folding.matrix(block, name, self.spec).mul_(norm + self.spec.norm_offset)
        norm.fill_(1.0 - self.spec.norm_offset)

    def _values(self, block: nn.Module, report: RewriteReport) -> None:
        """R2 in every kv head; one matrix per width serves all heads and layers."""
        if not self.values:
            return
        for fold in (f for f in self.spec.folds_in(block) if f.kind == "value"):
            if (why := _folding.misfit(block, self.spec, fold, self.config)) is not None:
                report.skipped["values"] = why
                continue
            heads = _folding.heads_of(self.config)
            r2 = Orthogonal(heads.dim, self.seed + 1)
            rows = _folding.producer_rows(block, self.spec, fold, self.config)
            value = _folding.matrix(block, fold.producer, self.spec)[rows].unflatten(0, (heads.kv, heads.dim))
            value.copy_(r2.apply(value.transpose(-1, -2)).transpose(-1, -2))
            bias = _folding.bias_of(block, fold.producer)
            if bias is not None:
                part = bias[rows].unflatten(0, (heads.kv, heads.dim))
                part.copy_(r2.apply(part))
            for name in fold.consumers:
                out = _folding.matrix(block, name, self.spec).unflatten(-1, (heads.query, heads.dim))
                out.copy_(r2.apply(out))
            report.changes["values"] = f"R2 {r2.kind}, {heads.kv} heads of {heads.dim}"


def _runs(length: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, length, _ROWS))


def _turn_columns(weight: Tensor, r: Orthogonal) -> None:
    """``W [..., out, in] <- W R``, in place, some rows at a time."""
    for part in weight if weight.dim() == 3 else (weight,):
        for run in _runs(part.shape[0]):
            part[run] = r.apply(part[run]).to(part.dtype)


def _turn_rows(weight: Tensor, r: Orthogonal) -> None:
    """``W [..., out, in] <- RT W``, in place, some columns at a time."""
    for part in weight if weight.dim() == 3 else (weight,):
        for run in _runs(part.shape[1]):
            part[:, run] = r.apply(part[:, run].t()).t().to(part.dtype)
