"""Bits of keys and values per layer under a budget of bytes per token, from costs measured in decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.errors import UserError
from quantkit.kvscheme import KVScheme


@dataclass(frozen=True, slots=True)
class Choice:
    """One layer at one pair of bit widths. cost: KL in nats per token when only this layer is so stored;
    bytes: what a token of the layer then takes."""

    layer: int
    k_bits: int
    v_bits: int
    cost: float
    bytes: float


def sensitivity(
    model: Any,
    windows: list[Any],
    scheme: KVScheme,
    pairs: tuple[tuple[int, int], ...] = ((8, 8), (8, 4), (4, 4)),
    start: int = 128,
) -> list[Choice]:
    """Measure each layer alone at each (k_bits, v_bits), all other layers unquantized; KL in decode mode.

    windows: int64 ``[tokens]`` each. Layers that the format cannot quantize are left out.
    Cost: one pass over the windows per layer and pair, run as one batch per layer.
    """
    from quantkit.evals.decode_kv import compare
    from quantkit.nn.quant_cache import QuantCache

    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = []
    for layer in QuantCache(model.config, scheme.with_(overrides=())).quantized_layers:
        makers: dict[str, Any] = {}
        for k, v in pairs:
            alone = scheme.with_(k_bits=16, v_bits=16, overrides=((layer, k, v),))
            makers[f"{k} {v}"] = lambda config, alone=alone: QuantCache(config, alone)
        for (k, v), score in zip(pairs, compare(model, windows, makers, start).values(), strict=True):
            width = scheme.with_(k_bits=k, v_bits=v, overrides=()).bytes_per_token(
                config.num_key_value_heads, dim
            )
            found.append(Choice(layer, k, v, score.metrics()["kl"], width))
    return found


def allocate(choices: list[Choice], budget: float) -> tuple[tuple[int, int, int], ...]:
    """Overrides ``((layer, k_bits, v_bits), ...)`` of the least summed cost found within ``budget``.

    budget: bytes a token, all the layers in ``choices`` together. Starts from the smallest choice of each
    layer and buys, again and again, the upgrade that lowers the cost most per byte (greedy knapsack).
    Raises UserError when even the smallest choices exceed the budget.
    """
    by_layer: dict[int, list[Choice]] = {}
    for choice in choices:
        by_layer.setdefault(choice.layer, []).append(choice)
    now = {layer: min(options, key=lambda c: (c.bytes, c.cost)) for layer, options in by_layer.items()}
    spent = sum(choice.bytes for choice in now.values())
    if spent > budget:
        raise UserError(
            f"a cache of {budget:.0f} bytes per token is too small: the smallest formats offered take "
            f"{spent:.0f}; offer fewer bits, or raise the budget"
        )
    while True:
        upgrades = [
            (option, now[layer])
            for layer, options in by_layer.items()
            for option in options
            if option.cost < now[layer].cost and spent - now[layer].bytes + option.bytes <= budget
        ]
        if not upgrades:
            return tuple((layer, c.k_bits, c.v_bits) for layer, c in sorted(now.items()))
        best, old = max(upgrades, key=lambda u: (u[1].cost - u[0].cost) / max(u[0].bytes - u[1].bytes, 1e-9))
        now[best.layer] = best
        spent += best.bytes - old.bytes
