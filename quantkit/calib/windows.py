"""Cutting a stream of passages into exact windows, remembering which row each token came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quantkit.calib.passages import Passage, Specials


@dataclass(slots=True)
class Packed:
    """Windows ``ids`` int64 [n, seq_len]; ``row_of`` int64 [n, seq_len], -1 for an added BOS.

    lengths: tokens of every passage that was tokenized (separator not counted), as (row, tokens).
    found: tokens tokenized in all, separators included; left_over: those in no window.
    """

    ids: Tensor
    row_of: Tensor
    lengths: list[tuple[int, int]] = field(default_factory=list)
    found: int = 0
    left_over: int = 0


def pack(
    passages: Iterable[tuple[Passage, list[int]]], specials: Specials, samples: int, seq_len: int
) -> Packed:
    """At most ``samples`` windows of ``seq_len``, passages in the given order; reads no more than needed."""
    ids: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    lengths: list[tuple[int, int]] = []
    found = 0
    for passage, tokens in passages:
        lengths.append((passage.row, len(tokens)))
        if specials.separator is not None:
            tokens = [*tokens, specials.separator]
        ids.append(np.asarray(tokens, dtype=np.int64))
        rows.append(np.full(len(tokens), passage.row, dtype=np.int64))
        found += len(tokens)
        if found >= samples * seq_len:
            break
    stream = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    origin = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    windows, window_rows, used = _cut(stream, origin, specials.bos, samples, seq_len)
    return Packed(windows, window_rows, lengths, found, found - used)


def _cut(
    stream: np.ndarray, origin: np.ndarray, bos: int | None, samples: int, seq_len: int
) -> tuple[Tensor, Tensor, int]:
    """Windows of ``stream``; with ``bos``, a window that does not start with it gets it put in front."""
    ids: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    at = 0
    while len(ids) < samples:
        lead = bos is not None and at < len(stream) and stream[at] != bos
        take = seq_len - lead
        if at + take > len(stream):
            break
        piece, piece_rows = stream[at : at + take], origin[at : at + take]
        if lead and bos is not None:
            piece, piece_rows = np.insert(piece, 0, bos), np.insert(piece_rows, 0, -1)
        ids.append(piece)
        rows.append(piece_rows)
        at += take
    if not ids:
        empty = torch.zeros(0, seq_len, dtype=torch.long)
        return empty, empty.clone(), 0
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(rows)), at
