import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from quantkit.errors import UserError
from quantkit.evals import memory, speed
from tests.evals.conftest import tiny


@pytest.mark.parametrize(
    "name, label",
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("token_embd.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("output.weight", "head"),
        ("model.layers.3.self_attn.q_proj.weight_packed", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "norm"),
        ("blk.2.attn_output.weight", "attention"),
        ("blk.2.attn_norm.weight", "norm"),
        ("blk.2.ffn_down.weight", "mlp"),
        ("model.layers.3.mlp.down_proj.qweight", "mlp"),
        ("model.layers.0.mlp.experts.gate_up_proj", "mlp"),
        ("model.layers.0.block_sparse_moe.gate.weight", "mlp"),
        ("transformer.h.0.ln_1.weight", "norm"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("transformer.h.0.mlp.c_fc.weight", "mlp"),
        ("model.norm.weight", "norm"),
        ("output_norm.weight", "norm"),
        ("model.rotary_emb.inv_freq", "other"),
    ],
)
def test_tensor_class(name, label):
    assert memory.tensor_class(name) == label


def test_folder_and_live_model_agree(tmp_path):
    model = tiny(0)
    model.save_pretrained(tmp_path)
    disk, live = memory.from_folder(tmp_path), memory.from_model(model)
    assert disk.by_class["embedding"] == 260 * 32 * 4 and disk.by_class["head"] == 0, (
        "tied weights counted twice"
    )
    for name in ("embedding", "attention", "mlp", "norm", "head"):
        assert disk.by_class[name] == live.by_class[name], name
    assert disk.files == (tmp_path / "model.safetensors").stat().st_size > disk.total
    total = {r["metric"]: r["value"] for r in disk.rows()}["weights_total"]
    assert total == sum(p.numel() * 4 for p in {id(p): p for p in model.parameters()}.values())


def test_shards_and_quantized_names_add_up(tmp_path):
    save_file(
        {"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 4, dtype=torch.int32)},
        tmp_path / "a.safetensors",
    )
    save_file(
        {"model.layers.0.mlp.up_proj.scales": torch.zeros(2, 4, dtype=torch.float16)},
        tmp_path / "b.safetensors",
    )
    assert memory.from_folder(tmp_path).by_class["mlp"] == 8 * 4 * 4 + 2 * 4 * 2


def test_bad_folders(tmp_path):
    with pytest.raises(UserError, match="holds no"):
        memory.from_folder(tmp_path)
    path = tmp_path / "a.safetensors"
    for content in (b"", b"abc", struct.pack("<Q", 1 << 40), struct.pack("<Q", 3) + b"{{{"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="safetensors"):
            memory.from_folder(tmp_path)


def test_gguf(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.add_tensor(
        "blk.0.ffn_up.weight", np.zeros((4, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0
    )
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    found = memory.from_folder(tmp_path / "m.gguf").by_class
    assert (found["embedding"], found["mlp"]) == (4 * 32 * 4, 4 * 18)


@pytest.mark.parametrize("kind, more", [("llama", {}), ("qwen2", {}), ("gemma3_text", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}), ("mistral", {"sliding_window": 16})])  # fmt: skip
@pytest.mark.parametrize("context", [5, 15, 40])
def test_cache_bytes_are_what_the_cache_holds(kind, more, context):
    model = tiny(0, kind=kind, **more)
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, context - 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    model(
        torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True
    )  # windows are cut at a step
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert memory.cache_bytes(model.config, context, bits=32) == held * 4


def test_measured_cache_bytes(model):
    cache = DynamicCache(config=model.config)
    model(torch.zeros(2, 9, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert memory.measured_cache_bytes(cache) == memory.cache_bytes(model.config, 9, bits=32, batch=2)


def test_cache_growth_rows(model):
    rows = memory.cache_growth(model.config, [1, 100], bits=8)
    per_token = 2 * 2 * 8 * 2  # layers x heads x width x (K and V)
    assert [r["value"] for r in rows] == [per_token, 100 * per_token]
    assert memory.cache_bytes_per_token(model.config, 16) == 2 * per_token


def test_peak_memory_sees_a_tensor_that_is_gone():
    size = 60 << 20
    with memory.peak_memory() as peak:
        block = torch.ones(size, dtype=torch.uint8)
        del block
    assert peak.over_start > 0.9 * size, peak
    if peak.exact:
        with memory.peak_memory() as after:
            pass
        assert after.over_start < 0.3 * size, after


class Fake:
    """A stepper on a clock of its own: prefill takes 5 s, step n takes n seconds."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def clock(self):
        return self.now

    def prefill(self, ids):
        self.calls.append(ids.shape[1])
        self.now += 5
        self.n = 0
        return ids[:, -1:]

    def step(self, token):
        self.n += 1
        self.now += self.n
        return token


def test_timing_by_a_known_clock():
    fake = Fake()
    timing = speed.measure(
        fake, torch.zeros(2, 7, dtype=torch.long), 4, repeats=2, warmup=1, clock=fake.clock
    )
    assert timing.ttft == [5, 5] and timing.itl == [1, 2, 3, 1, 2, 3] and fake.calls == [7, 7, 7]
    rows = {r["metric"]: r["value"] for r in timing.rows(label="x")}
    assert rows["ttft_median"] == 5000 and rows["itl_median"] == 2000 and rows["itl_p50"] == 2000
    assert rows["itl_p90"] == pytest.approx(3000) and rows["decode_rate"] == pytest.approx(1.0)
    assert rows["prefill_rate"] == pytest.approx(2 * 7 / 5)
    assert all(
        r["prompt_tokens"] == 7 and r["batch"] == 2 and r["label"] == "x" for r in timing.rows(label="x")
    )
    json.dumps(timing.rows())
    with pytest.raises(ValueError, match="at least 2"):
        speed.measure(fake, torch.zeros(1, 1, dtype=torch.long), 1)


def test_model_stepper_generates_what_generate_does(model):
    ids = speed.random_prompt(260, 6, batch=1, seed=1)
    stepper = speed.ModelStepper(model)
    for _ in range(2):  # a second prefill starts over
        token = stepper.prefill(ids)
        out = [token]
        for _ in range(7):
            token = stepper.step(token)
            out.append(token)
        want = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(torch.cat(out, 1), want[:, 6:])


def test_sweep_rows(model):
    rows = speed.sweep(speed.ModelStepper(model), 260, [4, 8], new_tokens=3, repeats=1)
    assert {r["prompt_tokens"] for r in rows} == {4, 8}
    assert all(r["value"] > 0 for r in rows)
