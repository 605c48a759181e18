import math

import pytest
import torch

from quantkit.evals import (
    Recorded,
    Side,
    clustered,
    divergence,
    paired_difference,
    perplexity,
    rounded,
    side_of,
)
from quantkit.evals import _sides as sides
from quantkit.evals.corpus import Windows
from tests.evals.conftest import tiny


def named(ids):
    return Windows(ids, "test windows", "test", "0" * 64, len(ids))


def by_metric(rows):
    return {row["metric"]: row for row in rows}


def brute_force(model, ids):
    """log-probabilities [n, T-1, V] in double precision, straight from the model's own logits."""
    return model(ids).logits.double().log_softmax(-1)[:, :-1]


def test_perplexity_equals_brute_force(model, ids):
    logp = brute_force(model, ids)
    nll = -logp.gather(2, ids[:, 1:, None])[..., 0]
    rows = by_metric(perplexity.measure(model, named(ids)))
    assert rows["nll"]["value"] == pytest.approx(float(nll.mean()), rel=1e-6)
    assert rows["perplexity"]["value"] == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    spread = float(nll.mean(1).std()) / math.sqrt(len(ids))
    assert rows["nll"]["stderr"] == pytest.approx(spread, rel=1e-5)
    assert rows["perplexity"]["stderr"] == pytest.approx(spread * math.exp(nll.mean()), rel=1e-5)
    assert rows["nll"]["per_window"] == pytest.approx(nll.mean(1).tolist(), abs=1e-5)
    assert rows["nll"]["tokens"] == 5 * 39


def test_perplexity_equals_the_models_own_loss(model, ids):
    loss = model(ids, labels=ids).loss
    assert by_metric(perplexity.measure(model, named(ids)))["nll"]["value"] == pytest.approx(
        float(loss), rel=1e-5
    )


def test_divergence_equals_brute_force(model, other, ids):
    p, q = brute_force(model, ids), brute_force(other, ids)
    kl = (p.exp() * (p - q)).sum(-1)
    same = (p.argmax(-1) == q.argmax(-1)).double()
    rows = by_metric(divergence.measure(model, other, named(ids)))
    assert rows["kl"]["value"] > 0.01, "the two models are too alike for a test"
    assert rows["kl"]["value"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert rows["kl"]["stderr"] == pytest.approx(float(kl.mean(1).std()) / math.sqrt(5), rel=1e-4)
    assert rows["kl_max"]["value"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert rows["kl_median"]["value"] == pytest.approx(
        float(kl.flatten().sort().values[(kl.numel() - 1) // 2]), rel=1e-4
    )
    assert 0 < rows["top1_agreement"]["value"] < 1
    assert rows["top1_agreement"]["value"] == pytest.approx(float(same.mean()))
    nll = [-x.gather(2, ids[:, 1:, None]).mean() for x in (p, q)]
    assert rows["nll_change"]["value"] == pytest.approx(float(nll[1] - nll[0]), abs=1e-5)


def test_kl_is_directed(model, other, ids):
    there = divergence.token_divergence(side_of(model), side_of(other), ids).kl.mean()
    back = divergence.token_divergence(side_of(other), side_of(model), ids).kl.mean()
    assert abs(float(there - back)) > 1e-4


def test_a_model_does_not_diverge_from_itself(model, ids):
    found = divergence.token_divergence(side_of(model), side_of(model), ids)
    assert torch.equal(found.kl, torch.zeros_like(found.kl))
    assert bool(found.same_top1.all()) and torch.equal(found.nll, found.nll_ref)


def test_noise_floor_is_small_but_not_zero(model, other, ids):
    side = side_of(model)
    rows = by_metric(divergence.measure(side, other, named(ids), again=rounded(side)))
    assert 0 < rows["kl_noise_floor"]["value"] < 0.1 * rows["kl"]["value"]


@pytest.mark.parametrize("positions", [1, 7, 39, 1000])
def test_chunks_of_the_head_do_not_matter(model, other, ids, monkeypatch, positions):
    whole = divergence.token_divergence(side_of(model), side_of(other), ids)
    nll = perplexity.token_nll(side_of(model), ids)
    seen = []

    inner = side_of(model).head

    def head(hidden):
        seen.append(len(hidden))
        return inner(hidden)

    monkeypatch.setattr(sides, "LOGIT_BYTES", positions * 4 * 260)
    left = Side(side_of(model).hidden_states, head)
    parts = divergence.token_divergence(left, side_of(other), ids)
    assert max(seen) <= positions
    for name in ("kl", "same_top1", "nll", "nll_ref"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(perplexity.token_nll(left, ids), nll, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, None])
def test_recorded_reference_equals_the_live_one(model, other, ids, tmp_path, batch):
    live = divergence.token_divergence(side_of(model), side_of(other), ids)
    reference = side_of(model)
    with Recorded(reference, ids, tmp_path / "states", batch=batch) as recorded:
        assert (tmp_path / "states").stat().st_size == ids.numel() * 32 * 4
        again = divergence.token_divergence(recorded.side(reference.head), side_of(other), ids.flip(0))
        torch.testing.assert_close(again.kl.flip(0), live.kl, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="not recorded"):
            recorded.side(reference.head).hidden_states(ids[:, :-1])
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize(
    "kind, more",
    [
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 5.0}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_side_reproduces_the_logits(kind, more, ids):
    model = tiny(1, kind=kind, **more)
    side = side_of(model)
    got = side.logits(side.hidden_states(ids)[0])
    torch.testing.assert_close(got, model(ids).logits[0], rtol=1e-4, atol=1e-4)


def test_side_refuses_a_head_that_is_not_the_models(model, ids):
    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 2
            return out

    odd = tiny(0)
    odd.__class__ = Odd
    with pytest.raises(ValueError, match="do not give its logits"):
        side_of(odd)


def test_a_16_bit_head_is_computed_in_float32(monkeypatch, ids):
    monkeypatch.setattr(sides, "VOCAB_ROWS", 100)  # 260 rows: two whole pieces and a ragged one
    model = tiny(0).bfloat16()
    side = side_of(model)
    hidden = side.hidden_states(ids)[0]
    want = hidden.float() @ model.lm_head.weight.float().T
    torch.testing.assert_close(side.logits(hidden), want, rtol=1e-6, atol=1e-6)


def test_different_vocabularies_are_an_error(model, ids):
    with pytest.raises(ValueError, match="vocabularies differ: 260 in the reference, 300 here"):
        divergence.token_divergence(side_of(model), side_of(tiny(0, vocab=300)), ids)


def test_standard_error_by_hand():
    values = torch.tensor([[0.0, 2.0], [1.0, 3.0], [2.0, 4.0]])  # window means 1, 2, 3
    found = clustered(values)
    assert (found.mean, found.tokens, found.windows) == (2.0, 6, 3)
    assert found.stderr == pytest.approx(1 / math.sqrt(3))
    assert clustered(values[:1]).stderr is None
    with pytest.raises(ValueError, match="no tokens"):
        clustered(torch.zeros(0, 3))


def test_standard_error_covers_the_truth():
    """Windows whose tokens move together: the clustered error must be wide enough, the naive one is not."""
    draw = torch.Generator().manual_seed(0)
    hits = naive_hits = 0
    for _ in range(300):
        shared = torch.randn(20, 1, generator=draw)
        values = shared + 0.5 * torch.randn(20, 50, generator=draw)
        found = clustered(values)
        hits += abs(found.mean) < 2 * found.stderr
        naive_hits += abs(found.mean) < 2 * float(values.std()) / math.sqrt(values.numel())
    assert hits / 300 > 0.9 and naive_hits / 300 < 0.6, (hits, naive_hits)


def test_paired_difference():
    found = paired_difference([1.0, 5.0, 9.0], [1.1, 5.2, 9.3])
    assert found.mean == pytest.approx(0.2) and found.stderr == pytest.approx(0.1 / math.sqrt(3))
    with pytest.raises(ValueError, match="2 windows against 1"):
        paired_difference([1.0, 2.0], [1.0])
