"""Rewrites change float weights and keep the function, so that rounding hurts less afterwards.

A file here defines ``class Rewrite``: a frozen pydantic dataclass whose fields are its recipe options, with

    scope: ClassVar[str]                 # "block" or "model"
    needs: ClassVar[frozenset[str]]      # statistics of Seen: "hessian", "abs_mean", "abs_max", "sample"

Scope "block" (awq, smoothquant) adds

    def apply(self, block, spec, seen, schemes, config, *, probe) -> RewriteReport

which changes the real float32 block in place. ``seen`` holds :class:`quantkit.activations.Seen` by the first
linear of each group, ``schemes`` the Scheme of each linear that will be quantized, ``probe`` one sample call.
Every change is proven on the probe: where the block's output moves by more than ``TOLERANCE`` (relative to
its largest value) the change is undone and listed with the reason.

Scope "model" (rotate) adds

    def why_not(self, model, spec) -> str | None       # the empty model is enough
    def start(self, model, spec) -> ModelRewrite

whose methods are called piece by piece while the model streams by.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

from quantkit.activations import Seen
from quantkit.skeleton import BlockCall

TOLERANCE = 1e-4  # float32; largest change of a block's output relative to its largest value


@dataclass(frozen=True, slots=True)
class Probe:
    """A sample call of a block: float32 hidden states ``[batch, tokens, hidden]`` and the other arguments.

    A few dozen tokens are enough; they must be the block's own call, or masks and tables do not fit.
    """

    hidden: Tensor
    call: BlockCall


@dataclass(slots=True)
class RewriteReport:
    """What a rewrite did to one piece of the model.

    changes: what was changed -> a sentence with the numbers.
    skipped: what was left alone -> why.
    input_scales: first linear of a group -> s ``[in]``; its inputs are now ``x / s``. With :func:`rescaled`
        the statistics of the old inputs serve the new ones, and the calibration pass need not be repeated.
    """

    changes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    input_scales: dict[str, Tensor] = field(default_factory=dict)


class ModelRewrite(Protocol):
    """A rewrite of the whole model, applied while its pieces (float32, in memory) stream by.

    config_changes: what the written config must say differently (``{"tie_word_embeddings": False}``).
    """

    config_changes: dict[str, Any]

    def embedding(self, embed: nn.Module) -> None:
        """Rewrite the token embedding in place."""

    def block(self, block: nn.Module, probe: Probe | None = None) -> RewriteReport:
        """Rewrite one decoder block in place. ``probe.hidden`` is what the rewritten model feeds it."""

    def head(self, norm: nn.Module, head: nn.Module) -> None:
        """Rewrite the final norm and the head in place. A tied head must hold a copy of the *original*
        embedding, in memory of its own."""


def rescaled(seen: Seen, s: Tensor) -> Seen:
    """Statistics of ``x / s`` from those of x; s is positive, ``[in]``.

    The Hessian becomes ``H_ij / (s_i s_j)``, and the cross term likewise, for both streams are rewritten.
    """
    pairs = s[:, None] * s
    return replace(
        seen,
        hessian=seen.hessian / pairs,
        cross=None if seen.cross is None else seen.cross / pairs,
        abs_mean=None if seen.abs_mean is None else seen.abs_mean / s,
        abs_max=None if seen.abs_max is None else seen.abs_max / s,
        sample=None if seen.sample is None else seen.sample / s,
    )
