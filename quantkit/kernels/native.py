"""The native CPU library: finding it, its C structures, and packing weights into its layout.

The library has a C ABI (csrc/quantkit_cpu.h) and needs neither torch nor Python headers. It is looked for in
``QUANTKIT_CPU_LIB``, beside this file, and where ``pip install`` put it. Environment variables read once, at
first use: ``QUANTKIT_ISA`` (generic, avx2, avx512, avx512-bf16, neon), ``QUANTKIT_THREADS``,
``QUANTKIT_PIN=0``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.qweight import QuantWeight

ABI_VERSION = 1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum qk_dtype
INT8, BF16_DOT, FP32, INT8_TOKEN, INT16 = range(5)  # enum qk_precision
CACHES = {"float32": 0, "bfloat16": 1, "int8": 2}  # enum qk_cache
HUGE_PAGE = 2 << 20


class NativeUnavailable(RuntimeError):
    """There is no usable native library; the message says why and what to do."""


class NativeError(RuntimeError):
    """The library refused; the message is its sentence."""


class CShape(ctypes.Structure):
    """struct qk_shape."""

    _fields_ = [
        ("rows", c_int32),
        ("cols", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_type", c_int32),
        ("has_zero", c_int32),
        ("has_order", c_int32),
        ("has_bias", c_int32),
    ]


class CWeight(ctypes.Structure):
    """struct qk_weight."""

    _fields_ = [("shape", CShape), ("data", c_void_p)]


class CLayer(ctypes.Structure):
    """struct qk_layer."""

    WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")
    NORMS = ("input_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    _fields_ = [
        *((name, CWeight) for name in WEIGHTS),
        *((name, c_void_p) for name in NORMS),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("window", c_int32),
    ]


class CModelConfig(ctypes.Structure):
    """struct qk_model_config."""

    INTS = [
        "layers",
        "hidden",
        "intermediate",
        "heads",
        "kv_heads",
        "head_dim",
        "rotary_dim",
        "vocab",
        "capacity",
        "chunk",
        "activation",
        "cache",
        "precision",
        "head_precision",
    ]
    _fields_ = [
        *((name, c_int32) for name in INTS),
        ("eps", c_float),
        ("embed_scale", c_float),
        ("attn_scale", c_float),
        ("embed_type", c_int32),
        ("embed_table", c_void_p),
        ("embed", CWeight),
        ("head", CWeight),
        ("final_norm", c_void_p),
        ("blocks", POINTER(CLayer)),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "qk_last_error": (c_char_p, []),
    "qk_isa": (c_char_p, []),
    "qk_has_bf16_dot": (c_int32, []),
    "qk_threads": (c_int32, []),
    "qk_abi_version": (c_int32, []),
    "qk_advise_huge": (None, [c_void_p, c_int64]),
    "qk_packed_bytes": (c_int64, [POINTER(CShape)]),
    "qk_pack": (c_int32, [POINTER(CShape), c_void_p, c_int32, *[c_void_p] * 5]),
    "qk_unpack_row": (c_int32, [POINTER(CWeight), c_int32, c_void_p]),
    "qk_linear": (c_int32, [POINTER(CWeight), c_void_p, c_void_p, c_int32, c_int32, c_int32]),
    "qk_model_create": (c_void_p, [POINTER(CModelConfig)]),
    "qk_model_free": (None, [c_void_p]),
    "qk_model_forward": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "qk_model_generate": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p],
    ),
    "qk_model_argmax": (c_int32, [c_void_p]),
    "qk_model_cache_bytes": (c_int64, [c_void_p]),
    "qk_read_seconds": (c_double, [c_void_p, c_int64]),
    "qk_time_linear": (
        c_int32,
        [POINTER(CWeight), c_int32, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p],
    ),
}


def _candidates() -> list[Path]:
    """Paths where the library may stand, in order of preference."""
    if named := os.environ.get("QUANTKIT_CPU_LIB"):
        return [Path(named)]
    found = sorted(Path(__file__).parent.glob("_quantkit_cpu.*"))
    try:  # an editable install keeps the Python files in the checkout and the library in site-packages
        installed = importlib.metadata.files("quantkit") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    found += [Path(str(f.locate())) for f in installed if f.name.startswith("_quantkit_cpu.")]
    return [path for path in found if path.suffix in (".so", ".dylib", ".dll")]


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises NativeUnavailable when there is none or it is of another version."""
    paths = _candidates()
    if not paths:
        raise NativeUnavailable(
            "the native CPU library was not built (no C++ compiler at install time?); "
            "install a compiler and run `pip install .` again, or set QUANTKIT_CPU_LIB"
        )
    try:
        lib = ctypes.CDLL(str(paths[0]))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the native CPU library {paths[0]} does not load: {error}") from error
    if lib.qk_abi_version() != ABI_VERSION:
        raise NativeUnavailable(
            f"{paths[0]} has ABI {lib.qk_abi_version()}, quantkit needs {ABI_VERSION}: "
            "run `pip install .` again"
        )
    return lib


def why_unavailable() -> str | None:
    """None when the library can be used, else a sentence."""
    try:
        library()
    except NativeUnavailable as error:
        return str(error)
    return None


def last_error() -> str:
    return library().qk_last_error().decode()


def check(status: int) -> None:
    """Raise NativeError with the library's sentence unless status is 0."""
    if status != 0:
        raise NativeError(last_error())


def isa() -> str:
    """Name of the instruction set in use. Raises NativeError when QUANTKIT_ISA names one not there."""
    name: str = library().qk_isa().decode()
    wanted = os.environ.get("QUANTKIT_ISA")
    if wanted and wanted != name:
        raise NativeError(
            f"QUANTKIT_ISA={wanted} is not an instruction set of this CPU and build (using {name})"
        )
    return name


def aligned_empty(nbytes: int) -> Tensor:
    """Uninitialised uint8 ``[nbytes]``, aligned to 64 bytes, on huge pages when it holds at least one.

    Huge pages nearly double the read bandwidth here: 59 GB/s against 35 with 4 KiB pages (two Zen 4 cores).
    """
    align = HUGE_PAGE if nbytes >= HUGE_PAGE else 64
    raw = torch.empty(nbytes + align, dtype=torch.uint8)
    start = -raw.data_ptr() % align
    view = raw[start : start + nbytes]
    library().qk_advise_huge(view.data_ptr(), nbytes)
    return view


@dataclass(frozen=True)
class Packed:
    """A weight in the native layout.

    rows, cols: out and in features. bits: 4 or 8 (codes), or 16 (bf16, no scales).
    group: columns sharing a scale, 0 = whole row. scale_dtype: of the stored scales.
    data: uint8 buffer of ``nbytes(...)``; holds codes, scales, zero points, order and bias.
    """

    rows: int
    cols: int
    bits: int
    group: int
    scale_dtype: torch.dtype
    has_zero: bool
    has_order: bool
    has_bias: bool
    data: Tensor

    def c_weight(self) -> CWeight:
        """The C view; valid while ``data`` lives."""
        shape = CShape(
            self.rows,
            self.cols,
            self.bits,
            self.group,
            DTYPES[self.scale_dtype],
            self.has_zero,
            self.has_order,
            self.has_bias,
        )
        return CWeight(shape, self.data.data_ptr())

    def row(self, index: int) -> Tensor:
        """One dequantized row, float32 ``[cols]``."""
        out = torch.empty(self.cols)
        check(library().qk_unpack_row(byref(self.c_weight()), index, out.data_ptr()))
        return out


def why_not_pack(scheme_bits: int, group: int, columns: int) -> str | None:
    """None when the native layout holds such a weight, else a sentence."""
    if group % 16:
        return f"the native CPU layout needs groups that are multiples of 16 columns, not {group}"
    if (group or columns) > 65536:
        return (
            "more than 65536 columns share a scale, which would overflow the int32 sums of the native kernels"
        )
    if scheme_bits > 8:
        return f"the native CPU layout holds codes of up to 8 bits, not {scheme_bits}"
    return None


def _shape_of(weight: QuantWeight | Tensor, has_bias: bool) -> CShape:
    if isinstance(weight, Tensor):
        rows, cols = weight.shape
        return CShape(rows, cols, 16, 0, DTYPES[torch.bfloat16], 0, 0, has_bias)
    scheme, (rows, cols) = weight.scheme, weight.shape
    if reason := why_not_pack(scheme.bits, scheme.group, cols):
        raise NativeError(reason)
    return CShape(
        rows,
        cols,
        4 if scheme.bits <= 4 else 8,
        scheme.group,
        DTYPES[weight.scale.dtype],
        weight.zero is not None,
        weight.order is not None,
        has_bias,
    )


def packed_bytes(weight: QuantWeight | Tensor, has_bias: bool = False) -> int:
    """Size of the packed buffer in bytes (a multiple of 64)."""
    size: int = library().qk_packed_bytes(byref(_shape_of(weight, has_bias)))
    if size < 0:
        raise NativeError(last_error())
    return size


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack(weight: QuantWeight | Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Packed:
    """Pack a quantized weight, or a float one as bf16, into the native layout.

    weight: QuantWeight of 2, 3, 4 or 8 bits, or a float tensor ``[out, in]`` (rounded to bf16).
    bias: ``[out]`` or None. out: uint8 buffer of :func:`packed_bytes`, 64-byte aligned; made when None.
    Raises NativeError with a sentence when the layout cannot hold the weight.
    """
    shape = _shape_of(weight, bias is not None)
    data = aligned_empty(packed_bytes(weight, bias is not None)) if out is None else out
    bias = None if bias is None else bias.detach().float().contiguous()
    if isinstance(weight, Tensor):
        codes, shift, scale, zero, order = (
            weight.detach().to(torch.bfloat16).contiguous(),
            0,
            None,
            None,
            None,
        )
    else:
        codes, scale = weight.codes.contiguous(), weight.scale.contiguous()
        zero = None if weight.zero is None else weight.zero.to(torch.uint8).contiguous()
        order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
        # symmetric codes of 2 or 3 bits are moved so that their midpoint becomes that of the 4-bit storage
        centre = 8 if shape.bits == 4 else 128
        shift = centre - weight.scheme.midpoint if weight.scheme.symmetric else 0
    status = library().qk_pack(
        byref(shape),
        codes.data_ptr(),
        shift,
        _pointer(scale),
        _pointer(zero),
        _pointer(order),
        _pointer(bias),
        data.data_ptr(),
    )
    check(status)
    scale_dtype = torch.bfloat16 if scale is None else scale.dtype
    return Packed(
        shape.rows,
        shape.cols,
        shape.bits,
        shape.group,
        scale_dtype,
        zero is not None,
        order is not None,
        bias is not None,
        data,
    )
