"""Static fp8 scales of keys and values, as compressed-tensors' kv_cache_scheme and vLLM take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from quantkit.errors import UserError

FP8_MAX = 448.0  # largest float8_e4m3fn
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


class _Watching(DynamicCache):
    """A DynamicCache that notes the largest magnitude of keys and values of each layer."""

    def __init__(self, config: Any, peaks: dict[int, list[float]]) -> None:
        super().__init__(config=config)
        self.peaks = peaks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        peak = self.peaks.setdefault(layer_idx, [0.0, 0.0])
        for side, states in enumerate((key_states, value_states)):
            # a NaN must not be lost in a comparison: max() of the pair would keep the old figure
            seen = float(states.abs().max())
            peak[side] = seen if seen != seen else max(peak[side], seen)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def fp8_scales(model: Any, batches: Iterable[Tensor], margin: float = 1.0) -> dict[str, Tensor]:
    """Scales by tensor name, float32 ``[1]``: ``model.layers.0.self_attn.k_scale`` = largest key / 448,
    and v_scale.

    batches: int64 token ids ``[batch, tokens]`` without padding, as long as what will be served: keys grow
    with
        position in some models. margin: factor on the largest magnitude.
    Raises UserError when a layer was never reached or saw only zeros or non-finite values. A scale of 1 is
    never
    put in silence.
    """
    names = {
        module.layer_idx: name
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj") and hasattr(module, "v_proj")
    }
    if not names:
        raise UserError("no attention with k_proj and v_proj was found; fp8 scales have no place to go")
    peaks: dict[int, list[float]] = {}
    for batch in batches:
        model(batch, cache=_Watching(model.config, peaks))
    scales: dict[str, Tensor] = {}
    for layer, name in sorted(names.items()):
        for side, peak in zip("kv", peaks.get(layer, (0.0, 0.0)), strict=True):
            if not 0 < peak < float("inf"):
                what = "keys" if side == "k" else "values"
                raise UserError(
                    f"{name}: the largest of its {what} was {peak}; check the calibration text and the model "
                    "(a layer that reuses another layer's cache has no scales of its own)"
                )
            scales[f"{name}.{side}_scale"] = torch.tensor([peak * margin / FP8_MAX])
    return scales
