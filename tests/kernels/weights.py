"""Random quantized weights, and how far a kernel may be from the exact product."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kernels.linear import Request
from quantkit.qweight import QuantWeight, round_scale
from quantkit.scheme import Scheme


def random_weight(scheme: Scheme, rows: int, cols: int, *, order: bool = False, seed: int = 0) -> QuantWeight:
    """Every code, scales of either sign (symmetric), zero points over the whole range."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, scheme.groups(cols))
    codes = torch.randint(0, scheme.max_code + 1, (rows, cols), dtype=torch.uint8, generator=g)
    scale = torch.randn(shape, generator=g) * 0.01
    scale = round_scale(scale if scheme.symmetric else scale.abs(), scheme).to(
        getattr(torch, scheme.scale_dtype)
    )
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, generator=g)
    permutation = torch.randperm(cols, generator=g) if order else None
    return QuantWeight(scheme, codes, scale, zero, permutation)


def rounding_step(x: Tensor, weight: QuantWeight, request: Request) -> Tensor:
    """Largest error that rounding the activations may make, per element of x (float64)."""
    if request.scheme.activation == "int8":
        return (x.abs().amax(-1, keepdim=True) / 127 / 2).expand_as(x)
    if request.precision == "exact":
        return torch.zeros_like(x)
    if request.precision == "bf16":
        return x.abs() * 2.0**-8
    group = weight.columns_to_groups()
    step = torch.empty_like(x)
    for g in range(weight.scale.shape[1]):
        step[:, group == g] = x[:, group == g].abs().amax(-1, keepdim=True) / 127 / 2
    return step / 254 if request.precision == "int16" else step


OUTPUT_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def check(
    y: Tensor, x: Tensor, weight: QuantWeight, bias: Tensor | None, request: Request, label: str
) -> None:
    """Assert that y is x @ W^T + bias in exact arithmetic, up to 1e-5 of it, the rounding of x and that of y."""
    w = weight.dequantize(torch.float64)
    exact = x.double() @ w.T + (0 if bias is None else bias.double())
    allowed = rounding_step(x.double(), weight, request) @ w.abs().T * 1.01
    allowed += OUTPUT_ROUNDING[y.dtype] * (exact.abs() + allowed) + 1e-7
    excess = ((y.double() - exact).abs() - allowed).clamp_min(0)
    off, size = float(excess.norm()), float(exact.norm())
    # no quotient: a weight whose codes all equal the zero point has the exact answer 0
    assert off <= 1e-5 * size, (
        f"{label}: off by {off:.2e} of {size:.2e} beyond the rounding of its activations"
    )
