"""The benchmark tool: same function, same values, other places."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from twins import build, save, token_ids

from quantkit.checkpoint import Source
from quantkit.errors import UserError
from quantkit.offgrid import make_offgrid

MODELS = ["llama", "llama-tied", "llama-ragged", "llama-biased", "qwen2", "qwen3", "gemma3", "phi3"]


@torch.no_grad()
def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=token_ids(2, 40), use_cache=False).logits


@pytest.mark.parametrize("random_scales", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_unchanged_in_float32(name, random_scales, tmp_path):
    src = save(name, tmp_path / "src")
    report = make_offgrid(src, tmp_path / "dst", seed=4, random_scales=random_scales)
    before, after = logits(src), logits(tmp_path / "dst")
    assert (after - before).abs().max() <= 1e-4 * before.abs().max() + 1e-5
    assert report.moved <= 1e-4
    assert (report.scales > 0) == random_scales
    names = {p.name for p in src.iterdir()}
    assert {p.name for p in (tmp_path / "dst").iterdir()} == names


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3"])
def test_a_permutation_keeps_every_bfloat16_value_and_moves_most(name, tmp_path):
    src = save(name, tmp_path / "src", dtype=torch.bfloat16)
    report = make_offgrid(src, tmp_path / "dst", seed=1)
    assert report.rounding == 0.0
    old, new = Source(src), Source(tmp_path / "dst")
    assert set(old.tensors) == set(new.tensors)
    for key in old.tensors:
        a, b = old.tensor(key), new.tensor(key)
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.flatten().sort().values, b.flatten().sort().values), key
        if a.dim() == 2:
            # no 32-group of a row holds what it held before
            assert (a != b).float().mean() > 0.9, key
    # head-wise norms and biases of q and k belong to rotary pairs and stay
    for key in old.tensors:
        if "q_norm" in key or "k_norm" in key or "q_proj.bias" in key:
            assert torch.equal(old.tensor(key), new.tensor(key)), key


def test_random_scales_state_their_rounding(tmp_path):
    src = save("llama", tmp_path / "src", dtype=torch.bfloat16)
    report = make_offgrid(src, tmp_path / "dst", random_scales=True)
    assert 0 < report.rounding <= 2**-8  # half a unit in the last place of bfloat16
    old, new = Source(src), Source(tmp_path / "dst")
    key = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(old.tensor(key).flatten().sort().values, new.tensor(key).flatten().sort().values)


def test_seeds_repeat_and_differ(tmp_path):
    src = save("llama", tmp_path / "src")
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_offgrid(src, tmp_path / folder, seed=seed)
    data = {f: (tmp_path / f / "model.safetensors").read_bytes() for f in "abc"}
    assert data["a"] == data["b"] != data["c"]


def test_refusals_leave_nothing_behind(tmp_path):
    src = save("gpt2", tmp_path / "src")
    with pytest.raises(UserError, match="write to the residual stream"):
        make_offgrid(src, tmp_path / "dst")
    llama = save("llama", tmp_path / "llama")
    with pytest.raises(UserError, match="exists already"):
        make_offgrid(llama, src)
    assert {p.name for p in tmp_path.iterdir()} == {"src", "llama"}


def test_a_wrong_permutation_would_be_noticed(tmp_path, monkeypatch):
    """The proof can fail: gate rows left where they were."""
    from quantkit import offgrid

    def careless(self, block, fold):
        order = self._permutation(offgrid._folding.width_of(block, self.spec, fold, self.config))
        offgrid._permute(block.mlp.up_proj.weight.detach(), 0, order)
        offgrid._permute(block.mlp.down_proj.weight.detach(), 1, order)

    monkeypatch.setattr(offgrid.Mover, "_channels", careless)
    with pytest.raises(UserError, match=r"output of model\.layers\.0 moved"):
        make_offgrid(save("llama", tmp_path / "src"), tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_build_is_deterministic():
    a, b = build("gemma3"), build("gemma3")
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
