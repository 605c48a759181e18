"""Attention over packed pages against dequantize + plain attention, to float32 rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kernels.attention.handle import unwrap
from quantkit.kernels.attention.hf import attention_forward, register
from quantkit.kernels.attention.reference import attend
from quantkit.kv.pool import PagePool
from quantkit.kv.sequence import Sequence
from quantkit.kvscheme import PRESETS, KVScheme
from quantkit.nn.quant_cache import QuantCache


def history(scheme, tokens, heads=2, k_dim=16, v_dim=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    sequence = Sequence(
        PagePool(scheme.keys_at(0), scheme.values_at(0)),
        scheme.page,
        scheme.window,
        scheme.sinks,
        torch.bfloat16,
    )
    sequence.append(
        torch.randn(heads, tokens, k_dim, generator=g) * 2, torch.randn(heads, tokens, v_dim, generator=g)
    )
    sequence.pack()
    return sequence


def plain(query, view, bias, scaling, softcap=None):
    """float64 attention over the dequantized states."""
    keys, values = (t.repeat_interleave(query.shape[0] // t.shape[0], 0) for t in view.dense(torch.float64))
    scores = query.double() @ keys.transpose(-1, -2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.nan_to_num(scores.softmax(-1)) @ values


@pytest.mark.parametrize(
    "name", [*PRESETS, "int4,v_layout=hadamard", "int8,meta=bfloat16", "int4,k_layout=hadamard"]
)
@pytest.mark.parametrize("tokens", [3, 63, 64, 65, 1500])
def test_equals_dequantize_then_attend(name, tokens):
    scheme = KVScheme.parse(name)
    sequence = history(scheme, tokens, v_dim=8)
    query = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(1, 5, tokens).masked_fill(
        torch.rand(1, 5, tokens, generator=torch.Generator().manual_seed(2)) < 0.3, -torch.inf
    )
    bias[..., 0] = 0
    for b in (None, bias):
        want = plain(query, sequence.view(), b, 0.3)
        got = attend(query, sequence.view(), b, scaling=0.3)
        assert got.dtype == torch.float32
        assert float((got - want).abs().max()) < 3e-6 * max(1, float(want.abs().max()))


@given(
    name=st.sampled_from(["int4", "int8", "k4v2", "int4-token", "int4-hadamard"]), tokens=st.integers(1, 200),
    crop=st.integers(0, 150), rows=st.integers(1, 4), group=st.integers(1, 3), page=st.sampled_from([8, 64]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_holds_for_any_shape_and_after_a_crop(name, tokens, crop, rows, group, page):
    sequence = history(KVScheme.parse(name).with_(page=page), tokens)
    crop = min(crop, tokens - 1)
    sequence.crop(crop)
    view = sequence.view()
    assert view.length == tokens - crop
    query = torch.randn(2 * group, rows, 16, generator=torch.Generator().manual_seed(tokens))
    bias = torch.randn(2 * group, rows, view.length, generator=torch.Generator().manual_seed(3))
    want = plain(query, view, bias, 0.25, softcap=5.0)
    assert float((attend(query, view, bias, softcap=5.0) - want).abs().max()) < 1e-5


def test_a_row_that_sees_nothing_gives_zeros():
    sequence = history(PRESETS["int4"], 150)
    bias = torch.zeros(1, 2, 150)
    bias[:, 1] = -torch.inf
    out = attend(torch.randn(2, 2, 16), sequence.view(), bias)
    assert (
        bool(torch.isfinite(out).all())
        and float(out[:, 1].abs().max()) == 0
        and float(out[:, 0].abs().max()) > 0
    )


def test_large_scores_do_not_overflow():
    sequence = history(PRESETS["int8"], 300)
    query = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(4)) * 1e3
    assert torch.allclose(
        attend(query, sequence.view(), scaling=1.0).double(),
        plain(query, sequence.view(), None, 1.0),
        atol=1e-3,
    )


def test_the_handle_is_poison_to_anybody_else(llama, ids):
    register()
    llama.set_attn_implementation("quantkit_kv")
    cache = QuantCache(llama.config, "int4")
    k = torch.randn(1, 2, 100, 16)
    dense, _ = cache.update(k, k, 0)
    assert unwrap(dense) is None
    handle, _ = cache.update(k[:, :, :1], k[:, :, :1], 0)
    llama.set_attn_implementation("sdpa")
    assert unwrap(handle) is not None and handle.shape == (1, 2, 101, 16)
    assert bool(torch.isnan(handle).all()) and handle.untyped_storage().nbytes() == 4


def test_what_it_cannot_do_is_refused(llama, ids):
    register()
    llama.set_attn_implementation("quantkit_kv")
    cache = QuantCache(llama.config, "int4")
    k = torch.randn(1, 2, 100, 16)
    cache.update(k, k, 0)
    handle, values = cache.update(k[:, :, :1], k[:, :, :1], 0)
    llama.set_attn_implementation("sdpa")
    module = llama.model.layers[0].self_attn
    query = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match="dropout"):
        attention_forward(module, query, handle, values, None, dropout=0.1)
    with pytest.raises(ValueError, match="s_aux"):
        attention_forward(module, query, handle, values, None, s_aux=torch.zeros(4))
