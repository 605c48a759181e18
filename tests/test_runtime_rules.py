"""The runtime lint: every row of the design notes' table, tensor-parallel shapes, fused sets."""

from __future__ import annotations

import pytest

from quantkit.errors import UserError
from quantkit.runtime_rules import READS, RULES, lint
from quantkit.scheme import Scheme

FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
SYM, ASYM, W8, W8A8 = (
    Scheme(4, True, 128),
    Scheme(4, False, 128),
    Scheme(8, True, 128),
    Scheme(8, activation="int8"),
)
W3 = Scheme(3, True, 128)


def block(scheme, index=0, **other):
    shapes = {"self_attn.q_proj": (1024, 1024), "self_attn.k_proj": (256, 1024), "self_attn.v_proj": (256, 1024),
              "self_attn.o_proj": (1024, 1024), "mlp.gate_proj": (2816, 1024), "mlp.up_proj": (2816, 1024),
              "mlp.down_proj": (1024, 2816)}  # fmt: skip
    return {
        f"model.layers.{index}.{n}": (other.get(n.rpartition(".")[2], scheme), s) for n, s in shapes.items()
    }


# (runtime, format, scheme) -> a word of the refusal, or None: checkpoint-formats.md section 9
TABLE = [
    ("vllm", "gptq", SYM, None), ("vllm", "gptq", W8, None), ("vllm", "gptq", ASYM, "symmetric 4 or 8"),
    ("vllm", "gptq", W3, "symmetric 4 or 8"), ("vllm", "awq", ASYM, None), ("vllm", "compressed-tensors", SYM, None),
    ("vllm", "compressed-tensors", ASYM, None), ("vllm", "compressed-tensors", W8A8, None),
    ("vllm", "compressed-tensors", W3, "no kernel"), ("vllm", "compressed-tensors", Scheme(8, False), "zero points"),
    ("vllm", "compressed-tensors", Scheme(4, True, 16), "rows, not 16"), ("vllm", "gguf", SYM, "does not read"),
    ("vllm-cpu", "gptq", SYM, None), ("vllm-cpu", "gptq", ASYM, "symmetric 4 bits"), ("vllm-cpu", "gptq", W8, "symmetric 4 bits"),
    ("vllm-cpu", "awq", ASYM, None), ("vllm-cpu", "compressed-tensors", ASYM, None),
    ("vllm-cpu", "compressed-tensors", W8A8, None), ("vllm-cpu", "compressed-tensors", W8, "4 bits only"),
    ("sglang", "gptq", SYM, None), ("sglang", "gptq", ASYM, "symmetric"), ("sglang", "gptq", Scheme(4, True, 16), "not 16"),
    ("sglang", "compressed-tensors", W8, None), ("sglang", "compressed-tensors", W3, "no kernel"), ("sglang", "gguf", SYM, None),
    ("tgi", "gptq", SYM, None), ("tgi", "gptq", W3, None), ("tgi", "gptq", ASYM, "as v1"), ("tgi", "compressed-tensors", W3, "no kernel"),
    ("transformers", "gptq", SYM, None), ("transformers", "gptq", ASYM, None), ("transformers", "gptq", Scheme(4), "gptq_torch"),
    ("transformers", "compressed-tensors", SYM, None), ("transformers", "compressed-tensors", W8A8, None),
    ("transformers", "compressed-tensors", ASYM, "dequantize=True"), ("transformers", "gguf", SYM, None),
    ("tensorrt-llm", "compressed-tensors", W8A8, "none that quantkit writes"), ("tensorrt-llm", "awq", ASYM, "does not read"),
    ("llama.cpp", "gguf", SYM, None), ("llama.cpp", "gguf", ASYM, None), ("llama.cpp", "gguf", W3, "cannot hold it"),
    ("llama.cpp", "gptq", SYM, "it reads gguf"),
]  # fmt: skip


@pytest.mark.parametrize("runtime, format, scheme, words", TABLE)
def test_table(runtime, format, scheme, words):
    found = lint(runtime, format, block(scheme), FUSED)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1 and words in found[0]


def test_every_rule_can_refuse():
    """No rule is dead: each one is the reason of some refusal among the cases tried here."""
    schemes = [Scheme(b, s, g) for b in (2, 3, 4, 8) for s in (True, False) for g in (0, 16, 32, 128)] + [
        W8A8
    ]
    odd = {
        "model.layers.0.mlp.up_proj": (40, 48),
        "lm_head": (1024, 1024),
        "m.experts.0.w1": (64, 128),
        "m.down_proj": (96, 1152),
    }
    spoken = set()
    for runtime, (formats, _) in READS.items():
        for format in formats:
            for scheme in schemes:
                for tp in (1, 2, 3, 7):
                    modules = {m: (scheme, s) for m, s in odd.items()}
                    spoken.update(s for s in lint(runtime, format, modules, (), tp))
    for rule in RULES:
        pieces = [p for p in rule.sentence.replace("}", "{").split("{")[::2] if p]
        hits = [
            s for s in spoken if s.split(": ", 1)[1].startswith(rule.runtime) and all(p in s for p in pieces)
        ]
        assert hits, f"{rule.runtime}: {rule.sentence}"


def test_tensor_parallel_shapes():
    # down_proj has 2816 = 22 * 128 inputs: two ranks get 11 groups each, four get 5.5
    assert lint("vllm", "awq", block(ASYM), FUSED, tp=2) == []
    (found,) = lint("vllm", "awq", block(ASYM), FUSED, tp=4)
    assert "down_proj" in found and "each of 4 ranks 704 inputs, not whole groups of 128" in found
    assert lint("vllm", "awq", block(ASYM.with_(group=64)), FUSED, tp=4) == []
    (found,) = lint("sglang", "compressed-tensors", {"m.up_proj": (SYM, (1000, 1024))}, (), tp=3)
    assert "cannot cut the 1000x1024 weight into 3" in found
    # fewer key heads than ranks: every rank has a copy
    assert lint("vllm", "awq", {"m.k_proj": (ASYM, (104, 1024))}, (), tp=16) == []


def test_fused_sets_must_agree():
    (found,) = lint("vllm", "compressed-tensors", block(SYM, k_proj=None), FUSED)
    assert "q_proj/self_attn.k_proj" in found and "unquantized" in found and "one scheme" in found
    assert len(lint("vllm-cpu", "compressed-tensors", block(SYM, k_proj=ASYM, up_proj=W8A8), FUSED)) == 2
    assert lint("vllm", "compressed-tensors", block(SYM, down_proj=W8, o_proj=None), FUSED) == []
    assert lint("transformers", "compressed-tensors", block(SYM, k_proj=None), FUSED) == []
    assert lint("vllm", "compressed-tensors", block(None), FUSED) == []
    experts = {f"l.0.mlp.experts.{e}.up_proj": (s, (128, 128)) for e, s in enumerate((SYM, W8))}
    assert "l.0.mlp.experts" in lint("vllm", "compressed-tensors", experts)[0]


def test_like_refusals_are_one_sentence():
    modules = block(ASYM) | block(ASYM, 1)
    (found,) = lint("vllm", "gptq", modules, FUSED)
    assert found.startswith("model.layers.0.self_attn.q_proj and 13 more: vllm takes GPTQ")


def test_several_schemes_in_gptq():
    assert any(
        "ignores 'dynamic'" in s for s in lint("transformers", "gptq", block(SYM, down_proj=W8), FUSED)
    )
    assert lint("vllm", "gptq", block(SYM, down_proj=W8), FUSED) == []


def test_unknown_runtime_gets_its_neighbours():
    with pytest.raises(UserError, match="did you mean 'vllm'"):
        lint("vlm", "gptq", {})
