"""Every rewrite leaves the float model's logits alone, on every architecture, or says why it does not apply."""

from __future__ import annotations

import pytest
import torch
from helpers import logits, moved, rewrite_blocks
from torch import nn
from twins import TWINS, build, token_ids

from quantkit.errors import UserError
from quantkit.modelspec import spec_for
from quantkit.rewrites import Probe, awq, rotate, smoothquant
from quantkit.scheme import Scheme
from quantkit.skeleton import capture, decoder_blocks, run_block

W4 = Scheme(4, group=32)
W8A8 = Scheme(8, activation="int8")


def with_outliers(name: str):
    """A twin whose norms carry a few channels far above the others, as real models' do."""
    model = build(name)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 1:
            weight[torch.randint(0, len(weight), (3,), generator=generator)] += 6.0
    return model


@pytest.mark.parametrize("name", TWINS)
def test_awq(name):
    model = with_outliers(name)
    before = logits(model)
    spec = spec_for(model.config)
    reports = rewrite_blocks(model, spec, awq.Rewrite(), W4)
    assert any(report.changes for report in reports)
    assert moved(logits(model), before) <= 1e-3
    assert not any("moved by" in why for report in reports for why in report.skipped.values())


@pytest.mark.parametrize("name", TWINS)
def test_smoothquant(name):
    model = with_outliers(name)
    before = logits(model)
    spec = spec_for(model.config)
    reports = rewrite_blocks(model, spec, smoothquant.Rewrite(), W8A8)
    assert any(report.changes for report in reports)
    assert moved(logits(model), before) <= 1e-3
    assert all("norm" in title or "ln_" in title for report in reports for title in report.changes)


ROTATABLE = ["llama", "llama-tied", "llama-ragged", "llama-biased", "mistral", "qwen2", "qwen2-tied", "qwen3",
             "phi3", "mixtral", "qwen3-moe"]  # fmt: skip


@pytest.mark.parametrize("name", ROTATABLE)
def test_rotate(name):
    model = with_outliers(name)
    before = logits(model)
    spec = spec_for(model.config)
    rotation = rotate.Rewrite(seed=1).start(model, spec)
    embed, head = model.get_submodule(spec.embed), model.get_submodule(spec.head)
    if model.config.tie_word_embeddings:
        assert rotation.config_changes == {"tie_word_embeddings": False}
        head.weight = nn.Parameter(embed.weight.clone(), requires_grad=False)
    else:
        assert rotation.config_changes == {}
    rotation.embedding(embed)
    hidden, calls = capture(model, spec, token_ids(1, 20))
    for block, call in zip(decoder_blocks(model, spec), calls):
        old = block.self_attn.o_proj.weight.clone()
        report = rotation.block(block, Probe(hidden, call))
        assert set(report.changes) == {"residual stream", "values"}
        assert moved(block.self_attn.o_proj.weight, old) > 0.05
        hidden = run_block(block, hidden, call)
    rotation.head(model.get_submodule(spec.norm), head)
    assert moved(logits(model), before) <= 1e-3
    norms = [
        p for n, p in model.named_parameters() if p.shape == model.model.norm.weight.shape and "norm" in n
    ]
    assert norms and all(torch.equal(p, torch.ones_like(p)) for p in norms)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3", "post_attention_layernorm and post_feedforward_layernorm, which a rotation changes"),
        ("gpt2", "not known which linears write"),
        ("gpt-neox", "not known which linears write"),
    ],
)
def test_rotate_refuses_with_the_reason(name, reason):
    model = build(name)
    spec = spec_for(model.config)
    assert reason in (rotate.Rewrite().why_not(model, spec) or "")
    with pytest.raises(UserError, match="rotate does not apply"):
        rotate.Rewrite().start(model, spec)


def test_rotate_refuses_layer_norm_even_with_data():
    from quantkit.models import llama

    model = build("llama")
    model.model.norm = nn.LayerNorm(64)
    assert "LayerNorm" in (rotate.Rewrite().why_not(model, llama.SPEC) or "")


def test_rotate_notices_a_writer_that_the_data_forgets():
    from dataclasses import replace

    from quantkit.models import llama

    model = build("llama")
    broken = replace(llama.SPEC, writers=("self_attn.o_proj",))
    rotation = rotate.Rewrite().start(model, broken)
    hidden, calls = capture(model, broken, token_ids(1, 12))
    with pytest.raises(UserError, match="rotation changed a block's output"):
        rotation.block(decoder_blocks(model, broken)[0], Probe(hidden, calls[0]))


def test_a_wrong_pair_is_undone_and_listed():
    """gate -> down is no rescale pair (the activation is between); the proof on the probe catches it."""
    from dataclasses import replace

    from quantkit.models import llama
    from quantkit.modelspec import Fold

    model = with_outliers("llama")
    wrong = replace(llama.SPEC, folds=(Fold("mlp.gate_proj", ("mlp.down_proj",), kind="linear"),))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    reports = rewrite_blocks(model, wrong, awq.Rewrite(), W4)
    assert all("moved by" in r.skipped["mlp.gate_proj -> mlp.down_proj"] for r in reports)
    assert not any(report.changes or report.input_scales for report in reports)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
