"""The measurement itself: that it measures decoding, and that its figures are right."""

import json

import pytest
import torch
from conftest import feed
from transformers import DynamicCache

from quantkit.evals.decode_kv import Score, cache_maker, compare, measured_bytes, rows, text_windows
from quantkit.kvscheme import KVScheme
from quantkit.nn.quant_cache import QuantCache


@pytest.mark.parametrize("name", ["int4", "int8,window=0", "int2"])
def test_chunks_side_by_side_equal_token_by_token_alone(llama, ids, name):
    got = compare(llama, [ids[0]], {name: cache_maker(name), "dynamic": cache_maker("dynamic")}, start=100)
    with torch.no_grad():
        one = feed(llama, ids[:, :-1], QuantCache(llama.config, name), 1)[0, 100:].log_softmax(-1)
        ref = feed(llama, ids[:, :-1], DynamicCache(config=llama.config), 1)[0, 100:].log_softmax(-1)
    kl = float((ref.exp() * (ref - one)).sum(-1).mean())
    assert got[name].tokens == 99
    assert got[name].metrics()["kl"] == pytest.approx(kl, rel=1e-3) and kl > 0
    assert abs(got["dynamic"].metrics()["kl"]) < 1e-6


def test_score_by_hand():
    score = Score()
    reference, logits = (
        torch.tensor([[0.0, 0.0]]),
        torch.tensor([[0.0, 1.0986123]]),
    )  # [1/2, 1/2] and [1/4, 3/4]
    score.add(reference, logits, torch.tensor([1]), torch.tensor([0.9]))
    m = score.metrics()
    assert m["kl"] == pytest.approx(
        0.5 * torch.log(torch.tensor(4 / 3)).item(), rel=1e-4
    )  # log(2/3)/2 + log(2)/2
    assert m["perplexity"] == pytest.approx(4 / 3, rel=1e-5) and m["reference_perplexity"] == pytest.approx(2)
    assert m["kl_by_quarter"][:3] == [None] * 3


@pytest.mark.parametrize("name", ["int4", "int8", "int4-token"])
def test_measured_bytes_agree_with_the_formats_own_figure(llama, name):
    measured = measured_bytes(llama.config, cache_maker(name), 1000)
    stated = 2 * 1000 * KVScheme.parse(name).bytes_per_token(2, 16, context=1000)
    assert stated <= measured <= stated * 1.08  # a free slot of the pool at most


def test_targets_at_4k_with_the_geometry_of_a_half_billion_model():
    from transformers import Qwen2Config

    config = Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=2)
    plain = measured_bytes(config, cache_maker("dynamic"), 4096)
    assert plain == 4096 * 2 * 2 * 2 * 64 * 2
    assert measured_bytes(config, cache_maker("int4"), 4096) <= 0.28 * plain
    assert measured_bytes(config, cache_maker("int8"), 4096) <= 0.54 * plain


def test_rows_can_be_repeated():
    row = rows("m", "int4", 512, {"kl": 0.1}, "python -m x")[0]
    assert json.loads(json.dumps(row))["command"] == "python -m x"
    assert {"commit", "machine", "date", "model", "kv", "context", "metric", "value"} <= set(row)


def test_a_short_text_is_refused():
    class Words:
        bos_token_id = None

        def __call__(self, text, **_):
            return type("T", (), {"input_ids": torch.zeros(1, len(text.split()), dtype=torch.long)})

    with pytest.raises(ValueError, match="too few for 2 x 50"):
        text_windows(Words(), "a " * 100, 50, 2)
    assert [len(w) for w in text_windows(Words(), "a " * 200, 50, 2)] == [50, 50]
