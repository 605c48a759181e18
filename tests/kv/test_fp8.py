import pytest
import torch
from conftest import VOCAB
from transformers import DynamicCache

from quantkit.errors import UserError
from quantkit.kv.fp8 import fp8_scales


def test_scales_are_the_largest_magnitudes(llama, ids):
    scales = fp8_scales(llama, [ids[:, :50], ids[:, 50:]])
    assert sorted(scales) == [f"model.layers.{i}.self_attn.{s}_scale" for i in (0, 1) for s in "kv"]
    peaks = []
    for part in (ids[:, :50], ids[:, 50:]):
        cache = DynamicCache(config=llama.config)
        with torch.no_grad():
            llama(part, cache=cache)
        peaks.append([float(t.abs().max()) for layer in cache.layers for t in (layer.keys, layer.values)])
    want = [max(pair) / 448 for pair in zip(*peaks, strict=True)]
    assert [float(scales[n]) for n in scales] == pytest.approx(want)
    assert all(value.shape == (1,) and float(value) != 1 for value in scales.values())


def test_nothing_seen_or_not_finite_is_refused(llama):
    with pytest.raises(UserError, match=r"layers\.0\.self_attn: the largest of its keys was 0"):
        fp8_scales(llama, [])
    weight = llama.model.layers[1].self_attn.v_proj.weight
    kept = weight.data.clone()
    weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"layers\.1\.self_attn: the largest of its"):
        fp8_scales(llama, [torch.arange(1, VOCAB)[None]])
    weight.data.copy_(kept)
