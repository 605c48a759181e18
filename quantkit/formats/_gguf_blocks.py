"""GGML blocks <-> QuantWeights and floats. Blocks run along the inputs; d, m and dmin are float16.

=====  =======  =====  ==========================================================  ===========================
type   weights  bytes  layout                                                      value
=====  =======  =====  ==========================================================  ===========================
Q4_0   32       18     d, qs[16]: weight j in the low nibble of byte j, j + 16     d * (q - 8)
                       in its high nibble
Q4_1   32       20     d, m, qs[16] as Q4_0                                        d * q + m
Q8_0   32       34     d, int8[32]                                                 d * q
Q4_K   256      144    d, dmin, scales[12], qs[128]: of each 32 bytes the low      d * sc * q - dmin * mn
                       nibbles are 32 weights, the high ones the next 32           (sc, mn for 32 weights)
Q6_K   256      210    ql[128], qh[64], int8 sc[16], d                             d * sc * (q - 32)
=====  =======  =====  ==========================================================  ===========================

Groups of our weights are repeated over the blocks they cover. Symmetric 4 and 8 bits are exact in Q4_0 and
Q8_0. Asymmetric 4 bits are exact in Q4_K when groups are whole super-blocks (sc = 1, mn = zero point,
d = dmin = scale); in Q4_1 the offset m = -zero * scale is rounded to float16, at most ``Q4_1_ERROR`` steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantkit.formats._common import CannotRead, exact_scale, is_ordered
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

# m = fp16(-zero * scale), zero <= 15: half a unit in the 11th bit of a number below 16 steps
Q4_1_ERROR = 2.0**-7


def kind_for(scheme: Scheme, columns: int) -> str | None:
    """The block type for a weight of this scheme, or None; see ``why_not`` of the format for the reason."""
    if columns % 32 or scheme.group % 32:
        return None
    if scheme.symmetric:
        return {4: "Q4_0", 8: "Q8_0"}.get(scheme.bits)
    if scheme.bits != 4:
        return None
    return "Q4_K" if columns % 256 == 0 and scheme.group % 256 == 0 else "Q4_1"


def pack(name: str, weight: QuantWeight) -> tuple[str, np.ndarray]:
    """Block type and bytes uint8 ``[out, bytes of a row]``. The caller has asked ``why_not``.

    Raises CannotStore when a scale is not exact in float16.
    """
    rows, columns = weight.shape
    kind = kind_for(weight.scheme, columns)
    if kind is None or is_ordered(weight):
        raise ValueError(f"{name}: {weight.scheme} has no block type")
    size = 256 if kind == "Q4_K" else 32
    first = weight.columns_to_groups()[::size]  # group of each block
    exact_scale(name, weight.scale, torch.float16)
    d = weight.scale.float()[:, first].numpy().astype(np.float16)[..., None]
    codes = weight.codes.numpy().reshape(rows, -1, size)
    if kind == "Q8_0":
        return kind, _join(d, codes ^ 0x80)  # unsigned + 128 -> two's complement
    if kind == "Q4_0":
        return kind, _join(d, _nibbles(codes))
    assert weight.zero is not None
    zero = weight.zero[:, first].numpy()[..., None]
    if kind == "Q4_1":
        m = (-zero.astype(np.float32) * d.astype(np.float32)).astype(np.float16)
        return kind, _join(d, m, _nibbles(codes))
    # sc = 1 in all eight sub-blocks; mn = zero point < 16, so its upper two bits are 0 and bytes 8..11 hold
    # sc & 15 | (mn & 15) << 4
    ones = np.ones((rows, codes.shape[1], 4), np.uint8)
    scales = np.concatenate((ones, ones * zero, ones | (zero << 4)), axis=2)
    return kind, _join(d, d, scales, _nibbles(codes.reshape(rows, -1, 4, 64)).reshape(rows, -1, 128))


def quantize_q8_0(values: Tensor) -> np.ndarray:
    """Round floats ``[rows, n]``, n a multiple of 32, to Q8_0 as ggml does: d = absmax / 127; uint8 bytes."""
    x = values.float().numpy().reshape(values.shape[0], -1, 32)
    d = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    scaled = x * inverse
    # halves away from zero, as C's roundf
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return _join(d.astype(np.float16), codes.view(np.uint8))


def unpack(name: str, kind: str, raw: np.ndarray) -> QuantWeight | None:
    """Blocks uint8 ``[rows, bytes]`` as a QuantWeight (groups of 32; Q4_K: 256), or None if no grid fits.

    Q4_0 and Q8_0 always fit. Q4_1 and Q4_K fit when every block is of the form ``pack`` writes: an integer
    zero point 0..15, and for Q4_K the same scale throughout the block.
    """
    if kind == "Q8_0":
        d, qs = _split(raw, 34, 2)
        codes = np.ascontiguousarray(qs) ^ 0x80
        return _weight(8, 32, d, codes)
    if kind == "Q4_0":
        d, qs = _split(raw, 18, 2)
        return _weight(4, 32, d, _from_nibbles(qs))
    if kind == "Q4_1":
        d, m, qs = _split(raw, 20, 2, 4)
        scale = _half(d)
        zero = _integer_zero(scale, -_half(m).astype(np.float32))
        if zero is None or not np.array_equal(
            (-zero.astype(np.float32) * scale.astype(np.float32)).astype(np.float16), _half(m)
        ):
            return None
        return _weight(4, 32, d, _from_nibbles(qs), zero)
    if kind == "Q4_K":
        d, dmin, packed, qs = _split(raw, 144, 2, 4, 16)
        sc, mn = _scales_k4(packed)
        if not np.array_equal(d, dmin) or (sc != 1).any() or (mn != mn[..., :1]).any() or (mn > 15).any():
            return None
        return _weight(4, 256, d, _from_nibbles(qs.reshape(*qs.shape[:2], 4, 32)), mn[..., :1])
    return None


def dequantize(name: str, kind: str, raw: np.ndarray) -> Tensor:
    """Bytes uint8 ``[rows, bytes]`` as float32 ``[rows, n]``.

    Types beside those of the table are decoded by the ``gguf`` package. Raises CannotRead without it.
    """
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return torch.from_numpy(np.array(raw)).view(dtype)
    if kind in _DECODERS:
        return torch.from_numpy(_DECODERS[kind](raw).reshape(raw.shape[0], -1))
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as decode
    except ImportError:
        raise CannotRead(f"{name} is of type {kind}; `pip install gguf` to read it") from None
    return torch.from_numpy(decode(np.ascontiguousarray(raw), GGMLQuantizationType[kind]).astype(np.float32))


def _q4_0(raw: np.ndarray) -> np.ndarray:
    d, qs = _split(raw, 18, 2)
    return _float(d) * (_from_nibbles(qs).astype(np.float32) - 8)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    d, m, qs = _split(raw, 20, 2, 4)
    return _float(d) * _from_nibbles(qs) + _float(m)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    d, qs = _split(raw, 34, 2)
    return _float(d) * np.ascontiguousarray(qs).view(np.int8)


def _q4_k(raw: np.ndarray) -> np.ndarray:
    d, dmin, packed, qs = _split(raw, 144, 2, 4, 16)
    sc, mn = _scales_k4(packed)
    codes = _from_nibbles(qs.reshape(*qs.shape[:2], 4, 32)).reshape(*qs.shape[:2], 8, 32)
    return (_float(d) * sc)[..., None] * codes - (_float(dmin) * mn)[..., None]


def _q6_k(raw: np.ndarray) -> np.ndarray:
    ql, qh, sc, d = _split(raw, 210, 128, 192, 208)
    low = ql.reshape(*ql.shape[:2], 2, 64)
    high = qh.reshape(*qh.shape[:2], 2, 32)
    parts = [
        (low[..., :32] & 15) | ((high & 3) << 4),
        (low[..., 32:] & 15) | (((high >> 2) & 3) << 4),
        (low[..., :32] >> 4) | (((high >> 4) & 3) << 4),
        (low[..., 32:] >> 4) | ((high >> 6) << 4),
    ]
    codes = np.stack(parts, axis=3).reshape(*ql.shape[:2], 16, 16).astype(np.float32) - 32
    scale = _float(d) * np.ascontiguousarray(sc).view(np.int8)
    return scale[..., None] * codes


_DECODERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


def _join(*parts: np.ndarray) -> np.ndarray:
    """Fields ``[rows, blocks, n]`` of any dtype side by side, as bytes ``[rows, blocks * size]``."""
    as_bytes = [np.ascontiguousarray(p).view(np.uint8) for p in parts]
    return np.concatenate(as_bytes, axis=2).reshape(as_bytes[0].shape[0], -1)


def _split(raw: np.ndarray, size: int, *borders: int) -> list[np.ndarray]:
    """Bytes ``[rows, blocks * size]`` -> fields ``[rows, blocks, n]``."""
    return np.split(raw.reshape(raw.shape[0], -1, size), borders, axis=2)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """``[..., n]`` -> ``[..., n/2]``: first half of the last axis in the low nibbles, second in the high."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def _from_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _half(field: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(field).view(np.float16)


def _float(field: np.ndarray) -> np.ndarray:
    return _half(field).astype(np.float32)


def _scales_k4(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight 6-bit scales and minima ``[..., 8]`` in the twelve bytes of Q4_K."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    sc = np.concatenate((a & 63, (c & 15) | ((a >> 6) << 4)), axis=-1)
    mn = np.concatenate((b & 63, (c >> 4) | ((b >> 6) << 4)), axis=-1)
    return sc, mn


def _integer_zero(scale: np.ndarray, offset: np.ndarray) -> np.ndarray | None:
    """uint8 zero points with ``offset = zero * scale`` to rounding, or None if a block has none in 0..15."""
    s = scale.astype(np.float32)
    if (s == 0).any() or not np.isfinite(offset / np.where(s == 0, 1, s)).all():
        return None
    zero = np.round(offset / s)
    return zero.astype(np.uint8) if ((zero >= 0) & (zero <= 15)).all() else None


def _weight(
    bits: int, group: int, d: np.ndarray, codes: np.ndarray, zero: np.ndarray | None = None
) -> QuantWeight:
    rows = codes.shape[0]
    scheme = Scheme(bits, zero is None, group, "float16")
    scale = torch.from_numpy(_half(d).reshape(rows, -1).copy())
    flat = torch.from_numpy(np.ascontiguousarray(codes.reshape(rows, -1)))
    zeros = None if zero is None else torch.from_numpy(np.ascontiguousarray(zero.reshape(rows, -1)))
    return QuantWeight(scheme, flat, scale, zeros)
