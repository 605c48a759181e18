"""QuantLinear: a linear layer whose weight stays quantized in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit import packing
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

# Rows dequantized at a time by the reference path: bounds the float copy to a few MB.
ROWS_AT_ONCE = 2048


def quantize_activations(x: Tensor) -> Tensor:
    """Dynamic symmetric int8 per token (last axis), returned dequantized.

    scale = absmax / 127.5, codes clamped to -128..127, as compressed-tensors and vLLM do.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / 127.5).clamp_min(torch.finfo(torch.float32).tiny)
    return (torch.clamp(torch.round(x.float() / scale), -128, 127) * scale).to(x.dtype)


class QuantLinear(nn.Module):
    """``y = x W^T + b`` with W held as packed codes, scales and zero points.

    Correct for every scheme, dtype and device: the weight is dequantized slice by slice. ``to(dtype)`` changes
    the bias only; scales keep the precision they were stored in.
    """

    def __init__(self, weight: QuantWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.scheme: Scheme = weight.scheme
        self.codes: Tensor
        self.register_buffer("codes", packing.pack(weight.codes, weight.scheme.bits))
        self._scale = weight.scale
        self._zero = weight.zero
        self._order = weight.order
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def qweight(self, rows: slice | None = None) -> QuantWeight:
        """The QuantWeight, or some rows of it."""
        rows = rows or slice(0, self.out_features)
        codes = packing.unpack(self.codes[rows], self.scheme.bits, self.in_features)
        zero = None if self._zero is None else self._zero[rows]
        return QuantWeight(self.scheme, codes, self._scale[rows], zero, self._order)

    def forward(self, x: Tensor) -> Tensor:
        if self.scheme.activation:
            x = quantize_activations(x)
        parts = []
        for first in range(0, self.out_features, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, self.out_features))
            bias = None if self.bias is None else self.bias[rows].to(x.dtype)
            parts.append(F.linear(x, self.qweight(rows).dequantize(x.dtype), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.scheme}, bias={self.bias is not None}"
