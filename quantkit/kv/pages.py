"""Pages of quantized keys or values: the grid, the packing, and nothing else.

A page holds ``tokens`` tokens of one sequence for all kv heads of a layer. Everything here works on a
batch of
pages: float ``[pages, heads, tokens, head_dim]`` in, a dict of small tensors out. The codes are packed in
planes,
so that unpacking is a shift and a mask over contiguous bytes::

    4 bits, 64 tokens, "channel":  byte [t, d] = code[t, d] | code[t + 32, d] << 4          uint8 [32, D]
    4 bits, "token":               byte [t, d] = code[t, d] | code[t, d + D/2] << 4         uint8 [64, D/2]
    2 bits: four planes in the same way; 8 bits: one plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kv.hadamard import hadamard
from quantkit.kvscheme import Side
from quantkit.scheme import SchemeError

Fields = dict[str, Tensor]

# Fractions of [min, max] that `search` tries. Below 0.7 the clipped tail always cost more than the finer
# step gained, on keys and values of the three models we measure with.
SHRINK = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
MIN_RANGE = 2.0**-14
OCTAVE = 16.0  # codes of a compact scale per factor of two


def pack_planes(codes: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 codes -> bytes, ``8 // bits`` codes each; the length of ``dim`` shrinks by that factor."""
    planes = 8 // bits
    if codes.shape[dim] % planes:
        raise SchemeError(
            f"{codes.shape[dim]} codes along an axis do not fill bytes of {planes} codes of {bits} bits"
        )
    out = torch.zeros_like(codes.chunk(planes, dim)[0])
    for index, plane in enumerate(codes.chunk(planes, dim)):
        out |= plane << (bits * index)
    return out


def unpack_planes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Inverse of :func:`pack_planes`."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * index)) & mask for index in range(8 // bits)], dim)


def encode(states: Tensor, side: Side) -> Fields:
    """Quantize pages ``[pages, heads, tokens, head_dim]`` (any float dtype); all tokens count.

    Returns, for bits < 16: ``codes`` uint8, ``scale`` and, when asymmetric, ``low`` (and ``base`` for compact
    scales), each with leading axes [pages, heads]; for 16 bits ``raw``, the states unchanged.
    Raises ValueError on a non-finite state, and on one that float16 cannot hold.
    """
    if side.bits == 16:
        return {"raw": states.contiguous()}
    x = states.float()
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{int((~torch.isfinite(x)).sum())} non-finite values; the model produced them, not the cache"
        )
    if side.rotated:
        x = x @ hadamard(x.shape[-1])
    axis = -2 if side.layout == "channel" else -1
    low, high = x.amin(axis), x.amax(axis)
    if float(torch.maximum(-low.min(), high.max())) > 65504:
        raise ValueError("a key or value exceeds 65504, the largest float16")
    base = _base(low, high, side)
    best: Fields | None = None
    best_error = low.new_full(low.shape, torch.inf)
    for shrink in SHRINK if side.search else SHRINK[:1]:
        fields = _round_grid(low, high, shrink, base, side)
        scale, floor = grid(fields, side)
        scale, floor = scale.unsqueeze(axis), floor.unsqueeze(axis)
        codes = ((x - floor) / scale).round_().clamp_(0, side.max_code)
        if side.search:
            error = (codes * scale + floor - x).square().sum(axis)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
        fields["codes"] = codes.to(torch.uint8)
        if best is None:
            best = fields
            continue
        for name, value in fields.items():
            if name != "base":
                best[name] = torch.where(
                    better.unsqueeze(axis) if name == "codes" else better, value, best[name]
                )
    assert best is not None
    best["codes"] = pack_planes(best["codes"], side.bits, axis)
    return best


def _base(low: Tensor, high: Tensor, side: Side) -> Tensor | None:
    """bfloat16 ``[pages, heads]``: at least the widest range that any group of the page can ask for."""
    if side.meta != "compact":
        return None
    widest = 2 * torch.maximum(-low, high) if side.symmetric else high.clamp_min(0) - low.clamp_max(0)
    widest = torch.maximum(widest, high - low).amax(-1).clamp_min(MIN_RANGE)
    # bfloat16 rounds by at most 2**-8; a symmetric grid reaches only max_code - 2**(bits-1) steps upwards
    reach = side.max_code / (side.max_code - 1) if side.symmetric else 1.0
    return (widest * reach * (1 + 2.0**-7)).to(torch.bfloat16)


def _round_grid(low: Tensor, high: Tensor, shrink: float, base: Tensor | None, side: Side) -> Fields:
    """Stored scale and low of one group each, rounded; the codes are chosen afterwards, for what is
    stored."""
    if side.symmetric:
        # codes run from -2**(bits-1) to 2**(bits-1) - 1 around the midpoint: the positive side is the shorter
        span = torch.maximum(-low, high) * shrink * side.max_code / (2 ** (side.bits - 1) - 1)
        low = high = torch.zeros_like(low)
    else:
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        low, high = middle - half, middle + half
        span = high - low
    if side.meta != "compact":
        dtype = getattr(torch, side.meta)
        floor = low.to(dtype)
        span = span if side.symmetric else torch.maximum(high - floor.float(), torch.zeros_like(high))
        fields = {"scale": (span.clamp_min(MIN_RANGE) / side.max_code).to(dtype)}
        return fields if side.symmetric else fields | {"low": floor}
    assert base is not None
    if side.symmetric or side.layout == "channel":
        floor = low.to(torch.float16)
        span = span if side.symmetric else high - floor.float()
    else:
        # zero always lies inside a token's range, so that low can be an 8-bit fraction of it
        low, high = low.clamp_max(0), high.clamp_min(0)
        span = high - low
    ratio = base.float().unsqueeze(-1) / span.clamp_min(MIN_RANGE / 2)
    scale = (ratio.log2() * OCTAVE).floor().clamp(0, 255).to(torch.uint8)
    if side.symmetric:
        return {"scale": scale, "base": base}
    if side.layout == "channel":
        return {"scale": scale, "base": base, "low": floor}
    stored = _compact_range(scale, base)
    return {"scale": scale, "base": base, "low": (-low / stored * 255).round().clamp(0, 255).to(torch.uint8)}


def _compact_range(scale: Tensor, base: Tensor) -> Tensor:
    return base.float().unsqueeze(-1) * torch.exp2(scale.float() / -OCTAVE)


def grid(fields: Fields, side: Side) -> tuple[Tensor, Tensor]:
    """(scale, low) as float32 ``[pages, heads, groups]``, so that ``x = code * scale + low``."""
    if side.meta == "compact":
        span = _compact_range(fields["scale"], fields["base"])
        scale = span / side.max_code
        if side.symmetric:
            low = -scale * 2 ** (side.bits - 1)
        elif side.layout == "channel":
            low = fields["low"].float()
        else:
            low = fields["low"].float() * span / -255
        return scale, low
    scale = fields["scale"].float()
    return scale, -scale * 2 ** (side.bits - 1) if side.symmetric else fields["low"].float()


def codes(fields: Fields, side: Side) -> Tensor:
    """uint8 codes ``[pages, heads, tokens, head_dim]``."""
    return unpack_planes(fields["codes"], side.bits, -2 if side.layout == "channel" else -1)


def decode(fields: Fields, side: Side, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize: ``[pages, heads, tokens, head_dim]``, rotated back where the layout rotates."""
    if side.bits == 16:
        return fields["raw"].to(dtype)
    axis = -2 if side.layout == "channel" else -1
    scale, low = grid(fields, side)
    x = torch.addcmul(low.unsqueeze(axis), codes(fields, side).float(), scale.unsqueeze(axis))
    return (x @ hadamard(x.shape[-1]) if side.rotated else x).to(dtype)
