"""The walk: equal to the full forward, equal however it is run, resumable to the byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import quantkit.pipeline as pipeline
from quantkit import recipe as recipes
from quantkit.activations import HessianSum, NonFinite
from quantkit.errors import UserError, VerificationError
from quantkit.load import load
from quantkit.quantize import execute, prepare, quantize
from quantkit.streamed import StreamedModel
from quantkit.workdir import WorkFolder

RULE = {"weights": {"bits": 4, "group": 32}, "solver": "gptq"}


def make_recipe(calib_file, rules=None, **more):
    calib = {"source": str(calib_file), "samples": 6, "seq_len": 48}
    return recipes.parse({"rules": rules or [RULE], "calib": calib, **more}, "test")


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_hessian_sum_equals_the_formula():
    x = torch.randn(3, 7, 5)
    y = x + 0.1 * torch.randn(3, 7, 5)
    total = HessianSum(5, cross=True)
    total.add(x[:1], y[:1])
    total.add(x[1:], y[1:])
    seen = total.seen()
    flat, other = x.reshape(-1, 5).double(), y.reshape(-1, 5).double()
    assert torch.allclose(seen.hessian.double(), 2 / 21 * flat.T @ flat, atol=1e-5)
    assert seen.cross is not None
    assert torch.allclose(seen.cross.double(), 2 / 21 * (other - flat).T @ flat, atol=1e-5)
    assert torch.allclose(seen.abs_mean, flat.abs().mean(0).float(), atol=1e-6) and seen.tokens == 21
    with pytest.raises(ValueError, match="closed"):
        total.add(x, y)


def test_nothing_bad_enters_a_hessian():
    x = torch.randn(3, 7, 5)
    total = HessianSum(5)
    total.add(x)
    x[1, 2, 3] = float("inf")
    with pytest.raises(NonFinite, match=r"1 of 5 input channels.*channel 3"):
        total.add(x)
    assert torch.isfinite(total.seen().hessian).all() and total.seen().tokens == 21


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "gemma3", "phi3", "mistral", "gpt2"])
def test_quantized_model_is_what_the_walk_solved(twin_folder, calib_file, tmp_path, name):
    """Hidden states that the walk carried = the written model run as a whole, and quantized loading = dequantized."""
    recipe = make_recipe(calib_file)
    job = prepare(str(twin_folder(name)), recipe)
    last = {}

    class Keep(pipeline._Streams):
        def close(self):
            last["hidden"] = self.quantized.data.clone()
            super().close()

    pipeline_streams, pipeline._Streams = pipeline._Streams, Keep
    try:
        outcome = execute(job, tmp_path / "q")
    finally:
        pipeline._Streams = pipeline_streams
    ids = _ids(job)
    model = load(outcome.folder, torch.float32, dequantize=True)
    seen = []
    norm = model.get_submodule(job.spec.norm)
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        whole = model(ids).logits
        quantized = load(outcome.folder, torch.float32)(ids).logits
    assert torch.allclose(seen[0], last["hidden"], atol=2e-5, rtol=1e-5)
    assert torch.allclose(quantized, whole, atol=1e-5, rtol=1e-5)
    streamed = StreamedModel(outcome.folder)
    hidden = streamed.hidden_states(ids)
    streamed.load_head()
    assert torch.allclose(streamed.logits(hidden), whole, atol=2e-5, rtol=1e-5)
    assert all(not r.worse_than_rounding for r in outcome.reports)
    assert len(outcome.reports) == len(job.plan.quantized)


def _ids(job):
    from quantkit.quantize import calibration

    return calibration(job).ids


def test_suspended_and_rerun_walks_give_the_same_bytes(twin_folder, calib_file, tmp_path, monkeypatch):
    recipe = make_recipe(calib_file, [{**RULE, "solver": "stack"}])
    quantize(str(twin_folder("llama")), tmp_path / "a", recipe)
    monkeypatch.setattr(pipeline, "SUSPEND_IN_MEMORY", 0)
    monkeypatch.setattr(pipeline, "HIDDEN_IN_MEMORY", 0)  # and hidden states in a mapped file
    quantize(str(twin_folder("llama")), tmp_path / "b", recipe)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_same_seed_same_bytes_other_seed_other_windows(twin_folder, calib_file, tmp_path):
    recipe = make_recipe(calib_file)
    quantize(str(twin_folder("llama")), tmp_path / "a", recipe)
    quantize(str(twin_folder("llama")), tmp_path / "b", recipe)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    other = recipe.model_copy(update={"calib": recipe.calib.model_copy(update={"seed": 1})})
    quantize(str(twin_folder("llama")), tmp_path / "c", other)
    one, two = (
        json.loads((tmp_path / n / "quantkit.json").read_text())["calibration"]["sha256"] for n in "ac"
    )
    assert one != two


KILLER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
from pathlib import Path
from quantkit import recipe
from quantkit.pipeline import Silent
from quantkit.quantize import quantize
class Kill(Silent):
    solved = 0
    def module(self, report):
        self.solved += 1
        if self.solved == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
quantize({model!r}, Path({out!r}), recipe.load({recipe!r}), progress=Kill())
"""


@pytest.mark.parametrize(
    "solver, rewrites, after", [("gptq", [], 9), ("stack", [], 17), ("gptq", [{"name": "awq"}], 12)]
)
def test_killed_run_resumes_to_identical_bytes(twin_folder, calib_file, tmp_path, solver, rewrites, after):
    """kill -9 in the middle of a block; the same command ends with the files of an unbroken run."""
    model = twin_folder("llama", num_hidden_layers=4)
    recipe = make_recipe(calib_file, [{**RULE, "solver": solver}], rewrites=rewrites)
    file = tmp_path / "r.yaml"
    file.write_text(recipes.dump(recipe))
    script = KILLER.format(
        tests=str(Path(__file__).parent),
        after=after,
        model=str(model),
        out=str(tmp_path / "broken"),
        recipe=str(file),
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not (tmp_path / "broken").exists()
    left = sorted(p.name for p in (tmp_path / "broken.work").glob("block-*"))
    assert left == [f"block-{i:05d}.safetensors" for i in range((after - 1) // 7)]

    said = []
    quantize(str(model), tmp_path / "broken", recipe, tell=said.append)
    assert any(f"resuming: {len(left)} blocks" in s for s in said)
    quantize(str(model), tmp_path / "unbroken", recipe)
    assert files_of(tmp_path / "broken") == files_of(tmp_path / "unbroken")
    assert not (tmp_path / "broken.work").exists() and not (tmp_path / "broken.staging").exists()


def test_changed_run_is_refused_with_what_changed(tmp_path):
    WorkFolder(tmp_path / "w", {"model": "aaaa", "recipe": "bbbb"})
    with pytest.raises(UserError, match=r"differs in recipe \(bbbb -> cccc\).*--restart"):
        WorkFolder(tmp_path / "w", {"model": "aaaa", "recipe": "cccc"})
    (tmp_path / "w" / "block-00000.safetensors").write_bytes(b"x")
    restarted = WorkFolder(tmp_path / "w", {"model": "aaaa", "recipe": "cccc"}, resume=False)
    assert restarted.finished() == 0


def test_tied_embeddings_stay_tied_and_other_tensors_are_carried(twin_folder, calib_file, tmp_path):
    folder = twin_folder("qwen2-tied")
    quantize(str(folder), tmp_path / "q", make_recipe(calib_file))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    assert "lm_head.weight" not in after
    for name, tensor in before.items():
        if name in after:
            assert torch.equal(tensor, after[name]), name
        else:
            assert name.endswith("_proj.weight") and name.replace(".weight", ".weight_packed") in after
    sides = {p.name for p in folder.iterdir()} - {"model.safetensors", "config.json"}
    assert sides and all((tmp_path / "q" / n).read_bytes() == (folder / n).read_bytes() for n in sides)
    model = load(tmp_path / "q")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "bits, symmetric, group", [(4, True, 32), (8, True, 0), (3, True, 32), (2, True, 32), (4, True, 0)]
)
@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_plain_transformers_loads_it_with_equal_logits(
    twin_folder, calib_file, tmp_path, name, bits, symmetric, group
):
    weights = {"bits": bits, "symmetric": symmetric, "group": group}
    quantize(
        str(twin_folder(name)),
        tmp_path / "q",
        make_recipe(calib_file, [{"weights": weights, "solver": "gptq"}]),
    )
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)(ids).logits
        ours = load(tmp_path / "q", torch.float32)(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_w8a8_rounds_activations_as_transformers_does(twin_folder, calib_file, tmp_path):
    weights = {"bits": 8, "group": 0, "activation": "int8"}
    quantize(
        str(twin_folder("llama")),
        tmp_path / "q",
        make_recipe(calib_file, [{"weights": weights, "solver": "gptq"}]),
    )
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)(ids).logits
        ours = load(tmp_path / "q", torch.float32)(ids).logits
        plain = load(tmp_path / "q", torch.float32, dequantize=True)(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours, plain, atol=1e-3), "activations must really be rounded"
    streamed = StreamedModel(tmp_path / "q")
    hidden = streamed.hidden_states(ids)
    streamed.load_head()
    assert torch.allclose(streamed.logits(hidden), ours, atol=1e-4, rtol=1e-4)


def test_overflowing_model_is_named(twin_folder, calib_file, tmp_path):
    folder = tmp_path / "hot"
    shutil.copytree(twin_folder("llama", dtype=torch.float32), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"] *= 1.5e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.gate_proj.*NaN or infinity.*overflows"):
        quantize(str(folder), tmp_path / "q", make_recipe(calib_file))


def test_sabotaged_output_is_caught_before_success(twin_folder, calib_file, tmp_path, monkeypatch):
    """A packer that swaps nibbles must not be reported as success."""
    from quantkit.formats import compressed_tensors

    honest = compressed_tensors.pack

    def swapped(module, weight, config=None):
        out = honest(module, weight, config)
        packed = out[f"{module}.weight_packed"]
        if "layers.1.self_attn.k_proj" in module:
            out[f"{module}.weight_packed"] = ((packed >> 4) & 0x0F0F0F0F) | ((packed & 0x0F0F0F0F) << 4)
        return out

    monkeypatch.setattr(compressed_tensors, "pack", swapped)
    with pytest.raises(
        VerificationError,
        match=r"layers\.1\.self_attn\.k_proj was not written as it was solved.*codes differ",
    ):
        quantize(str(twin_folder("llama")), tmp_path / "q", make_recipe(calib_file))
    assert not (tmp_path / "q").exists(), "no output folder without verification"


def test_output_folder_rules(twin_folder, calib_file, tmp_path, monkeypatch):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "precious").write_text("x")
    with pytest.raises(
        UserError, match="exists; choose another folder with -o, or replace it with --overwrite"
    ):
        quantize(str(twin_folder("llama")), tmp_path / "q", make_recipe(calib_file))
    assert (tmp_path / "q" / "precious").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"1\.0 kB free and this run needs"):
        quantize(str(twin_folder("llama")), tmp_path / "r", make_recipe(calib_file))
    monkeypatch.undo()
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(UserError, match="cannot write in"):
        quantize(str(twin_folder("llama")), blocked / "q", make_recipe(calib_file))


def test_short_calibration_is_an_error_before_work(twin_folder, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("too short")
    with pytest.raises(UserError, match=r"token"):
        quantize(str(twin_folder("llama")), tmp_path / "q", make_recipe(text))
    assert not (tmp_path / "q.work").exists()


def test_ragged_last_group_in_memory(calib_file, tmp_path, twin_folder):
    """72 columns with group 32: solver and QuantWeight carry the short group; no format holds it."""
    with pytest.raises(UserError, match="does not divide 72 columns"):
        prepare(
            str(twin_folder("llama-ragged")),
            make_recipe(
                calib_file, [{"weights": {"bits": 4, "group": 32, "fit": "ragged"}, "solver": "gptq"}]
            ),
        )


def test_hooks_are_gone_after_a_walk(twin_folder, calib_file, tmp_path):
    job = prepare(str(twin_folder("llama")), make_recipe(calib_file))
    execute(job, tmp_path / "q")
    assert all(not m._forward_pre_hooks for m in job.model.modules() if isinstance(m, nn.Module))
    assert os.path.isdir(tmp_path / "q")


def test_calibration_text_that_the_model_writes_itself(twin_folder, tmp_path):
    calib = {"source": "self", "samples": 4, "seq_len": 24}
    recipe = recipes.parse({"rules": [RULE], "calib": calib}, "t")
    for name in ("a", "b"):
        outcome = quantize(str(twin_folder("llama")), tmp_path / name, recipe)
    assert outcome.audit["source"].startswith("self")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_gguf_file_goes_in(twin_folder, tmp_path, monkeypatch):
    """A .gguf file is dequantized once into the cache and quantized like a folder."""
    from quantkit.formats import gguf
    from quantkit.load import iterate
    from quantkit.resolve import resolve_model

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    folder = twin_folder("llama")
    file = tmp_path / "tiny.gguf"
    gguf.write(iterate(folder), json.loads((folder / "config.json").read_text()), folder, file)
    np.save(
        tmp_path / "ids.npy",
        torch.randint(5, 370, (6, 48), generator=torch.Generator().manual_seed(0)).numpy(),
    )
    quantize(str(file), tmp_path / "q", make_recipe(tmp_path / "ids.npy"))
    cached = resolve_model(str(file))
    assert cached == resolve_model(str(file)) and (cached / "complete").is_file()
    before, after = load_file(folder / "model.safetensors"), load_file(cached / "model.safetensors")
    for name, tensor in before.items():
        assert torch.equal(tensor.float(), after[name].float()), name
    file.write_bytes(b"not a gguf file")
    with pytest.raises(UserError, match="cannot be read as a GGUF model"):
        resolve_model(str(file))
