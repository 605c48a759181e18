"""The embedded default model, for real: fetched by package name, quantized, compared. Slow."""

import json

import pytest
import torch

from quantkit import recipe as recipes
from quantkit.default_model import default_model
from quantkit.load import load, load_tokenizer
from quantkit.quantize import quantize

pytestmark = [pytest.mark.slow, pytest.mark.realmodel]
PROMPT = "Water boils at one hundred degrees, and the three states of matter are"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    torch.set_num_threads(2)
    out = tmp_path_factory.mktemp("real") / "smollm2"
    recipe = recipes.load("gptq")
    calib = recipe.calib.model_copy(update={"samples": 16})
    quantize(str(default_model()), out, recipe.model_copy(update={"calib": calib}))
    return out


def test_layer_error_is_below_roundings_on_every_linear(quantized):
    modules = json.loads((quantized / "quantkit.json").read_text())["modules"]
    assert len(modules) == 210
    above = [m["module"] for m in modules if m["error"] >= m["baseline"]]
    assert not above


def test_plain_transformers_agrees_to_float_rounding(quantized):
    from transformers import AutoModelForCausalLM

    ids = load_tokenizer(quantized)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)(ids).logits
        ours = load(quantized, torch.float32)(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-5)


def test_bundled_calibration_text_is_large_enough_by_the_demo_tokenizer():
    from quantkit.calib import load_calibration

    data = load_calibration("default", load_tokenizer(default_model()), samples=10_000, seq_len=64, seed=0)
    assert data.ids.numel() >= 25_000
