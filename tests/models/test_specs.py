"""The architecture data files against what tracing finds, and discovery where there is no file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from twins import TWINS, build, config, token_ids

from quantkit import modelspec
from quantkit.errors import UserError
from quantkit.models import _folding, generic, llama
from quantkit.modelspec import Fold, spec_for
from quantkit.skeleton import capture, decoder_blocks, run_block

WITH_FILE = [n for n in TWINS if n not in ("gpt2", "gpt-neox", "opt")]


@pytest.mark.parametrize("name", WITH_FILE)
def test_data_file_says_what_tracing_finds(name):
    made = config(name)
    told, found = spec_for(made), generic.discover(made)
    for part in ("embed", "blocks", "norm", "head", "norm_offset", "transposed", "tuple_output"):
        assert getattr(told, part) == getattr(found, part), part
    assert set(told.groups) == set(found.groups)
    assert set(told.unquantized) == set(found.unquantized)


@pytest.mark.parametrize("name", TWINS)
def test_every_fold_keeps_the_blocks_function(name):
    """Random factors through every rescale pair of every block: the output stays."""
    model = build(name)
    spec = spec_for(model.config, model)
    assert spec.folds
    hidden, calls = capture(model, spec, token_ids(2, 24))
    for block, call in zip(decoder_blocks(model, spec), calls):
        before = run_block(block, hidden, call)
        folds = spec.folds_in(block)
        assert folds
        for number, fold in enumerate(folds):
            assert _folding.misfit(block, spec, fold, model.config) is None
            width = _folding.width_of(block, spec, fold, model.config)
            s = torch.exp2(2 * torch.rand(width, generator=torch.Generator().manual_seed(number)) - 1)
            _folding.scale(block, spec, fold, s, model.config)
        after = run_block(block, hidden, call)
        assert (after - before).abs().max() <= 2e-5 * before.abs().max()
        hidden = after


def test_a_fold_that_forgets_the_norm_offset_is_seen():
    """The check above can fail: gemma's norms scaled as if they multiplied by their weight."""
    model = build("gemma3")
    spec = replace(spec_for(model.config), norm_offset=0.0)
    hidden, calls = capture(model, spec, token_ids(1, 8))
    block = decoder_blocks(model, spec)[0]
    before = run_block(block, hidden, calls[0])
    _folding.scale(block, spec, spec.folds[0], torch.full((64,), 2.0), model.config)
    assert (run_block(block, hidden, calls[0]) - before).abs().max() > 1e-2


def test_gpt2_is_discovered():
    spec = generic.discover(config("gpt2"))
    assert (spec.embed, spec.blocks, spec.norm) == ("transformer.wte", "transformer.h", "transformer.ln_f")
    assert spec.transposed
    assert spec.groups == (("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",))
    assert spec.folds == (
        Fold("ln_1", ("attn.c_attn",)),
        Fold("ln_2", ("mlp.c_fc",)),
        Fold("attn.c_attn", ("attn.c_proj",), kind="value", rows="qkv:v"),
    )  # and none into mlp.c_proj: GELU is not homogeneous


def test_gpt_neox_is_discovered_with_its_two_norms_on_one_stream():
    spec = generic.discover(config("gpt-neox"))
    assert spec.groups == (
        ("attention.query_key_value",),
        ("attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    )
    # rows of its fused projection are interleaved by head, so no value fold can be proven
    assert {f.producer for f in spec.folds} == {"input_layernorm", "post_attention_layernorm"}


def test_opt_is_discovered_with_the_relu_pair():
    spec = generic.discover(config("opt"))
    assert Fold("fc1", ("fc2",), kind="linear") in spec.folds
    assert ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj") in spec.groups


def test_experts_are_listed_and_logged_never_dropped(caplog):
    with caplog.at_level("WARNING", logger="quantkit"):
        spec = generic.discover(config("mixtral"))
    assert set(spec.unquantized) == {"mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert "mlp.experts.gate_up_proj" in caplog.text


def test_discovery_leaves_torchs_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generic.discover(config("gpt2"))
    assert torch.equal(torch.rand(3), expected)


def test_blocks_of_two_kinds():
    model = build("qwen3-moe")
    spec = spec_for(model.config, model)
    dense, sparse = decoder_blocks(model, spec)[:2]
    assert spec.groups_in(dense)[2:] == (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
    assert len(spec.groups_in(sparse)) == 2
    norm = next(f for f in spec.folds_in(sparse) if f.producer == "post_attention_layernorm")
    assert norm.consumers == ("mlp.gate", "mlp.experts.gate_up_proj")


def test_a_matrix_that_the_data_does_not_name_is_an_error():
    model = build("llama")
    short = replace(llama.SPEC, groups=llama.SPEC.groups[:3])
    with pytest.raises(UserError, match=r"does not cover mlp\.down_proj of block 0"):
        modelspec.check(model, short, "llama")


def test_names_exist_and_cover_everything():
    for name in WITH_FILE:
        model = build(name)
        spec = spec_for(model.config, model)
        for block in decoder_blocks(model, spec):
            assert not modelspec.unlisted(block, spec)
            for member in (*spec.linears_in(block), *spec.post_norms):
                assert modelspec.has(block, member), (name, member)
        mentioned = {n for b in decoder_blocks(model, spec) for n, _ in b.named_modules()}
        fused = {n for group in spec.fused for n in group}
        assert fused <= mentioned and set(spec.gguf_names) <= mentioned
