"""Checkpoints as the peers' own tools leave them, packed here by hand to their conventions (not by quantkit's code):
`quantkit eval` reads them, and they convert to other formats with equal weights."""

import json

import numpy as np
import pytest
import torch
import twins
from safetensors.torch import load_file, save_file

from quantkit.cli import main
from quantkit.convert import export
from quantkit.opened import open_any
from quantkit.qweight import QuantWeight
from quantkit.streamed import StreamedModel
from quantkit.verify import verify

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def grid(weight: torch.Tensor, symmetric: bool):
    """codes [out, in], scales [out, G] float16, zeros [out, G], and the float weight that they stand for."""
    w = weight.float().numpy().reshape(weight.shape[0], -1, GROUP)
    if symmetric:
        scale = (np.abs(w).max(2) / 7.5).astype(np.float16)
        zero = np.full(scale.shape, 8)
    else:
        low, high = np.minimum(w.min(2), 0), np.maximum(w.max(2), 0)
        scale = ((high - low) / 15).astype(np.float16)
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, 15).astype(int)
    s = scale.astype(np.float32)[..., None]
    codes = np.clip(np.round(w / s) + zero[..., None], 0, 15).astype(int)
    value = ((codes - zero[..., None]) * s).astype(np.float32)
    shape = tuple(weight.shape)
    return codes.reshape(shape), scale, zero, torch.from_numpy(value.reshape(shape))


def words(values: np.ndarray, order=range(8)) -> torch.Tensor:
    """Eight 4-bit values along the last axis in an int32 each; nibble i of a word holds value order[i]."""
    groups = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint64)
    out = np.zeros(groups.shape[:-1], np.uint64)
    for i, j in enumerate(order):
        out |= groups[..., j] << np.uint64(4 * i)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def gptqmodel(module, codes, scale, zero, version):
    stored = zero - 1 if version == "gptq" else zero
    return {
        f"{module}.qweight": words(codes).T.contiguous(),
        f"{module}.qzeros": words(stored.T % 16),
        f"{module}.scales": torch.from_numpy(scale.T.copy()),
        f"{module}.g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // GROUP,
    }


def autoawq(module, codes, scale, zero):
    return {
        f"{module}.qweight": words(codes.T, AWQ_ORDER),
        f"{module}.qzeros": words(zero.T, AWQ_ORDER),
        f"{module}.scales": torch.from_numpy(scale.T.copy()),
    }


def llm_compressor(module, codes, scale, zero, symmetric):
    out = {
        f"{module}.weight_packed": words(codes),
        f"{module}.weight_scale": torch.from_numpy(scale.copy()),
        f"{module}.weight_shape": torch.tensor(codes.shape),
    }
    if not symmetric:
        out[f"{module}.weight_zero_point"] = words(zero.T.copy()).T.contiguous()
    return out


def config_of(tool, symmetric):
    """The configurations as the tools write them, with the keys that quantkit does not write."""
    if tool.startswith("gptq"):
        return {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": symmetric, "lm_head": False,
            "checkpoint_format": tool, "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05, "true_sequential": True},
        }  # fmt: skip
    if tool == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        }  # fmt: skip
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4, "observer": "minmax",
        "observer_kwargs": {}, "strategy": "group", "symmetric": symmetric, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, "version": "0.12.2",
        "global_compression_ratio": None, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


CASES = [
    ("gptq", True), ("gptq_v2", True), ("gptq_v2", False), ("awq", False), ("compressed-tensors", True), ("compressed-tensors", False),
]  # fmt: skip


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]} {'sym' if c[1] else 'asym'}")
def foreign(request, tmp_path):
    """(folder, tool, module -> float weight that it stands for)."""
    tool, symmetric = request.param
    folder = twins.save("llama", tmp_path / "foreign", dtype=torch.float16)
    tensors, want = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".layers." not in name or tensor.dim() != 2:
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        codes, scale, zero, want[module] = grid(tensor, symmetric)
        if tool.startswith("gptq"):
            tensors |= gptqmodel(module, codes, scale, zero, tool)
        elif tool == "awq":
            tensors |= autoawq(module, codes, scale, zero)
        else:
            tensors |= llm_compressor(module, codes, scale, zero, symmetric)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": config_of(tool, symmetric)})
    )
    return folder, tool, want


def assert_weights(path, want):
    held = {n: v for n, v in open_any(path).items() if isinstance(v, QuantWeight)}
    assert set(held) == set(want)
    for module, value in want.items():
        assert torch.equal(held[module].dequantize(), value), module


def test_read_verified_and_converted(foreign, tmp_path):
    folder, tool, want = foreign
    assert_weights(folder, want)
    report = verify(folder)
    assert report.sound, report.findings
    mine = tool.removesuffix("_v2")
    for target in {"compressed-tensors", "gptq", "awq"} - {mine}:
        export(folder, target, tmp_path / target)
        assert_weights(tmp_path / target, want)
        assert verify(tmp_path / target).findings == []


def test_eval_computes_with_these_weights(foreign, tmp_path, capsys):
    folder, _, want = foreign
    model = twins.build("llama")
    original = {
        n: t.float() for n, t in load_file(folder / "model.safetensors").items() if t.is_floating_point()
    }
    state = {n: original.get(n, t) for n, t in model.state_dict().items()} | {
        f"{m}.weight": w for m, w in want.items()
    }
    model.load_state_dict(state)
    ids = twins.token_ids(length=24)
    streamed = StreamedModel(folder)
    hidden = streamed.hidden_states(ids)
    streamed.load_head()
    with torch.no_grad():
        torch.testing.assert_close(streamed.logits(hidden), model(ids).logits, rtol=1e-4, atol=1e-4)
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(folder), "--windows", "2", "--seq-len", "64", "--json", str(rows)])
    assert not stop.value.code and any(
        json.loads(r)["metric"] == "perplexity" for r in rows.read_text().splitlines()
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_gguf_file_of_the_peer(kind, tmp_path, monkeypatch, capsys):
    """Blocks quantized and written by gguf-py, rows permuted as convert_hf_to_gguf does."""
    gguf = pytest.importorskip("gguf")
    model, path = twins.build("llama"), tmp_path / f"peer-{kind}.gguf"
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    writer = gguf.GGUFWriter(path, "llama")
    c = model.config
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    described = json.loads(twins.tokenizer().backend_tokenizer.to_str())
    vocabulary = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    vocabulary += [f"[PAD{i}]" for i in range(len(vocabulary), c.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if t.startswith("<") and t.endswith(">") else 1 for t in vocabulary])
    writer.add_token_merges([" ".join(m) for m in described["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(twins.CHAT_TEMPLATE)
    want = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        array = tensor.float().numpy()
        if module in top:
            writer.add_tensor(f"{top[module]}.weight", array.astype(np.float16) if array.ndim == 2 else array)
            continue
        _, _, layer, local = module.split(".", 3)
        label = f"blk.{layer}.{names[local]}.weight"
        if array.ndim == 1:
            writer.add_tensor(label, array)
            continue
        kind_id = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(array, kind_id)
        want[module] = torch.from_numpy(gguf.quants.dequantize(blocks, kind_id).astype(np.float32))
        heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(names[local])
        if heads:
            blocks = (
                blocks.reshape(heads, 2, blocks.shape[0] // heads // 2, -1)
                .swapaxes(1, 2)
                .reshape(blocks.shape)
            )
        writer.add_tensor(label, blocks, raw_dtype=kind_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert_weights(path, want)
    assert verify(path).sound
    targets = ["compressed-tensors", "gptq"] + (["awq"] if kind == "Q4_0" else [])
    for target in targets:
        export(path, target, tmp_path / target)
        assert_weights(tmp_path / target, want)
        assert verify(tmp_path / target).sound
    if kind == "Q4_0":  # ggml's largest value of a block sits at -8, so half the scales are negative
        scales = [v.scale for _, v in open_any(path).items() if isinstance(v, QuantWeight)]
        assert any(bool((s < 0).any()) for s in scales)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(path), "--windows", "2", "--seq-len", "64"])
    assert not stop.value.code and "perplexity" in capsys.readouterr().out
