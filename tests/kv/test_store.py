import pytest
import torch
from conftest import feed
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3NextConfig

from quantkit.errors import UserError
from quantkit.kvscheme import KVScheme
from quantkit.nn.quant_cache import QuantCache


@pytest.mark.parametrize("scheme", ["int4", "int8-token", "k8v4", "none", "int4,window=64"])
def test_a_loaded_prompt_continues_identically(llama, ids, tmp_path, scheme):
    cache = QuantCache(llama.config, scheme)
    feed(llama, ids[:, :150], cache, 150)
    cache.save(tmp_path / "prompt.safetensors")
    loaded = QuantCache.load(tmp_path / "prompt.safetensors", llama.config)
    assert loaded.scheme == cache.scheme
    assert torch.equal(feed(llama, ids[:, 150:], loaded, 1), feed(llama, ids[:, 150:], cache, 1))


def test_shared_pages_are_written_once_and_shared_again(llama, ids, tmp_path):
    cache = QuantCache(llama.config, KVScheme.parse("int4").with_(overrides=((1, 8, 2),)))
    feed(llama, ids[:, :150], cache, 150)
    size = []
    for name in ("one", "eight"):
        cache.save(tmp_path / name)
        size.append((tmp_path / name).stat().st_size)
        cache.batch_repeat_interleave(8)
    loaded = QuantCache.load(tmp_path / "eight", llama.config)
    pool = loaded.layers[0].pool
    assert pool.used == 1 and sorted(pool.holders)[-1:] == [8]
    loose = 150 - 64 + 4  # window 32: one page is packed
    assert (
        size[1] - size[0] < 7 * 2 * 2 * 2 * loose * 16 * 2 + 7 * 2 * 2 * 2 * 200
    )  # tails, and their header entries
    loaded.reset()
    assert pool.used == 0


def test_padding_and_sliding_windows_survive(gemma, ids, tmp_path):
    batch = torch.cat([ids, ids.roll(3, 1)])
    mask = torch.ones_like(batch)
    mask[1, :11] = 0
    for scheme in (KVScheme.parse("int8"), KVScheme(8, 4, page=8, full_window=0)):
        cache = QuantCache(gemma.config, scheme, padding=[0, 11])
        with torch.no_grad():
            gemma(batch[:, :150], attention_mask=mask[:, :150], cache=cache)
            cache.save(tmp_path / "c")
            loaded = QuantCache.load(tmp_path / "c", gemma.config)
            a, b = (gemma(batch[:, 150:], attention_mask=mask, cache=c).logits for c in (cache, loaded))
        assert torch.equal(a, b)


def test_an_empty_cache_round_trips(llama, ids, tmp_path):
    QuantCache(llama.config, "int4").save(tmp_path / "c")
    loaded = QuantCache.load(tmp_path / "c", llama.config)
    assert torch.equal(feed(llama, ids, loaded, 50), feed(llama, ids, QuantCache(llama.config, "int4"), 50))


def test_foreign_files_and_models_are_refused(llama, ids, tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("no tensors")
    for name in ("foreign", "text", "missing"):
        with pytest.raises(UserError, match=name):
            QuantCache.load(tmp_path / name, llama.config)
    QuantCache(llama.config, "int4").save(tmp_path / "c")
    with pytest.raises(UserError, match="2 layers and 2 kv heads"):
        QuantCache.load(tmp_path / "c", LlamaConfig(num_hidden_layers=3))
    with pytest.raises(UserError, match="LinearAttentionLayer"):
        QuantCache(Qwen3NextConfig(num_hidden_layers=4), "int4").save(tmp_path / "h")
