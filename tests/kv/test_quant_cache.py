"""QuantCache under generate, and the ways a cache is cut, shared and reordered."""

import copy

import pytest
import torch
from conftest import VOCAB, difference, feed
from transformers import DynamicCache

from quantkit.kernels.attention.hf import register
from quantkit.kvscheme import PRESETS, KVScheme
from quantkit.nn.quant_cache import QuantCache, QuantLayer

INT4 = "int4,window=0"  # pages of 64 tokens packed at 64, 128, ...: easy to count
FORMATS = [
    *PRESETS,
    INT4,
    "int4,window=64",
    "int4,window=24",
    "int4,sinks=0",
    "int4,v_layout=hadamard",
    "int8,window_dtype=auto",
]


@pytest.fixture(params=["sdpa", "quantkit_kv"])
def attention(request, llama, gemma):
    register()
    for model in (llama, gemma):
        model.set_attn_implementation(request.param)
    yield request.param
    for model in (llama, gemma):
        model.set_attn_implementation("sdpa")


def pools(cache):
    return [layer.pool for layer in cache.layers if isinstance(layer, QuantLayer)]


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_that_end_with_pages_equal_token_by_token(llama, ids, name):
    with torch.no_grad():
        one = feed(llama, ids, QuantCache(llama.config, name), 1)
        cache, window = QuantCache(llama.config, name), KVScheme.parse(name).window % 64
        head = [feed(llama, ids[:, :window], cache, 64)] if window else []
        chunked = torch.cat([*head, feed(llama, ids[:, window:], cache, 64)], 1)
        plain = feed(llama, ids, DynamicCache(config=llama.config), 64)
    assert difference(one, chunked) < 1e-9
    if name == "none":
        assert difference(one, plain) < 1e-9
    else:
        assert difference(one[:, 66:], plain[:, 66:]) > 1e-3, "nothing was quantized"


@pytest.mark.parametrize("name", ["int8,window=0", "int4,window=0"])
def test_decode_equals_an_attention_over_history_rounded_by_hand(llama, ids, name):
    """The oracle recomputes what each layer must see, from the layer's own unquantized states."""
    from quantkit.kv.pages import decode, encode

    scheme = KVScheme.parse(name)
    cache = QuantCache(llama.config, scheme)
    feed(llama, ids[:, :64], cache, 64)
    layer = cache.layers[0]
    g = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 2, 140, 16, generator=g) for _ in range(2))
    layer.reset()
    layer.update(keys[:, :, :130], values[:, :, :130])
    got = layer.update(keys[:, :, 130:], values[:, :, 130:])
    for states, side, result in ((keys, scheme.keys_at(0), got[0]), (values, scheme.values_at(0), got[1])):
        rounded = states.bfloat16().float()
        want = rounded.clone()
        for start in (0, 64):
            page = rounded[:, :, start : start + 64].clone()
            if start == 0:
                page[:, :, :4] = page[:, :, 4:5]
            want[:, :, start : start + 64] = decode(encode(page, side), side)
        want[:, :, :4] = rounded[:, :, :4]
        assert difference(result, want) == 0


def test_a_page_is_quantized_once(llama, ids, monkeypatch):
    import quantkit.kv.pool as pool

    seen = []
    monkeypatch.setattr(
        pool, "encode", lambda x, side, f=pool.encode: (seen.append(x.shape[0]), f(x, side))[1]
    )
    feed(llama, ids, QuantCache(llama.config, INT4), 1)
    assert sum(seen) == 2 * 2 * 3  # keys and values, two layers, three full pages in 200 tokens


def test_greedy_generate_equals_a_hand_written_loop(llama, ids, attention):
    cache = QuantCache(llama.config, INT4)
    out = llama.generate(ids[:, :100], cache=cache, max_new_tokens=60, do_sample=False)
    assert cache.get_seq_length() == 159
    again = QuantCache(llama.config, INT4)
    with torch.no_grad():
        logits = llama(ids[:, :100], cache=again).logits[:, -1]
        tokens = []
        for _ in range(60):
            tokens.append(logits.argmax(-1))
            logits = llama(tokens[-1][:, None], cache=again).logits[:, -1]
    assert torch.equal(out[0, 100:], torch.stack(tokens, 1)[0])


def test_int8_chooses_what_full_precision_chooses(llama, ids, attention):
    want = llama.generate(ids[:, :100], max_new_tokens=60, do_sample=False)
    choices = feed(llama, want[:, :-1], QuantCache(llama.config, "int8"), 1)[:, 99:].argmax(-1)
    assert int((want[:, 100:] != choices).sum()) <= 3  # near-ties of a random model


def test_sampling_and_beams_run_and_leave_no_page_behind(llama, ids, attention):
    for options in ({"do_sample": True}, {"num_beams": 3, "do_sample": False, "num_return_sequences": 2}):
        cache = QuantCache(llama.config, INT4)
        out = llama.generate(ids[:, :120], cache=cache, max_new_tokens=30, min_new_tokens=30, **options)
        assert out.shape[1] == 150
        assert all(pool.used for pool in pools(cache))
        cache.reset()
        assert [pool.used for pool in pools(cache)] == [0, 0]


def test_beams_equal_a_cache_that_copies(llama, ids):
    """16 bits store what arrives, so beam search must be exactly that of a DynamicCache."""
    scheme = KVScheme(
        16, 16, overrides=((0, 16, 8), (1, 8, 16)), window=64
    )  # something quantized, little error
    options = {"num_beams": 4, "max_new_tokens": 30, "do_sample": False}
    want = llama.generate(ids[:, :50], **options)
    got = llama.generate(ids[:, :50], cache=QuantCache(llama.config, scheme), **options)
    assert torch.equal(want, got)  # within window: only reorder is at stake


def test_reorder_moves_histories(llama, ids):
    batch = torch.cat([ids, ids.flip(1), ids.roll(7, 1)])
    cache = QuantCache(llama.config, INT4)
    feed(llama, batch[:, :150], cache, 150)
    order = torch.tensor([2, 2, 0])
    cache.reorder_cache(order)
    used = [pool.used for pool in pools(cache)]
    assert used == [4, 4], "two sequences share their two pages, the dropped one gave its pages back"
    want = QuantCache(llama.config, INT4)
    feed(llama, batch[order][:, :150], want, 150)
    assert (
        difference(feed(llama, batch[order][:, 150:], cache, 1), feed(llama, batch[order][:, 150:], want, 1))
        < 1e-9
    )


def test_batch_select_and_repeat(llama, ids):
    cache = QuantCache(llama.config, INT4)
    feed(llama, torch.cat([ids, ids.flip(1)])[:, :150], cache, 150)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([False, False, True, True]))
    cache.batch_select_indices(torch.tensor([1]))
    alone = QuantCache(llama.config, INT4)
    feed(llama, ids.flip(1)[:, :150], alone, 150)
    assert difference(feed(llama, ids[:, :5], cache, 1), feed(llama, ids[:, :5], alone, 1)) < 1e-9


def test_left_padding_does_not_change_a_sequence(llama, ids, attention):
    pad = 37
    short = ids[:, pad:130]
    batch = torch.cat([ids[:, :130], torch.cat([torch.zeros(1, pad, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    alone = llama.generate(short, cache=QuantCache(llama.config, INT4), max_new_tokens=40, do_sample=False)
    cache = QuantCache(llama.config, INT4, padding=(mask == 0).sum(1))
    both = llama.generate(batch, attention_mask=mask, cache=cache, max_new_tokens=40, do_sample=False)
    assert torch.equal(both[1, 130:], alone[0, 93:])
    assert cache.layers[0].sequences[1].length == 169 - pad
    # without being told, the padding is stored but still masked: 8 bits must stay close to full precision
    with torch.no_grad():
        states = {}
        for name, other in (
            ("full", DynamicCache(config=llama.config)),
            ("int8", QuantCache(llama.config, "int8")),
        ):
            llama(batch, attention_mask=mask, cache=other)
            longer = torch.cat([mask, torch.ones(2, 20, dtype=torch.long)], 1)
            states[name] = llama(ids[:, :20].expand(2, -1), attention_mask=longer, cache=other).logits
    assert difference(states["int8"], states["full"]) < 0.1 * float(states["full"].std())


def test_wrong_padding_is_refused(llama, ids):
    with pytest.raises(ValueError, match="padding was given for 2"):
        llama(ids.expand(3, -1), cache=QuantCache(llama.config, INT4, padding=[1, 2]))
    with pytest.raises(ValueError, match="padding of 300"):
        llama(ids, cache=QuantCache(llama.config, INT4, padding=[300]))


@pytest.mark.parametrize("remove", [0, 1, 7, 8, 9, 70, 72, 73, 130, 132, 134, 199, 200])
def test_crop_at_every_kind_of_place(llama, ids, remove):
    """136 = two pages and 8: within the tail, at a page border, inside pages, into the sinks, to nothing."""
    cache = QuantCache(llama.config, INT4)
    feed(llama, ids[:, :136], cache, 136)
    layer = cache.layers[0]
    k = torch.zeros(1, 2, 0, 16, dtype=torch.float64)
    before = layer.update(k, k)[0]
    if remove > 136:
        with pytest.raises(ValueError, match=r"cannot remove|cut into"):
            cache.crop(-remove)
        return
    cache.crop(-remove)
    assert cache.get_seq_length() == 136 - remove
    if remove == 136:
        assert pools(cache)[0].used == 0
    after = layer.update(k, k)[0]
    assert difference(after, before[:, :, : 136 - remove]) == 0, (
        "the tokens that stay must not be rounded again"
    )
    feed(llama, ids[:, 136 - remove :], cache, 1)
    cache.crop(0)
    packed = min(136 - remove, 128)  # what was in the tail may have filled a page since
    assert difference(layer.update(k, k)[0][:, :, :packed], after[:, :, :packed]) == 0
    assert layer.pool.used == len(layer.sequences[0].pages)


def test_crop_refuses_a_positive_number(llama, ids):
    cache = QuantCache(llama.config, INT4)
    feed(llama, ids, cache, 200)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)


def test_assisted_generation_equals_greedy(llama, ids, attention):
    """With 8 bits and this seed no near-tie turns, although drafts shift what is packed when."""
    want = llama.generate(
        ids[:, :100], cache=QuantCache(llama.config, "int8"), max_new_tokens=50, do_sample=False
    )
    cache = QuantCache(llama.config, "int8")
    got = llama.generate(
        ids[:, :100], cache=cache, max_new_tokens=50, do_sample=False, prompt_lookup_num_tokens=4
    )
    assert torch.equal(want, got)
    assert all(page.count == 64 for page in cache.layers[0].sequences[0].pages), "a draft was packed"


def test_fork_shares_pages_and_then_goes_its_own_way(llama, ids):
    cache = QuantCache(llama.config, INT4)
    feed(llama, ids[:, :150], cache, 150)
    used = [pool.used for pool in pools(cache)]
    twin, deep = cache.fork(), copy.deepcopy(cache)
    assert [pool.used for pool in pools(twin)] == used
    other = torch.randint(1, VOCAB, (1, 80), generator=torch.Generator().manual_seed(9))
    a, b = feed(llama, other, twin, 1), feed(llama, ids[:, 150:], cache, 1)
    for tail, got in ((other, a), (ids[:, 150:], b)):
        fresh = QuantCache(llama.config, INT4)
        feed(llama, ids[:, :150], fresh, 150)
        assert torch.equal(feed(llama, tail, fresh, 1), got), (
            "with and without prefix reuse must be identical"
        )
    assert torch.equal(feed(llama, other, deep, 1), a)
    del twin, deep
    assert [pool.used for pool in pools(cache)] == [3, 3]


def test_no_page_leaks_under_stress(llama):
    """Random forks, updates, crops, reorders, resets; the pool must count exactly what sequences hold."""
    g = torch.Generator().manual_seed(3)
    cache = QuantCache(llama.config, INT4)
    layer = cache.layers[0]
    live = [layer]

    def states(batch, tokens):
        return (torch.randn(batch, 2, tokens, 16, generator=g),) * 2

    layer.update(*states(2, 150))
    for _ in range(300):
        pick = int(torch.randint(len(live), (1,), generator=g))
        action = int(torch.randint(7, (1,), generator=g))
        chosen = live[pick]
        if action == 0 and len(live) < 6:
            live.append(chosen.fork())
        elif action == 1 and pick > 0:
            live.pop(pick)
        elif action == 2 and chosen.sequences:
            rows = torch.randint(len(chosen.sequences), (2,), generator=g)
            chosen.reorder_cache(rows)
        elif action == 3 and chosen.sequences:
            chosen.crop(-int(torch.randint(0, chosen.cumulative_length + 1, (1,), generator=g)))
        elif action == 4 and len(live) > 3:
            chosen.reset()
        else:
            chosen.update(*states(2, int(torch.randint(1, 90, (1,), generator=g))))
        chosen = None
        held: dict[int, int] = {}
        one = sequence = None
        for one in live:
            for sequence in one.sequences:
                for page in sequence.pages:
                    held[page.slot] = held.get(page.slot, 0) + 1
        assert {slot: n for slot, n in enumerate(layer.pool.holders) if n} == held
        assert layer.pool.used == len(held)
        del one, sequence  # they would keep a dropped fork alive
    for one in live:
        one.reset()
    assert layer.pool.used == 0 and not any(layer.pool.holders)


def test_pool_refuses_a_page_that_nobody_holds(llama, ids):
    cache = QuantCache(llama.config, INT4)
    feed(llama, ids, cache, 200)
    pool = cache.layers[0].pool
    slots = [page.slot for page in cache.layers[0].sequences[0].pages]
    cache.layers[0].reset()
    with pytest.raises(RuntimeError, match="not held"):
        pool.release(slots)


def test_memory_is_pages_and_window_only(llama, ids):
    """A long prompt must not stay alive in full precision behind a slice."""
    scheme = KVScheme.parse(INT4)
    cache = QuantCache(llama.config, scheme)
    long = ids.repeat(1, 5)[:, :960]  # 15 pages; the pool grows to 15 at once, the tail is empty
    feed(llama, long, cache, 960)
    sinks = 4 * 2 * 2 * 16 * 2
    assert cache.nbytes() == 2 * (15 * scheme.page_bytes(2, 16) + sinks)


def test_non_finite_states_name_the_layer(llama):
    cache = QuantCache(llama.config, INT4)
    bad = torch.full((1, 2, 64, 16), torch.inf)
    with pytest.raises(ValueError, match=r"layer 1.*non-finite"):
        cache.update(bad, bad, 1)


def test_mixed_head_sizes_of_keys_and_values():
    from transformers import LlamaConfig

    cache = QuantCache(LlamaConfig(num_hidden_layers=1), INT4)
    k, v = torch.randn(1, 2, 100, 24), torch.randn(1, 2, 100, 16)
    cache.update(k, v, 0)
    got = cache.update(k[:, :, :1], v[:, :, :1], 0)
    assert got[0].shape == (1, 2, 101, 24) and got[1].shape == (1, 2, 101, 16)
    assert difference(got[0][:, :, :100], k) < 0.5


# ---- sliding windows (gemma3)
# ---------------------------------------------------------------------------------


def test_report_lists_every_layer_with_its_reason(gemma):
    notes = QuantCache(gemma.config, "int4").report()
    assert [note.layer for note in notes] == [0, 1, 2]
    assert notes[0].reason == "sliding window 40 <= 1024 (full_window)" and notes[2].reason == ""
    assert notes[2].stored == "K4 channel, V4 hadamard"
    override = QuantCache(gemma.config, KVScheme(4, 4, overrides=((2, 16, 16),))).report()
    assert "16 bits" in override[2].reason
    with pytest.raises(ValueError, match="layer 7"):
        QuantCache(gemma.config, KVScheme(overrides=((7, 8, 8),)))


def test_hybrid_layers_are_listed_not_skipped():
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=4)
    cache = QuantCache(config, "int4")
    kinds = [(note.kind, bool(note.reason)) for note in cache.report()]
    assert ("linear_attention", True) in kinds and ("full_attention", False) in kinds
    assert len(kinds) == 4


def test_gemma_generates_through_short_windows(gemma, ids, attention):
    want = gemma.generate(ids[:, :100], max_new_tokens=40, do_sample=False)
    got = gemma.generate(
        ids[:, :100], cache=QuantCache(gemma.config, "int8"), max_new_tokens=40, do_sample=False
    )
    assert got.shape == want.shape
    choices = feed(gemma, want[:, :-1], QuantCache(gemma.config, "int8"), 1)[:, 99:].argmax(-1)
    assert int((want[:, 100:] != choices).sum()) <= 3


def test_quantized_sliding_window_frees_pages_and_sees_only_the_window(gemma, ids, attention):
    scheme = KVScheme(8, 8, page=8, sinks=0, full_window=0)
    cache = QuantCache(gemma.config, scheme)
    assert cache.quantized_layers == [0, 1, 2]
    with torch.no_grad():
        got, want = feed(gemma, ids, cache, 8), feed(gemma, ids, DynamicCache(config=gemma.config), 8)
    scale = float(want.std())
    assert difference(got, want) < 0.35 * scale
    assert float((got - want).square().mean().sqrt()) < 0.05 * scale
    assert cache.layers[0].pool.used <= 40 // 8 + 2, "pages out of sight were kept"
    assert cache.layers[2].pool.used == 25


def test_sliding_crop(gemma, ids):
    scheme = KVScheme(8, 8, page=8, full_window=0)
    cache = QuantCache(gemma.config, scheme)
    feed(gemma, ids[:, :100], cache, 10)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-30)
    cache = QuantCache(gemma.config, scheme)
    feed(gemma, ids[:, :100], cache, 100)
    cache.activate_past_recording()
    feed(gemma, ids[:, 100:110], cache, 10)
    cache.crop(-10)
    fresh = QuantCache(gemma.config, scheme)
    feed(gemma, ids[:, :100], fresh, 100)
    assert difference(feed(gemma, ids[:, 100:], cache, 100), feed(gemma, ids[:, 100:], fresh, 100)) < 1e-5
