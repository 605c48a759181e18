"""The oracle: plain PyTorch on any device, slow and easy to check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.linear import Request
from quantkit.qweight import QuantWeight

PRIORITY = 0


def why_not(request: Request) -> str | None:
    """The reference refuses nothing."""
    return None


def round_int8(x: Tensor, steps: int = 1) -> Tensor:
    """Round to int8 along the last axis with one scale, and back: x [..., n] -> [..., n].

    steps: finer than int8 by this factor.
    """
    scale = x.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return torch.round(x * inverse * steps) / steps * scale


def round_activations(x: Tensor, request: Request, order: Tensor | None = None) -> Tensor:
    """What the kernels make of float32 activations ``x [..., in]`` before they multiply.

    int8 per token for W8A8 schemes; "int8" and "int16" round per group of columns (in the act-order).
    """
    if request.scheme.activation == "int8":
        return round_int8(x)
    if request.precision == "bf16":
        return x.to(torch.bfloat16).float()
    if request.precision == "exact":
        return x
    steps = 254 if request.precision == "int16" else 1
    group = request.scheme.group or request.cols
    sorted_x = x if order is None else x[..., order]
    rounded = torch.cat([round_int8(part, steps) for part in sorted_x.split(group, dim=-1)], dim=-1)
    if order is None:
        return rounded
    out = torch.empty_like(rounded)
    out[..., order] = rounded
    return out


@dataclass(frozen=True)
class ReferenceLinear:
    """``y = round_activations(x) @ W.T + bias`` in float32."""

    weight: QuantWeight
    bias: Tensor | None
    request: Request

    def __call__(self, x: Tensor) -> Tensor:
        rounded = round_activations(x.float(), self.request, self.weight.order)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rounded, self.weight.dequantize(torch.float32), bias).to(x.dtype)


def prepare(weight: QuantWeight, bias: Tensor | None, request: Request) -> ReferenceLinear:
    return ReferenceLinear(weight, bias, request)
