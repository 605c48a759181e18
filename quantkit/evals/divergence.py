"""How far a model's predictions are from a reference's: KL(p_ref || p), top-1 agreement, with a noise floor.

Perplexity can stay the same while answers change; the divergence to the original cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.evals._rows import Row, row
from quantkit.evals._sides import Side, chunk_rows, side_of
from quantkit.evals._stats import clustered
from quantkit.evals.corpus import Windows


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per token, each ``[n, T-1]`` float32.

    kl: sum over the vocabulary of p_ref (log p_ref - log p), nats. same_top1: 1 where both models' likeliest
    token is the same. nll_ref, nll: of the true next token.
    """

    kl: Tensor
    same_top1: Tensor
    nll_ref: Tensor
    nll: Tensor


def token_divergence(reference: Side, other: Side, ids: Tensor, batch: int | None = 1) -> Divergence:
    """Both sides over windows ``ids [n, T]``. ``batch``: windows a call of hidden_states (None: all at once).

    The two models need not be in memory together: record the reference first (:class:`Recorded`).
    """
    out = torch.empty(4, len(ids), ids.shape[1] - 1)
    at = 0
    for part in ids.split(batch or len(ids)):
        hidden_ref, hidden = reference.hidden_states(part), other.hidden_states(part)
        for states_ref, states, window in zip(hidden_ref, hidden, part, strict=True):
            out[:, at] = _window(reference, other, states_ref[:-1], states[:-1], window[1:])
            at += 1
    return Divergence(*out)


def _window(reference: Side, other: Side, states_ref: Tensor, states: Tensor, targets: Tensor) -> Tensor:
    out = torch.empty(4, len(targets))
    start, size = 0, 1  # one position first: only its logits tell how many positions fit the memory bound
    while start < len(targets):
        rows = slice(start, start + size)
        log_ref = reference.logits(states_ref[rows]).log_softmax(-1)
        log_p = other.logits(states[rows]).log_softmax(-1).to(log_ref.device)
        if log_ref.shape != log_p.shape:
            raise ValueError(
                f"vocabularies differ: {log_ref.shape[-1]} in the reference, {log_p.shape[-1]} here"
            )
        out[:, rows] = _compare(log_ref, log_p, targets[rows].to(log_ref.device)).cpu()
        start, size = start + size, chunk_rows(log_ref.shape[-1])
    return out


def _compare(log_ref: Tensor, log_p: Tensor, targets: Tensor) -> Tensor:
    kl = (log_ref.exp() * (log_ref - log_p)).sum(-1)
    same = (log_ref.argmax(-1) == log_p.argmax(-1)).float()
    picked_ref, picked = (x.gather(1, targets[:, None])[:, 0] for x in (log_ref, log_p))
    return torch.stack([kl, same, -picked_ref, -picked])


def rows_of(
    found: Divergence, windows: Windows, dtype: str = "float32", floor: Tensor | None = None
) -> list[Row]:
    """Rows: "kl", "top1_agreement", quantiles of KL, "nll_change", and "kl_noise_floor" when given.

    floor: KL per token ``[n, T-1]`` of the reference against itself in other arithmetic.
    """
    more = {**windows.about, "tokens": found.kl.numel(), "dtype": dtype}
    kl, top1, change = clustered(found.kl), clustered(found.same_top1), clustered(found.nll - found.nll_ref)
    flat = found.kl.flatten().double()

    def means(values: Tensor) -> list[float]:
        return [round(float(x), 9) for x in values.double().mean(1)]

    rows = [
        row("kl", kl.mean, "nats/token", kl.stderr, per_window=means(found.kl), **more),
        row("top1_agreement", top1.mean, "fraction", top1.stderr, per_window=means(found.same_top1), **more),
        row("kl_median", float(flat.median()), "nats/token", **more),
        row("kl_p99", float(flat.kthvalue(max(1, round(0.99 * len(flat)))).values), "nats/token", **more),
        row("kl_max", float(flat.max()), "nats/token", **more),
        row("nll_change", change.mean, "nats/token", change.stderr, **more),
    ]
    if floor is not None:
        low = clustered(floor)
        rows.append(row("kl_noise_floor", low.mean, "nats/token", low.stderr, **more))
    return rows


def measure(
    reference: Any, model: Any, windows: Windows, batch: int | None = 1, again: Side | None = None
) -> list[Row]:
    """Divergence of ``model`` from ``reference``; each a transformers model or a :class:`Side`.

    again: the reference in other arithmetic, for the noise floor: the reference loaded in bfloat16, or the
        cheap lower bound :func:`quantkit.evals.rounded` (its final hidden states rounded). KL at or below the
        floor means: as good as identical.
    """
    ref = reference if isinstance(reference, Side) else side_of(reference)
    side = model if isinstance(model, Side) else side_of(model)
    found = token_divergence(ref, side, windows.ids, batch)
    floor = None if again is None else token_divergence(ref, again, windows.ids, batch).kl
    return rows_of(found, windows, side.dtype, floor)
