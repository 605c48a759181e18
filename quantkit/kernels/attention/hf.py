"""The transformers attention function ``"quantkit_kv"``: dense states go to SDPA, quantized ones to our
kernel.

Use it with ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="quantkit_kv")`` after
:func:`register`, together with a :class:`quantkit.nn.quant_cache.QuantCache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.attention.handle import Handle, unwrap
from quantkit.kernels.attention.reference import attend

NAME = "quantkit_kv"


def register() -> str:
    """Make ``"quantkit_kv"`` known to transformers (idempotent); returns the name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query ``[batch, heads, rows, dim]`` -> ``[batch, rows, heads,
    dim]``.

    Raises ValueError for what a quantized cache cannot serve: dropout, learned sinks, a position bias.
    """
    handle = unwrap(key)
    if handle is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            softcap=softcap,
            **kwargs,
        )
    if dropout:
        raise ValueError("attention dropout is for training; a quantized cache serves inference only")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"attention over a quantized cache does not support {name!r}; "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    out = query.new_empty(query.shape[0], query.shape[1], query.shape[2], handle.views[0].tail[1].shape[-1])
    for row in range(len(handle.views)):
        bias = sequence_bias(handle, row, query.shape[2], attention_mask, causal, query.device)
        out[row] = attend(query[row], handle.views[row], bias, scaling, softcap).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def sequence_bias(
    handle: Handle, row: int, rows: int, mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """float32 ``[1 or heads, rows, view.length]`` for one sequence of the batch, or None when all is allowed.

    mask: bool (True: allowed) or additive float ``[batch, 1 or heads, rows, visible]``, or None: then causal,
    aligned at the end. Tokens that the view holds but the mask does not speak of have slid out of the window.
    """
    length = handle.views[row].length
    stale = length - (handle.visible - handle.pads[row])
    if mask is None:
        if stale == 0 and (rows == 1 or not causal):
            return None
        allowed = torch.ones(rows, length, dtype=torch.bool, device=device)
        if causal:
            allowed = allowed.tril(length - rows)
        allowed[:, :stale] = False
        return torch.zeros(1, rows, length, device=device).masked_fill(~allowed, -torch.inf)
    part = mask[row if mask.shape[0] > 1 else 0, :, :, handle.pads[row] : handle.visible]
    if part.dtype == torch.bool:
        part = torch.zeros(part.shape, device=device).masked_fill(~part, -torch.inf)
    part = part.float()
    return torch.nn.functional.pad(part, (stale, 0), value=-torch.inf) if stale else part
