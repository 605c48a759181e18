"""Attention over packed pages in plain PyTorch: the oracle that fast kernels must equal.

No page is dequantized. With ``k = code * s_k + l_k`` (s_k, l_k per channel of a page) and
``v = code * s_v + l_v`` (per token)::

    q . k           = (q * s_k) . code + q . l_k            one scaled query per page
    sum_t p_t v_t   = sum_t (p_t s_v[t]) code[t] + sum_t p_t l_v[t]

so the products see bare integers. Blocks (sinks, runs of pages, tail) are merged by running maximum
(flash-decoding, arXiv 2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kv.hadamard import hadamard
from quantkit.kv.pages import Fields, codes, grid
from quantkit.kv.sequence import View
from quantkit.kvscheme import Side

PAGES_AT_ONCE = 16


def page_scores(query: Tensor, fields: Fields, side: Side) -> Tensor:
    """Scores of float32 ``query [heads, rows, dim]`` against packed keys: ``[heads, rows, pages *
    tokens]``."""
    if side.bits == 16:
        scores = query @ fields["raw"].float().transpose(-1, -2)
    else:
        scale, low = (t.unsqueeze(-2) for t in grid(fields, side))  # [pages, heads, 1, groups]
        integers = codes(fields, side).float().transpose(-1, -2)
        if side.layout == "channel":
            scores = (query * scale) @ integers + (query * low).sum(-1, keepdim=True)
        else:
            query = query @ hadamard(query.shape[-1]) if side.rotated else query
            scores = (query @ integers) * scale + query.sum(-1, keepdim=True) * low
    pages, heads, rows, tokens = scores.shape
    return scores.permute(1, 2, 0, 3).reshape(heads, rows, pages * tokens)


def page_mix(weights: Tensor, fields: Fields, side: Side) -> Tensor:
    """Sum over tokens of ``weights [heads, rows, pages * tokens]`` times packed values: ``[heads, rows,
    dim]``."""
    heads, rows, _ = weights.shape
    stored = fields["raw"] if side.bits == 16 else fields["codes"]
    p = weights.reshape(heads, rows, stored.shape[0], -1).permute(2, 0, 1, 3)  # [pages, heads, rows, tokens]
    if side.bits == 16:
        return (p @ stored.float()).sum(0)
    scale, low = (t.unsqueeze(-2) for t in grid(fields, side))
    mixed = (p * scale) @ codes(fields, side).float() + (p * low).sum(-1, keepdim=True)
    mixed = mixed.sum(0)
    return mixed @ hadamard(mixed.shape[-1]) if side.rotated else mixed


def attend(
    query: Tensor,
    view: View,
    bias: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one sequence over quantized keys and values.

    query: ``[query_heads, rows, dim]``; query head h reads kv head ``h // (query_heads // kv_heads)``.
    bias: float32 ``[query_heads or 1, rows, view.length]`` added to the scores (``-inf``: not allowed), or
    None.
    scaling: factor on the scores, default ``dim ** -0.5``; softcap: ``c * tanh(score / c)`` after scaling.
    Returns float32 ``[query_heads, rows, v_dim]``. A row that may see nothing gives zeros.
    """
    query_heads, rows, dim = query.shape
    heads = view.tail[0].shape[0]
    group = query_heads // heads
    # all query heads of a kv head become rows of one product, so each stored byte is read once
    q = query.float().reshape(heads, group * rows, dim) * (dim**-0.5 if scaling is None else scaling)
    if bias is not None:
        bias = bias.expand(query_heads, rows, -1).reshape(heads, group * rows, -1)
    peak = q.new_full((heads, group * rows, 1), -torch.inf)
    total = torch.zeros_like(peak)
    out = q.new_zeros((heads, group * rows, view.tail[1].shape[-1]))
    position = 0

    def merge(scores: Tensor, mix, keep: Tensor | None) -> None:
        """Fold one block in. keep: which of its columns are tokens, in order (None: all)."""
        nonlocal peak, total, out, position
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        tokens = scores.shape[-1] if keep is None else int(keep.sum())
        if bias is not None:
            part = bias[..., position : position + tokens]
            if keep is None:
                scores = scores + part
            else:
                scores = scores.masked_fill(~keep, -torch.inf)
                scores[..., keep] += part
        elif keep is not None:
            scores = scores.masked_fill(~keep, -torch.inf)
        position += tokens
        fresh = torch.maximum(peak, scores.amax(-1, keepdim=True))
        safe = torch.where(fresh.isinf(), torch.zeros_like(fresh), fresh)  # -inf - -inf would be NaN
        weights, fade = torch.exp(scores - safe), torch.exp(peak - safe)
        total = total * fade + weights.sum(-1, keepdim=True)
        out = out * fade + mix(weights)
        peak = fresh

    def merge_plain(pair: tuple[Tensor, Tensor]) -> None:
        keys, values = pair[0].float(), pair[1].float()
        if keys.shape[-2]:
            merge(q @ keys.transpose(-1, -2), lambda p: p @ values, None)

    if view.sinks is not None:
        merge_plain(view.sinks)
    for start in range(0, len(view.pages), PAGES_AT_ONCE):
        pages = view.pages[start : start + PAGES_AT_ONCE]
        k_fields, v_fields = view.pool.read([page.slot for page in pages])
        scores = page_scores(q, k_fields, view.pool.keys)
        size = scores.shape[-1] // len(pages)
        keep = None
        if any(page.skip or page.count != size for page in pages):
            slot = torch.arange(size, device=q.device)
            keep = torch.cat([(slot >= page.skip) & (slot < page.count) for page in pages])
        merge(scores, lambda p, v=v_fields: page_mix(p, v, view.pool.values), keep)
    merge_plain(view.tail)
    return (out / total.clamp_min(torch.finfo(torch.float32).tiny)).reshape(query_heads, rows, -1)
