"""What calibration saw of a linear's input: the statistics that solvers and rewrites work from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Seen:
    """Statistics of the inputs ``x [tokens, in]`` of one group of linears.

    hessian: float32 ``[in, in]``, ``(2 / tokens) * sum x xT`` (GPTQ, arXiv 2210.17323).
    tokens: how many token vectors were added.
    cross: float32 ``[in, in]`` or None, ``(2 / tokens) * sum (x_float - x) xT``, where x_float is the same
        input in the unquantized model (QEP, arXiv 2504.09629). Same normalisation as ``hessian``.
    abs_mean: float32 ``[in]``, mean of ``|x|`` (AWQ, arXiv 2306.00978).
    abs_max: float32 ``[in]``, largest ``|x|`` (SmoothQuant, arXiv 2211.10438).
    sample: float32 ``[rows, in]`` or None, a few inputs kept for output-error searches.
    """

    hessian: Tensor
    tokens: int = 0
    cross: Tensor | None = None
    abs_mean: Tensor | None = None
    abs_max: Tensor | None = None
    sample: Tensor | None = None


class NonFinite(ArithmeticError):
    """An activation or statistic that is NaN or infinite; the message names channel and count."""


class HessianSum:
    """Accumulates :class:`Seen` over batches. ``add`` raises NonFinite before anything bad enters the sum."""

    def __init__(self, width: int, cross: bool = False) -> None:
        self.tokens = 0
        self._closed = False
        self._gram = torch.zeros(width, width)
        self._cross = torch.zeros(width, width) if cross else None
        self._abs_sum = torch.zeros(width, dtype=torch.float64)
        self._abs_max = torch.zeros(width)

    def add(self, x: Tensor, x_float: Tensor | None = None) -> None:
        """x: ``[..., in]``, any float dtype; x_float likewise (float stream of the same tokens). Not after seen()."""
        if self._closed:
            raise ValueError("the sum is closed: seen() was called")
        x = x.reshape(-1, x.shape[-1]).float()
        peak = x.abs().amax(0)
        if not bool(torch.isfinite(peak).all()):
            bad = (~torch.isfinite(peak)).nonzero().flatten()
            raise NonFinite(
                f"{len(bad)} of {len(peak)} input channels hold NaN or infinity (first: channel {int(bad[0])})"
            )
        self._gram.addmm_(x.T, x)
        self._abs_sum += x.abs().sum(0)
        self._abs_max = torch.maximum(self._abs_max, peak)
        if self._cross is not None:
            if x_float is None:
                raise ValueError("the float stream's activations are needed for the cross term")
            self._cross.addmm_((x_float.reshape(x.shape).float() - x).T, x)
        self.tokens += x.shape[0]

    def seen(self) -> Seen:
        """The statistics of everything added; closes the sum."""
        if self.tokens == 0:
            raise ValueError("no activations were recorded")
        factor = 2.0 / self.tokens
        if not self._closed:  # in place: for wide inputs a second copy is a tenth of a gigabyte
            self._closed = True
            self._gram.mul_(factor)
            if self._cross is not None:
                self._cross.mul_(factor)
        return Seen(
            hessian=self._gram,
            tokens=self.tokens,
            cross=self._cross,
            abs_mean=(self._abs_sum / self.tokens).float(),
            abs_max=self._abs_max.clone(),
        )
