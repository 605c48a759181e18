"""Conversion between formats: every pair that can be exact is, everything else is refused with what it would cost."""

import json

import pytest
import torch
import twins
from safetensors.torch import load_file, save_file

from quantkit.convert import TARGETS, compare, export
from quantkit.errors import UserError, VerificationError
from quantkit.load import iterate
from quantkit.opened import open_any
from quantkit.quantize import quantize
from quantkit.qweight import QuantWeight
from quantkit.recipe import Recipe, Rule, WeightFormat
from quantkit.regroup import difference, split_groups, with_zero
from quantkit.scheme import Scheme
from tests.formats.cases import random_qweight

pytest.importorskip("gguf", reason="transformers reads GGUF tokenizers through it")
WIDE = {"hidden_size": 64, "intermediate_size": 192}


@pytest.fixture(scope="module")
def made(twin_folder, tmp_path_factory):
    """made("llama", bits=4) -> a folder quantized to compressed-tensors without data."""
    cache = {}

    def get(name: str = "llama", **fields):
        key = (name, tuple(sorted(fields.items())))
        if key not in cache:
            rule = Rule(weights=WeightFormat(**{"group": 32, **fields}), solver="rtn")
            out = tmp_path_factory.mktemp("ct") / f"{name}-ct"
            cache[key] = quantize(str(twin_folder(name, **WIDE)), out, Recipe(rules=(rule,))).folder
        return cache[key]

    return get


def contents(path) -> dict:
    return dict(open_any(path).items())


def assert_equal(a, b):
    """Equal weights, however grouped; tensors equal as numbers. A tied head may be left out."""
    a, b = contents(a), contents(b)
    assert set(a) == set(b)
    for name, value in a.items():
        if isinstance(value, QuantWeight):
            assert difference(value, b[name]) is None, f"{name}: {difference(value, b[name])}"
            assert torch.equal(value.dequantize(), b[name].dequantize()), name
        else:
            assert torch.equal(value.float(), b[name].float()), name


@pytest.mark.parametrize("first", TARGETS)
@pytest.mark.parametrize("second", TARGETS)
def test_every_pair_keeps_the_weights(first, second, made, tmp_path):
    start = made()
    one, two = (tmp_path / (f"{f}.gguf" if f == "gguf" else f) for f in ("a" + first, "b" + second))
    one = one if first != "gguf" else tmp_path / "a.gguf"
    two = two if second != "gguf" else tmp_path / "b.gguf"
    if first == "compressed-tensors":
        one = start
    else:
        export(start, first, one)
    if first == second:
        with pytest.raises(UserError, match="already is"):
            export(one, second, two)
        return
    done = export(one, second, two)
    assert done.rounding == "" and done.modules == 21
    assert_equal(start, two)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-tied", "gemma3", "llama-biased", "phi3"])
def test_architectures_through_gguf_and_back(name, twin_folder, tmp_path):
    if name == "gemma3":  # llama.cpp has the pattern of its windows in code
        layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
        source = twins.save(name, tmp_path / "gemma", dtype=torch.bfloat16, **layers)
    else:
        source = twin_folder(name)
    recipe = Recipe(rules=(Rule(weights=WeightFormat(group=32), solver="rtn"),))
    folder = quantize(str(source), tmp_path / "ct", recipe).folder
    export(folder, "gguf", tmp_path / "m.gguf")
    export(tmp_path / "m.gguf", "compressed-tensors", tmp_path / "back")
    before, after = contents(folder), contents(tmp_path / "back")
    assert set(before) - set(after) <= {"lm_head.weight"}
    for name_, value in after.items():
        if isinstance(value, QuantWeight):
            assert difference(before[name_], value) is None
        else:  # gemma's norms are stored with 1 added
            torch.testing.assert_close(value.float(), before[name_].float(), rtol=0, atol=1e-6)


def test_groups_are_split_where_the_target_needs_it():
    q = random_qweight(32, 128, Scheme(4, True, 0, "float16"))
    for group in (64, 32):
        finer = split_groups(q, group)
        assert finer.scale.shape == (32, 128 // group) and torch.equal(finer.dequantize(), q.dequantize())
        assert difference(q, finer) is None
    with pytest.raises(ValueError, match="cannot be split"):
        split_groups(random_qweight(8, 96, Scheme(4, True, 32)), 64)
    assert torch.equal(with_zero(q).dequantize(), q.dequantize()) and difference(q, with_zero(q)) is None
    other = QuantWeight(q.scheme, q.codes ^ 1, q.scale)
    assert "codes differ" in difference(q, other)


def test_awq_gets_one_group_size(made, twin_folder, tmp_path):
    rules = (
        Rule(match="*down_proj", weights=WeightFormat(group=64), solver="rtn"),
        Rule(weights=WeightFormat(group=32), solver="rtn"),
    )
    folder = quantize(str(twin_folder("llama", **WIDE)), tmp_path / "mixed", Recipe(rules=rules)).folder
    done = export(folder, "awq", tmp_path / "awq")
    assert json.loads((tmp_path / "awq/config.json").read_text())["quantization_config"]["group_size"] == 32
    assert any("one group size" in note for note in done.notes)
    assert_equal(folder, tmp_path / "awq")


def test_rounding_is_refused_with_its_size_and_allowed_on_request(made, tmp_path):
    folder = made(symmetric=False)
    with pytest.raises(UserError, match=r"largest error 0\.00\d+ of a step.*--allow-rounding"):
        export(folder, "gguf", tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())
    done = export(folder, "gguf", tmp_path / "a.gguf", allow_rounding=True)
    assert "Q4_1 offsets of " in done.rounding and "of a step in model.layers" in done.rounding


@pytest.mark.parametrize(
    "fields, target, words",
    [
        ({"bits": 3}, "awq", "4-bit"),
        ({"bits": 3}, "gguf", "exact blocks"),
        ({"bits": 8, "symmetric": False}, "gguf", "exact blocks"),
        ({"bits": 8, "group": 0, "activation": "int8"}, "gptq", "weight-only"),
        ({"group": 8}, "gptq", "group sizes"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(fields, target, words, made, tmp_path):
    out = tmp_path / ("x.gguf" if target == "gguf" else "x")
    with pytest.raises(UserError, match=words) as e:
        export(made(**fields), target, out)
    assert "21 of 21 weights" in str(e.value) and not list(tmp_path.iterdir())


def test_float32_scales_are_refused_where_they_are_not_exact(made, tmp_path):
    folder = tmp_path / "f32"
    export(made(), "gptq", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: (t.float() * (1 + 2**-14) if n.endswith(".scales") else t) for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"scales of 21 weights rounded to float16, largest error"):
        export(folder, "awq", tmp_path / "awq")
    assert "largest error" in export(folder, "awq", tmp_path / "awq", allow_rounding=True).rounding


def test_requests_that_make_no_sense(made, twin_folder, tmp_path):
    with pytest.raises(UserError, match="did you mean 'gptq'"):
        export(made(), "gtpq", tmp_path / "x")
    with pytest.raises(UserError, match=r"ending in \.gguf"):
        export(made(), "gguf", tmp_path / "x")
    with pytest.raises(UserError, match="is not quantized"):
        export(twin_folder("llama"), "gptq", tmp_path / "x")
    export(made(), "gptq", tmp_path / "x")
    with pytest.raises(UserError, match="--overwrite"):
        export(made(), "gptq", tmp_path / "x")
    export(made(), "gptq", tmp_path / "x", overwrite=True)


def test_a_wrong_output_is_noticed(made, tmp_path):
    """The reading back is no formality: another weight in the written folder is found."""
    from quantkit import plugins
    from quantkit.convert import _Survey

    export(made(), "gptq", tmp_path / "x")
    opened = open_any(made())
    survey = _Survey(opened, plugins.load("formats", "gptq"), False, False)
    compare(opened, survey, tmp_path / "x")
    tensors = load_file(tmp_path / "x/model.safetensors")
    name = "model.layers.1.mlp.up_proj.qweight"
    tensors[name][0, 0] ^= 1
    save_file(tensors, tmp_path / "x/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.up_proj"):
        compare(opened, survey, tmp_path / "x")


def test_manifest_and_side_files(made, tmp_path):
    export(made(), "gptq", tmp_path / "x")
    manifest = json.loads((tmp_path / "x/quantkit.json").read_text())
    assert manifest["converted_from"]["format"] == "compressed-tensors" and manifest["recipe"]["rules"]
    assert str(tmp_path) not in (tmp_path / "x/quantkit.json").read_text()
    assert (tmp_path / "x/chat_template.jinja").read_text() == twins.CHAT_TEMPLATE
    assert (tmp_path / "x/quantize_config.json").is_file() and "gptq" in (
        tmp_path / "x/README.md"
    ).read_text()


def test_float16_scales_ask_for_a_float16_model(made, tmp_path):
    """Scales that bfloat16 cannot hold would be rounded by every loader of a bfloat16 model."""
    export(made(), "gptq", tmp_path / "a")
    tensors = load_file(tmp_path / "a/model.safetensors")
    odd = {n: (t * 1.001 if n.endswith(".scales") else t) for n, t in tensors.items()}
    save_file(odd, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    done = export(tmp_path / "a", "compressed-tensors", tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text())["dtype"] == "float16"
    assert any("float16" in n for n in done.notes)
    scales = [v.scale.dtype for _, v in iterate(tmp_path / "b") if isinstance(v, QuantWeight)]
    assert set(scales) == {torch.float16}
