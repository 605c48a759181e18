"""Perplexity over named windows: ``exp`` of the mean negative log-likelihood per predicted token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantkit.evals._rows import Row, row
from quantkit.evals._sides import Side, chunk_rows, side_of
from quantkit.evals._stats import clustered
from quantkit.evals.corpus import Windows


def token_nll(side: Side, ids: Tensor, batch: int | None = 1) -> Tensor:
    """float32 ``[n, T-1]``: -log p(ids[:, t+1] | ids[:, :t+1]), nats. ``batch``: windows a call (None: all).

    Logits exist for a bounded number of positions at a time, whatever the window's length.
    """
    out = torch.empty(len(ids), ids.shape[1] - 1)
    at = 0
    for part in ids.split(batch or len(ids)):
        hidden = side.hidden_states(part)
        for states, window in zip(hidden, part, strict=True):
            out[at] = _window_nll(side, states, window)
            at += 1
    return out


def _window_nll(side: Side, states: Tensor, window: Tensor) -> Tensor:
    states, targets = states[:-1], window[1:]
    first = side.logits(states[:1])
    parts = [_nll(first, targets[:1])]
    size = chunk_rows(first.shape[-1])
    for start in range(1, len(states), size):
        rows = slice(start, start + size)
        parts.append(_nll(side.logits(states[rows]), targets[rows]))
    return torch.cat(parts)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    picked = logits.gather(1, targets.to(logits.device)[:, None])[:, 0]
    return (logits.logsumexp(-1) - picked).cpu()


def rows_of(nll: Tensor, windows: Windows, dtype: str = "float32") -> list[Row]:
    """Rows for "perplexity" and "nll" from :func:`token_nll` of these windows.

    The standard error of perplexity is that of the mean log-likelihood times the perplexity (delta method).
    """
    mean = clustered(nll)
    value = math.exp(mean.mean) if mean.mean < 700 else math.inf
    error = None if mean.stderr is None else value * mean.stderr
    more = {**windows.about, "tokens": mean.tokens, "dtype": dtype}
    per_window = [round(float(x), 6) for x in nll.double().mean(1)]
    return [
        row("perplexity", value, "", error, **more),
        row("nll", mean.mean, "nats/token", mean.stderr, per_window=per_window, **more),
    ]


def measure(model: Any, windows: Windows, batch: int | None = 1) -> list[Row]:
    """Perplexity of a transformers model, or of a :class:`Side`."""
    side = model if isinstance(model, Side) else side_of(model)
    return rows_of(token_nll(side, windows.ids, batch), windows, side.dtype)
