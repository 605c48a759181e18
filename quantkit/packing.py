"""n-bit codes <-> words: the only bit twiddling in quantkit.

Every plain integer format (GPTQ, compressed-tensors, MLX, ORT) is the same dense stream: code ``i`` occupies
bits ``[i*b, (i+1)*b)`` of consecutive little-endian 32-bit words, least significant bit first, crossing word
borders where ``b`` does not divide 32. The formats differ in the axis only::

    bits=4, codes 1,2,3,...,8  ->  0x87654321
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["pack", "packed_words", "unpack"]


def packed_words(count: int, bits: int) -> int:
    """int32 words that hold ``count`` codes of ``bits`` bits."""
    return -(-count * bits // 32)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 ``codes [..., n]`` along the last axis into int32 ``[..., packed_words(n, bits)]``.

    Unused high bits of the last word are zero. Raises ValueError when a code needs more than ``bits`` bits.
    """
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, not {codes.dtype}")
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    flat = codes.reshape(-1, codes.shape[-1]).numpy()
    n = flat.shape[1]
    words = packed_words(n, bits)
    if 8 % bits == 0:
        per_byte = 8 // bits
        padded = np.zeros((flat.shape[0], words * 4 * per_byte), np.uint8)
        padded[:, :n] = flat
        lanes = padded.reshape(flat.shape[0], -1, per_byte)
        out = np.zeros(lanes.shape[:2], np.uint8)
        for lane in range(per_byte):
            out |= lanes[:, :, lane] << (bits * lane)
    else:
        # one row of booleans per code; rows are handled in slices so that the 8-fold blow-up stays small
        out = np.zeros((flat.shape[0], words * 4), np.uint8)
        step = max(1, (1 << 24) // max(1, n * 8))
        for r in range(0, flat.shape[0], step):
            chunk = np.unpackbits(flat[r : r + step, :, None], axis=2, bitorder="little")[:, :, :bits]
            dense = np.packbits(chunk.reshape(chunk.shape[0], -1), axis=1, bitorder="little")
            out[r : r + step, : dense.shape[1]] = dense
    packed = torch.from_numpy(np.ascontiguousarray(out).view("<i4").astype(np.int32, copy=False))
    return packed.reshape(*codes.shape[:-1], words)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of :func:`pack`: int32 ``[..., w]`` -> uint8 ``[..., count]``.

    Raises ValueError when the words hold fewer than ``count`` codes.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"packed words must be int32, not {words.dtype}")
    if words.shape[-1] < packed_words(count, bits):
        raise ValueError(f"{words.shape[-1]} words hold fewer than {count} codes of {bits} bits")
    flat = words.reshape(-1, words.shape[-1]).contiguous().numpy()
    data = flat.astype("<i4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        per_byte = 8 // bits
        out = np.empty((*data.shape, per_byte), np.uint8)
        for lane in range(per_byte):
            out[:, :, lane] = (data >> (bits * lane)) & ((1 << bits) - 1)
        codes = out.reshape(data.shape[0], -1)[:, :count]
    else:
        codes = np.empty((data.shape[0], count), np.uint8)
        weights = (1 << np.arange(bits)).astype(np.uint8)
        step = max(1, (1 << 24) // max(1, count * 8))
        for r in range(0, data.shape[0], step):
            stream = np.unpackbits(data[r : r + step], axis=1, bitorder="little")[:, : count * bits]
            codes[r : r + step] = stream.reshape(stream.shape[0], count, bits) @ weights
    return torch.from_numpy(np.ascontiguousarray(codes)).reshape(*words.shape[:-1], count)
