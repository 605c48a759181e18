"""Whole GGUF files of tiny models: transformers' loader and our own reader give back every weight."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open

from quantkit.formats import CannotRead, CannotStore, _gguf_arch, _gguf_file
from quantkit.formats import gguf as fmt
from quantkit.qweight import QuantWeight, round_scale
from quantkit.scheme import Scheme
from tests import twins

GEMMA = {
    "layer_types": ["sliding_attention"] * 4,
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "hidden_size": 32,
}
MODELS = {
    "llama": {}, "llama-tied": {}, "llama-biased": {}, "mistral": {"sliding_window": None}, "qwen2": {},
    "qwen2-tied": {}, "qwen3": {}, "gemma3": GEMMA, "phi3": {},
}  # fmt: skip
SCHEMES = {
    "Q4_0": Scheme(4, True, 32),
    "Q8_0": Scheme(8, True, 64),
    "Q4_1": Scheme(4, False, 32),
}


def rounded(weight: torch.Tensor, scheme: Scheme) -> QuantWeight:
    rows, columns = weight.shape
    groups = scheme.groups(columns)
    size = scheme.group or columns
    parts = torch.nn.functional.pad(weight, (0, groups * size - columns)).reshape(rows, groups, size)
    if scheme.symmetric:
        scale = round_scale(parts.abs().amax(2) / (scheme.midpoint - 0.5), scheme)
        return QuantWeight.from_float(weight, scale, None, scheme)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = round_scale((high - low) / scheme.max_code, scheme)
    return QuantWeight.from_float(weight, scale, torch.round(-low / scale).clamp(0, scheme.max_code), scheme)


def items_of(folder, scheme: Scheme | None, dtype=torch.float32):
    """(items for write, the float weights that they stand for)."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118
    items, want = {}, {}
    for name, tensor in tensors.items():
        if scheme and ".layers." in name and tensor.dim() == 2:
            weight = rounded(tensor.float(), scheme)
            items[name.removesuffix(".weight")], want[name] = weight, weight.dequantize()
        else:
            items[name], want[name] = tensor, tensor.float()
    return items, want


def close(got: torch.Tensor, want: torch.Tensor, name: str, tolerance: float = 0.0) -> None:
    error = (got.float() - want).abs().max().item()
    assert error <= tolerance, f"{name} is off by {error}"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def get(name: str, **changes):
        key = (name, str(changes))
        if key not in made:
            made[key] = twins.save(name, tmp_path_factory.mktemp(name), **changes)
        return made[key]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_read_back_exactly(name, folder_of, tmp_path):
    folder = folder_of(name, **MODELS[name])
    config = json.loads((folder / "config.json").read_text())
    items, want = items_of(folder, SCHEMES["Q4_0"])
    out = tmp_path / "m.gguf"
    fmt.write(items.items(), config, folder, out)
    assert fmt.is_gguf(out) and not fmt.is_gguf(folder / "config.json")
    model = fmt.read(out)
    back = dict(model.items())
    assert set(back) == set(items)
    for key, value in back.items():
        if isinstance(items[key], QuantWeight):
            assert torch.equal(value.codes, items[key].codes), key
            close(value.dequantize(), want[f"{key}.weight"], key)
        else:
            # gemma's norms go through + 1 - 1 in float32
            close(value, want[key], key, 2e-7 if name == "gemma3" and key.endswith("norm.weight") else 0.0)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rms_norm_eps", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "eos_token_id"):  # fmt: skip
        if key in config:
            assert model.config[key] == pytest.approx(config[key]), key


@pytest.mark.parametrize("name, kind", [
    ("llama-biased", "Q4_0"), ("llama-biased", "Q8_0"), ("llama-biased", "Q4_1"), ("qwen2-tied", "Q4_0"),
    ("qwen3", "Q4_0"), ("gemma3", "Q4_0"),
])  # fmt: skip
def test_transformers_loads_equal_weights(name, kind, folder_of, tmp_path):
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = folder_of(name, **MODELS[name])
    config = json.loads((folder / "config.json").read_text())
    items, want = items_of(folder, SCHEMES[kind])
    fmt.write(items.items(), config, folder, tmp_path / "m.gguf")
    # the config is given: from metadata transformers takes no biases for llama and no head size for qwen3
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=twins.config(name, **MODELS[name]), dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    state = model.state_dict()
    for key, value in want.items():
        step = (
            items[key.removesuffix(".weight")].scale.float().max().item()
            if kind == "Q4_1" and ".layers." in key and value.dim() == 2
            else 0.0
        )
        tolerance = 2e-7 if name == "gemma3" and key.endswith("norm.weight") else step / 128
        close(state[key], value, key, tolerance)


def test_tokenizer_survives(folder_of, tmp_path):
    from transformers import AutoTokenizer

    folder = folder_of("llama")
    config = json.loads((folder / "config.json").read_text())
    fmt.write(items_of(folder, None)[0].items(), config, folder, tmp_path / "m.gguf")
    keys = _gguf_file.Reader(tmp_path / "m.gguf").metadata
    ours = AutoTokenizer.from_pretrained(folder)
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.chat_template"] == twins.CHAT_TEMPLATE
    assert len(keys["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert keys["tokenizer.ggml.tokens"][3] == "<|im_start|>" and keys["tokenizer.ggml.token_type"][3] == 3
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in (twins.TEXT, "Grüße <|im_end|> 42\n\n  x"):
        assert (
            theirs(text, add_special_tokens=False).input_ids == ours(text, add_special_tokens=False).input_ids
        )


def test_types_of_float_tensors(folder_of, tmp_path):
    folder = folder_of("llama")
    config = json.loads((folder / "config.json").read_text())
    items, want = items_of(folder, SCHEMES["Q4_0"], torch.bfloat16)
    fmt.write(items.items(), config, folder, tmp_path / "a.gguf")
    fmt.write(items.items(), config, folder, tmp_path / "b.gguf", embedding="Q8_0")
    plain, small = _gguf_file.Reader(tmp_path / "a.gguf"), _gguf_file.Reader(tmp_path / "b.gguf")
    kinds = {n: i.kind for n, i in plain.tensors.items()}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "BF16"
    assert kinds["blk.0.attn_norm.weight"] == "F32" and kinds["blk.0.ffn_up.weight"] == "Q4_0"
    assert small.tensors["token_embd.weight"].kind == small.tensors["output.weight"].kind == "Q8_0"
    assert plain.metadata["general.file_type"] == small.metadata["general.file_type"] == 2
    embedding = dict(fmt.read(tmp_path / "b.gguf").items())["model.embed_tokens.weight"]
    original = want["model.embed_tokens.weight"]
    step = original.reshape(-1, 32).abs().amax(1).repeat_interleave(32).reshape(original.shape) / 127
    assert ((embedding - original).abs() <= step * 0.57).all()  # half a step, and float16 rounds d


def test_q4_k_of_wide_groups(folder_of, tmp_path):
    changes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    folder = folder_of("llama-tied", **changes)
    config = json.loads((folder / "config.json").read_text())
    items, want = items_of(folder, Scheme(4, False, 256))
    fmt.write(items.items(), config, folder, tmp_path / "m.gguf")
    model = fmt.read(tmp_path / "m.gguf")
    assert model.file.tensors["blk.1.attn_q.weight"].kind == "Q4_K"
    for key, value in model.items():
        if isinstance(value, QuantWeight):
            assert value.same_as(items[key]) is None, key
            close(value.dequantize(), want[f"{key}.weight"], key)


def test_llama3_frequencies_equal_transformers(folder_of, tmp_path):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    config = AutoConfig.for_model("llama", hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    (factors,) = _gguf_arch.extra_tensors(config.to_dict()).values()
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / (500000.0 ** (torch.arange(0, 64, 2) / 64))
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-6, atol=0)
    assert factors.min() == 1 and factors.max() == 8 and ((factors > 1) & (factors < 8)).any()


def test_longrope_factors_and_scale():
    config = {"model_type": "phi3", "max_position_embeddings": 4096, "original_max_position_embeddings": 1024,
              "rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.5]},
              "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8,
              "rms_norm_eps": 1e-5, "vocab_size": 4, "sliding_window": 7}  # fmt: skip
    extra = _gguf_arch.extra_tensors(config)
    assert extra["rope_factors_short.weight"].tolist() == [1.0, 1.5]
    keys = _gguf_arch.metadata(config, _gguf_arch.spec_of("phi3"))
    assert keys["phi3.rope.scaling.attn_factor"] == pytest.approx(math.sqrt(1 + 2 / 10))
    assert (
        keys["phi3.rope.scaling.original_context_length"] == 1024
        and keys["phi3.attention.sliding_window"] == 7
    )


def test_permutation_is_the_documented_one():
    rows = torch.arange(16).reshape(16, 1)
    want = rows.numpy().reshape(2, 2, 4, 1).swapaxes(1, 2).reshape(16, 1)  # 2 heads of 8
    assert torch.equal(rows[_gguf_arch.permutation(16, 2)], torch.from_numpy(want.copy()))


@pytest.mark.parametrize("scheme, columns, words", [
    (Scheme(4, True, 24), 96, "group 24"), (Scheme(4), 100, "100 columns"), (Scheme(3), 64, "W3A16"),
    (Scheme(8, False), 64, "W8A16 channel asym"), (Scheme(8, activation="int8"), 64, "activation"),
])  # fmt: skip
def test_refuses_schemes(scheme, columns, words):
    assert words in fmt.why_not(scheme, 32, columns)


def test_rounding_is_told():
    assert fmt.rounding(Scheme(4, True, 32), 64) == 0.0 == fmt.rounding(Scheme(4, False, 256), 512)
    assert 0 < fmt.rounding(Scheme(4, False, 128), 512) < 0.01


def test_refusals_leave_nothing_behind(folder_of, tmp_path):
    folder = folder_of("llama")
    config = json.loads((folder / "config.json").read_text())
    items, _ = items_of(folder, None)
    out = tmp_path / "m.gguf"
    cases = [
        ({"model_type": "mamba"}, {}, "model type 'mamba'"),
        ({"vocab_size": 20}, {}, "embedding 20 rows"),
        ({}, {"model.layers.0.mlp.router.weight": torch.ones(2, 2)}, "router.weight has no name"),
        ({}, {"model.norm.weight": torch.ones(64, dtype=torch.int64)}, "torch.int64"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, {}, "rope scaling 'dynamic'"),
    ]
    for changes, extra, words in cases:
        with pytest.raises(CannotStore, match=words):
            fmt.write((items | extra).items(), config | changes, folder, out)
        assert list(tmp_path.iterdir()) == []
    gemma = json.loads((folder_of("gemma3", **GEMMA) / "config.json").read_text())
    spec = _gguf_arch.spec_of("gemma3_text")
    for changes, words in (
        ({"query_pre_attn_scalar": 24}, "query_pre_attn_scalar 24"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types differ"),
    ):
        with pytest.raises(CannotStore, match=words):
            _gguf_arch.metadata(gemma | changes, spec)


def test_refuses_foreign_architectures(tmp_path):
    with _gguf_file.Writer(tmp_path / "m.gguf") as file:
        file.add("token_embd.weight", "F32", (1, 1), b"1234")
        file.finish({"general.architecture": "rwkv7"})
    with pytest.raises(CannotRead, match="architecture 'rwkv7' are not read"):
        fmt.read(tmp_path / "m.gguf")
