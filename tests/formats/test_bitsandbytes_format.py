"""bitsandbytes 4-bit: the peer's own file, hand-made blocks, and double quantization."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.formats import CannotRead, modules_of
from quantkit.formats import bitsandbytes as fmt
from tests import golden

CODEBOOK = torch.linspace(-1, 1, 16)


def state(**fields) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def test_equals_the_peer():
    tensors, _ = golden.load("bnb_nf4")
    stored = {
        "m.weight": tensors["packed"],
        "m.weight.absmax": tensors["absmax"],
        "m.weight.quant_map": tensors["quant_map"],
        "m.weight.quant_state.bitsandbytes__nf4": state(
            quant_type="nf4", blocksize=64, dtype="float32", shape=list(tensors["dequant"].shape)
        ),
    }
    assert torch.equal(fmt.dequantize("m", stored, {}), tensors["dequant"])
    assert list(modules_of(fmt, stored)) == ["m"]


def by_hand(**changes) -> dict[str, torch.Tensor]:
    fields = {"quant_type": "nf4", "blocksize": 2, "dtype": "float16", "shape": [2, 2]} | changes
    return {
        "m.weight": torch.tensor(
            [[0x0F], [0xF0]], dtype=torch.uint8
        ),  # codes 0 15 / 15 0: the high nibble first
        "m.weight.absmax": torch.tensor([2.0, 3.0]),
        "m.weight.quant_map": CODEBOOK,
        "m.weight.quant_state.bitsandbytes__nf4": state(**fields),
    }


def test_values_by_hand():
    out = fmt.dequantize("m", by_hand(), {})
    assert out.dtype == torch.float16 and out.tolist() == [[-2.0, 2.0], [3.0, -3.0]]


def test_double_quantization_by_hand():
    stored = by_hand(nested_blocksize=256, nested_offset=0.5, nested_dtype="float32") | {
        "m.weight.absmax": torch.tensor([1, 2], dtype=torch.uint8),
        "m.weight.nested_quant_map": torch.arange(256) / 4,
        "m.weight.nested_absmax": torch.tensor([2.0]),
    }
    # absmax = map[code] * nested + offset = 0.25*2+0.5, 0.5*2+0.5
    assert fmt.dequantize("m", stored, {}).tolist() == [[-1.0, 1.0], [1.5, -1.5]]


def test_damage_is_named():
    with pytest.raises(CannotRead, match="do not make a 4-bit weight of 2x4"):
        fmt.dequantize("m", by_hand(shape=[2, 4]), {})
    with pytest.raises(CannotRead, match="2 scales for 4 weights in blocks of 4"):
        fmt.dequantize("m", by_hand(blocksize=4), {})
    with pytest.raises(CannotRead, match="describes the quantization"):
        fmt.dequantize("m", {k: v for k, v in by_hand().items() if "state" not in k}, {})
    assert not fmt.matches({"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert fmt.matches({"quant_method": "bitsandbytes", "load_in_4bit": True})
