"""Handle: quantized keys and values travelling through a model's attention module as if they were tensors.

A transformers attention module passes what ``cache.update`` returns straight to the attention function. For a
quantized layer that is a tensor without data (one NaN, expanded to the expected shape) that carries a Handle.
Code that does not know about it computes NaN, which nobody mistakes for a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv.sequence import View

_ATTRIBUTE = "quantkit_kv_handle"


@dataclass(frozen=True, slots=True)
class Handle:
    """views: one per sequence of the batch; pads: left-padding tokens of each, never stored;
    visible: key positions that the mask speaks of, padding included."""

    views: tuple[View, ...]
    pads: tuple[int, ...]
    visible: int


def wrap(handle: Handle, heads: int, head_dim: int, like: Tensor) -> Tensor:
    """A tensor of shape [batch, heads, visible, head_dim] that carries ``handle`` and no data."""
    shape = (len(handle.views), heads, handle.visible, head_dim)
    tensor = torch.full((1, 1, 1, 1), torch.nan, dtype=like.dtype, device=like.device).expand(shape)
    setattr(tensor, _ATTRIBUTE, handle)
    return tensor


def unwrap(tensor: Tensor) -> Handle | None:
    """The Handle that ``tensor`` carries, or None for an ordinary tensor."""
    return getattr(tensor, _ATTRIBUTE, None)
