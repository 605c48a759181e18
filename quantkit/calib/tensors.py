"""Calibration windows given as token ids: .safetensors or .npy, never a pickle."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import UserError


def read_ids(path: Path, vocab_size: int) -> Tensor:
    """int64 token ids ``[tokens]`` or ``[rows, tokens]`` of a file.

    A .safetensors file must hold one tensor, or one named ``input_ids`` (or ``ids``). Raises UserError for a
    broken file, a wrong dtype or shape, or an id outside ``0 .. vocab_size - 1``.
    """
    ids = _from_npy(path) if path.suffix.lower() == ".npy" else _from_safetensors(path)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(
            f"{path} holds {str(ids.dtype).removeprefix('torch.')} values; token ids must be integers"
        )
    if ids.dim() not in (1, 2) or ids.numel() == 0:
        raise UserError(
            f"{path} has shape {list(ids.shape)}; token ids must be [tokens] or [rows, tokens], not empty"
        )
    ids = ids.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        where = (ids < 0) | (ids >= vocab_size)
        raise UserError(
            f"{path}: {int(where.sum())} token ids lie outside 0 … {vocab_size - 1} (found {low} … {high}); "
            "the file was made with another tokenizer than this model's"
        )
    return ids


def _from_npy(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a readable .npy array of integers: {error}") from error
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iufb":
        raise UserError(f"{path} holds {array.dtype} values; token ids must be integers")
    return torch.from_numpy(np.ascontiguousarray(array))


def _from_safetensors(path: Path) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
            wanted = [n for n in ("input_ids", "ids") if n in names] or (names if len(names) == 1 else [])
            if not wanted:
                raise UserError(
                    f"{path} holds the tensors {', '.join(sorted(names))}; name the token ids 'input_ids'"
                )
            return file.get_tensor(wanted[0])
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def windows_of(ids: Tensor, samples: int, seq_len: int, seed: int, source: str) -> tuple[Tensor, int]:
    """(windows [n, seq_len], windows available), a seeded choice in the file's order if there are more."""
    tokens = ids.shape[-1]
    if tokens < seq_len:
        raise UserError(
            f"{source}: found {tokens} tokens{' in a row' if ids.dim() == 2 else ''}, one window needs "
            f"{seq_len}: give more text or a smaller --seq-len"
        )
    if ids.dim() == 1:
        ids = ids[: tokens // seq_len * seq_len].view(-1, seq_len)
    else:
        ids = ids[:, :seq_len]
    available = ids.shape[0]
    if available > samples:
        pick = sorted(random.Random(f"quantkit calibration {seed}").sample(range(available), samples))
        ids = ids[pick]
    return ids.contiguous(), available
