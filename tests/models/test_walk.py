"""Walking a model block by block equals its full forward exactly, with at most one block in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from twins import TWINS, build, config, save, token_ids

from quantkit import skeleton
from quantkit.checkpoint import Source
from quantkit.errors import UserError
from quantkit.modelspec import spec_for


def walk(model, spec, tensors: Callable[[str], Tensor], ids: Tensor) -> Tensor:
    """Logits of a skeleton whose parts are loaded, run and released one after another."""
    skeleton.materialize_embeddings(model, spec, tensors)
    hidden, calls = skeleton.capture(model, spec, ids)
    for index, (block, call) in enumerate(zip(skeleton.decoder_blocks(model, spec), calls)):
        skeleton.materialize(block, f"{spec.blocks}.{index}", tensors)
        hidden = skeleton.run_block(block, hidden, call)
        skeleton.release(block)
        assert all(p.is_meta for p in block.parameters())
    norm = model.get_submodule(spec.norm)
    skeleton.materialize(norm, spec.norm, tensors)
    skeleton.materialize_head(model, spec, tensors)
    return skeleton.run_head(model, spec, skeleton.run_tail(model, spec, hidden))


@pytest.mark.parametrize("name", TWINS)
def test_walk_equals_the_full_forward_exactly(name):
    full = build(name)
    spec = spec_for(full.config, full)
    model = skeleton.build_skeleton(full.config)
    weights = full.state_dict().__getitem__
    for batch, length in ((1, 3), (3, 17), (2, 50)):  # 50 is beyond gemma's and mistral's windows
        ids = token_ids(batch, length)
        expected = full(input_ids=ids, use_cache=False).logits
        assert torch.equal(walk(model, spec, weights, ids), expected), (batch, length)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_walk_from_a_folder_that_holds_one_tensor_per_expert(name, tmp_path):
    source = Source(save(name, tmp_path / name))
    full = build(name)
    spec = spec_for(full.config)
    assert "model.layers.1.mlp.experts.gate_up_proj" not in source  # else this tests nothing
    reader = skeleton.checkpoint_reader(spec, source.tensor, source)
    ids = token_ids(2, 20)
    logits = walk(skeleton.build_skeleton(full.config), spec, reader, ids)
    assert torch.equal(logits, full(input_ids=ids, use_cache=False).logits)
    with pytest.raises(UserError, match=r"no tensor 'model\.layers\.9\.mlp\.experts\.gate_up_proj'"):
        reader("model.layers.9.mlp.experts.gate_up_proj")


def test_reusing_the_first_blocks_arguments_is_wrong_for_gemma3():
    """Guards the reason for capturing every block's call: sliding and full layers differ."""
    full = build("gemma3")
    spec = spec_for(full.config)
    ids = token_ids(1, 50)
    hidden, calls = skeleton.capture(full, spec, ids)
    for block in skeleton.decoder_blocks(full, spec):
        hidden = skeleton.run_block(block, hidden, calls[0])
    logits = skeleton.run_head(full, spec, skeleton.run_tail(full, spec, hidden))
    assert (logits - full(input_ids=ids, use_cache=False).logits).abs().max() > 1e-2


def test_walk_applies_the_final_soft_cap():
    full = build("gemma3", final_logit_softcapping=2.0)
    spec = spec_for(full.config)
    ids = token_ids(1, 9)
    logits = walk(skeleton.build_skeleton(full.config), spec, full.state_dict().__getitem__, ids)
    assert logits.abs().max() <= 2.0
    assert torch.equal(logits, full(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_skeleton_holds_no_parameter_and_real_buffers(name):
    wanted = config(name)
    wanted.dtype = torch.bfloat16
    model = skeleton.build_skeleton(wanted)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert not model.training
    assert wanted.dtype == torch.bfloat16  # the caller's config is left alone
    real = dict(build(name).named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, real[key]), key


def test_forwards_are_restored_even_when_the_model_fails():
    model = build("llama")
    spec = spec_for(model.config)
    too_large = torch.full((1, 4), 10_000)
    with pytest.raises(IndexError):
        skeleton.capture(model, spec, too_large)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_wrong_shape_in_the_checkpoint_is_named():
    model = skeleton.build_skeleton(config("llama"))
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(5,\).*expects \(64,\)"):
        skeleton.materialize(model.get_submodule("model.norm"), "model.norm", lambda name: torch.ones(5))


def test_materialize_converts_the_dtype():
    full = build("llama").bfloat16()
    model = skeleton.build_skeleton(full.config)
    block = skeleton.decoder_blocks(model, spec_for(full.config))[1]
    skeleton.materialize(block, "model.layers.1", full.state_dict().__getitem__, torch.float32)
    assert {p.dtype for p in block.parameters()} == {torch.float32}
    assert torch.equal(block.mlp.up_proj.weight, full.model.layers[1].mlp.up_proj.weight.float())
