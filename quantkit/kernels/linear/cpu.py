"""Native CPU kernels, one torch operator: ``quantkit::linear_cpu``."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels import native
from quantkit.kernels.linear import Request
from quantkit.qweight import QuantWeight

PRIORITY = 50

_ZERO, _ORDER, _BIAS = 1, 2, 4  # bits of the operator's `parts`


def why_not(request: Request) -> str | None:
    """None when the native kernels can serve the request, else a sentence."""
    if request.device.type != "cpu":
        return f"the native kernels run on the CPU, not on {request.device.type}"
    if request.dtype not in native.DTYPES:
        return f"the native kernels take float32, float16 or bfloat16 activations, not {request.dtype}"
    if reason := native.why_unavailable():
        return reason
    return native.why_not_pack(request.scheme.bits, request.scheme.group, request.cols)


def precision_code(request: Request) -> int:
    """enum qk_precision for a request; "exact" is the bf16 dot where the activations are bf16 already."""
    if request.scheme.activation == "int8":
        return native.INT8_TOKEN
    if request.precision in ("int8", "int16"):
        return native.INT8 if request.precision == "int8" else native.INT16
    if request.precision == "bf16" or request.dtype == torch.bfloat16:
        return native.BF16_DOT
    return native.FP32


_library = torch.library.Library("quantkit", "FRAGMENT")
_library.define(
    "linear_cpu(Tensor x, Tensor packed, int rows, int cols, int bits, int group, int scale_type, int parts, "
    "int precision) -> Tensor"
)

# Building the C structure costs 2 us, a third of a small layer; it depends on nothing but the key.
_weights: dict[tuple[int, ...], native.CWeight] = {}


def _weight(pointer: int, *shape: int) -> native.CWeight:
    key = (pointer, *shape)
    weight = _weights.get(key)
    if weight is None:
        if len(_weights) >= 4096:
            _weights.clear()
        rows, cols, bits, group, scale_type, parts = shape
        c_shape = native.CShape(
            rows,
            cols,
            bits,
            group,
            scale_type,
            bool(parts & _ZERO),
            bool(parts & _ORDER),
            bool(parts & _BIAS),
        )
        weight = _weights[key] = native.CWeight(c_shape, pointer)
    return weight


def _linear_cpu(
    x: Tensor,
    packed: Tensor,
    rows: int,
    cols: int,
    bits: int,
    group: int,
    scale_type: int,
    parts: int,
    precision: int,
) -> Tensor:
    if x.shape[-1] != cols:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {cols}")
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    weight = _weight(packed.data_ptr(), rows, cols, bits, group, scale_type, parts)
    tokens = x.numel() // cols
    status = native.library().qk_linear(
        byref(weight), x.data_ptr(), y.data_ptr(), tokens, native.DTYPES[x.dtype], precision
    )
    native.check(status)
    return y


def _linear_shape(
    x: Tensor,
    packed: Tensor,
    rows: int,
    cols: int,
    bits: int,
    group: int,
    scale_type: int,
    parts: int,
    precision: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


_library.impl("linear_cpu", _linear_cpu, "CPU")
torch.library.register_fake("quantkit::linear_cpu", _linear_shape, lib=_library)


@dataclass(frozen=True)
class CpuLinear:
    """A packed weight as a callable ``x [..., in] -> y [..., out]`` (float32, float16 or bfloat16)."""

    packed: Tensor
    rows: int
    cols: int
    bits: int
    group: int
    scale_type: int
    parts: int
    precision: int

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantkit.linear_cpu(
            x,
            self.packed,
            self.rows,
            self.cols,
            self.bits,
            self.group,
            self.scale_type,
            self.parts,
            self.precision,
        )


def prepare(weight: QuantWeight, bias: Tensor | None, request: Request) -> CpuLinear:
    """Pack for the native kernels. Raises native.NativeError with a sentence when that is impossible."""
    packed = native.pack(weight, bias)
    parts = _ZERO * packed.has_zero | _ORDER * packed.has_order | _BIAS * packed.has_bias
    scale_type = native.DTYPES[packed.scale_dtype]
    return CpuLinear(
        packed.data,
        packed.rows,
        packed.cols,
        packed.bits,
        packed.group,
        scale_type,
        parts,
        precision_code(request),
    )
