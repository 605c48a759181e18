import pytest
import torch

from quantkit.kv.pages import encode
from quantkit.kvscheme import PRESETS, KVScheme, Side
from quantkit.scheme import SchemeError


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "none"])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_page_bytes_are_what_a_page_really_takes(name, dim):
    scheme = PRESETS[name]
    states = torch.randn(1, 3, scheme.page, dim, generator=torch.Generator().manual_seed(1))
    held = sum(
        t.numel() * t.element_size()
        for side in (scheme.keys_at(0), scheme.values_at(0))
        for t in encode(states, side).values()
    )
    assert held == scheme.page_bytes(3, dim)


def test_overrides_apply_to_their_layer_only():
    scheme = KVScheme(4, 4, overrides=((1, 8, 16),))
    assert (scheme.keys_at(0).bits, scheme.values_at(0).bits) == (4, 4)
    assert (scheme.keys_at(1).bits, scheme.values_at(1).bits) == (8, 16)
    assert scheme.page_bytes(1, 64, layer=1) > 2 * scheme.page_bytes(1, 64, layer=0)


def test_bytes_per_token_with_context_counts_window_and_sinks():
    scheme = PRESETS["int4"].with_(window=0)
    by_hand = 63 * scheme.page_bytes(2, 64) + (63 + 4) * 2 * 2 * 64 * 2  # 4095 = 63 pages + 63 loose, 4 sinks
    assert scheme.bytes_per_token(2, 64, context=4095) == pytest.approx(by_hand / 4095)
    assert scheme.bytes_per_token(2, 64) == scheme.page_bytes(2, 64) / 64


def test_llama_8b_by_hand():
    # a channel: 4 bits + (8 + 16) / 64; a token: 4 bits + 8 / 128; one 16-bit base per page and head each
    bits = 4 + 24 / 64 + 4 + 8 / 128 + 2 * 16 / (64 * 128)
    assert KVScheme.parse("int4").bytes_per_token(kv_heads=8, head_dim=128) == 8 * 128 * bits / 8 == 1080.5


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KVScheme(5, 4), "5-bit"),
        (lambda: KVScheme(k_layout="row"), "'row'"),
        (lambda: KVScheme(v_layout="channel"), "value layout"),
        (lambda: KVScheme(page=60), "60"),
        (lambda: KVScheme(window=10), "multiple of 8"),
        (lambda: KVScheme(sinks=64), "sink"),
        (lambda: KVScheme(overrides=((0, 3, 4),)), "layer 0"),
        (lambda: KVScheme.parse("int5"), "did you mean"),
        (lambda: KVScheme.parse("int4,windw=64"), "windw"),
        (lambda: Side(4, "channel", meta="int3"), "int3"),
    ],
)
def test_impossible_formats_are_refused_by_name(make, says):
    with pytest.raises(SchemeError, match=says):
        make()


def test_parse_applies_changes_with_the_fields_own_type():
    scheme = KVScheme.parse("int4,window=128,search=0,v_layout=hadamard")
    assert (scheme.window, scheme.search, scheme.v_layout, scheme.k_bits) == (128, False, "hadamard", 4)
