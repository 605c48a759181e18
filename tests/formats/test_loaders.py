"""Folders written by hand from our tensors and loaded by plain transformers: its logits are those of our floats."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.formats import compressed_tensors as fmt
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from tests import twins
from tests.formats.test_gguf_format import rounded

pytest.importorskip("compressed_tensors", reason="transformers loads these files through compressed-tensors")

W4, W8A8 = Scheme(4, True, 32, "float16"), Scheme(8, True, 0, "float16", "int8")


def quantize_folder(folder, scheme_of, **config_fields):
    """Rewrite a twin's folder in place; returns the float weights that the tensors stand for."""
    tensors, want, quantized, kept, stored = load_file(folder / "model.safetensors"), {}, {}, [], {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        scheme = scheme_of(module) if ".layers." in name and tensor.dim() == 2 else None
        if scheme is None:
            stored[name] = want[name] = tensor
            if ".layers." in name and tensor.dim() == 2:
                kept.append(module)
            continue
        weight: QuantWeight = rounded(tensor, scheme)
        quantized[module], want[name] = weight, weight.dequantize()
    config = json.loads((folder / "config.json").read_text())
    quantization = fmt.config({m: q.scheme for m, q in quantized.items()}, kept, **config_fields)
    for module, weight in quantized.items():
        stored |= fmt.pack(module, weight, quantization)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return want


def logits_of(folder, **options):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(
            twins.token_ids()
        ).logits


def reference(name, want):
    model = twins.build(name)
    model.load_state_dict(want, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model(twins.token_ids()).logits


def mixed(module: str) -> Scheme | None:
    if module.endswith("k_proj"):
        return None
    return (
        Scheme(8, True, 0, "float16")
        if "down" in module
        else Scheme(4, True, 0, "float16")
        if "0" in module
        else W4
    )


CASES = {
    "W4 g32": lambda m: W4,
    "W8 channel": lambda m: Scheme(8, True, 0, "float16"),
    "W3 g32": lambda m: Scheme(3, True, 32, "float16"),
    "W2 g32": lambda m: Scheme(2, True, 32, "float16"),
    "several schemes and an exclusion": mixed,
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same(case, tmp_path):
    folder = twins.save("llama-tied", tmp_path)
    want = quantize_folder(folder, CASES[case], order="static" if case == "W4 g32" else None)
    got, expected = logits_of(folder), reference("llama-tied", want)
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (
        expected - reference("llama-tied", {})
    ).abs().max() > 0.01  # quantization is visible in these logits


def test_asymmetric_loads_dequantized(tmp_path):
    from transformers import CompressedTensorsConfig

    folder = twins.save("qwen2", tmp_path)
    want = quantize_folder(folder, lambda m: Scheme(4, False, 32, "float16"))
    got = logits_of(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    # the loader multiplies in the dtype of the scales
    expected = reference(
        "qwen2", {n: w.half().float() if ".layers." in n and w.dim() == 2 else w for n, w in want.items()}
    )
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_w8a8_loads_with_dynamic_activations(tmp_path):
    folder = twins.save("llama", tmp_path)
    want = quantize_folder(folder, lambda m: W8A8 if "mlp" in m else W4)
    got, weights_only = logits_of(folder), reference("llama", want)
    error = (got - weights_only).abs().max() / weights_only.abs().max()
    assert 1e-4 < error < 0.05  # 8-bit activations are in use, and change little
