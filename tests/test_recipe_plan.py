"""Recipes and plans: what is refused, with which words, and that the plan is exact."""

import json

import pytest
import torch

from quantkit import recipe as recipes
from quantkit.errors import UserError
from quantkit.plan import fit_group
from quantkit.quantize import prepare
from quantkit.scheme import Scheme, SchemeError


def parse(**data):
    return recipes.parse(data, "test.yaml")


def rule(solver="rtn", match="*", **weights):
    return {"match": match, "weights": {"group": 32, **weights}, "solver": solver}


@pytest.mark.parametrize(
    "data, words",
    [
        ({"rulez": []}, r"unknown key 'rulez': did you mean 'rules'"),
        ({"rules": [{"weights": {"bitz": 4}}]}, r"unknown key 'rules.0.weights.bitz': did you mean 'bits'"),
        ({"calib": {"sample": 4}}, r"unknown key 'calib.sample': did you mean 'samples'"),
        ({"rules": [rule("gptqq")]}, r"unknown solver 'gptqq': did you mean 'gptq'"),
        (
            {"rules": [{**rule("gptq"), "options": {"dampings": 1}}]},
            r"solver 'gptq' has no option 'dampings': did you mean 'damping'",
        ),
        ({"rules": [rule(bits=5)]}, r"rule 1 .*5-bit weights are not supported"),
        ({"rules": [rule(group=33)]}, r"group size 33 must be 0"),
        ({"export": {"format": "gptx"}}, r"unknown format 'gptx': did you mean 'gptq'"),
        ({"rewrites": [{"name": "awk"}]}, r"unknown rewrite 'awk': did you mean 'awq'"),
        ({"rules": [rule(), rule(match="*.q_proj")]}, r"rule 1 matches everything, so rule 2"),
        ({"calib": {"samples": 0}}, r"calib.samples"),
    ],
)
def test_recipe_mistakes_are_named(data, words):
    with pytest.raises(UserError, match=words):
        recipes.parse(data, "test.yaml")


def test_recipe_files(tmp_path):
    with pytest.raises(UserError, match="no recipe 'balansed'.*did you mean 'balanced'"):
        recipes.load("balansed")
    bad = tmp_path / "bad.yaml"
    bad.write_text("rules: [")
    with pytest.raises(UserError, match="not valid YAML"):
        recipes.load(str(bad))
    bad.write_text("- 1")
    with pytest.raises(UserError, match="a recipe is a mapping"):
        recipes.load(str(bad))
    for name, path in recipes.recipe_files().items():
        found = recipes.load(str(path))
        assert found.about and found.name == name
        assert recipes.parse(__import__("yaml").safe_load(recipes.dump(found)), "again") == found


@pytest.mark.parametrize(
    "columns, group, want", [(576, 128, 64), (896, 128, 128), (160, 128, 32), (72, 32, 0), (96, 64, 32)]
)
def test_group_that_does_not_divide_shrinks_and_says_so(columns, group, want):
    scheme, why = fit_group(Scheme(4, True, group), columns, "shrink")
    assert scheme.group == want
    assert bool(why) == (want != group)
    ragged, why = fit_group(Scheme(4, True, group), columns, "ragged")
    assert ragged.group == group and bool(why) == bool(columns % group)


def test_scheme_refusals():
    with pytest.raises(SchemeError, match="int8 activations go with 8-bit"):
        Scheme(4, True, 0, activation="int8")
    assert Scheme(4, True, 128).bits_per_weight(4096) == 4.125
    assert Scheme(4, False, 128).bits_per_weight(4096) == 4 + 20 / 128
    assert Scheme(4, True, 128).bits_per_weight(576) == 4 + 5 * 16 / 576


@pytest.mark.parametrize(
    "name, fmt",
    [
        *((n, "compressed-tensors") for n in ("llama", "qwen2-tied", "gemma3", "phi3")),
        *((n, "gptq") for n in ("llama", "qwen2-tied", "phi3")),  # the gemma twin has 48 outputs: not in gptq
    ],
)
def test_plan_names_every_linear_and_predicts_bytes(twin_folder, tmp_path, name, fmt):
    from quantkit.quantize import execute

    folder = twin_folder(name)
    job = prepare(str(folder), parse(rules=[rule()], export={"format": fmt}))
    linears = [n for n, m in job.model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    assert sorted(p.module for p in job.plan.layers) == sorted(linears)
    outcome = execute(job, tmp_path / "out")
    assert outcome.plan.output_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_rules_first_match_wins_and_kept_modules(twin_folder):
    recipe = parse(
        rules=[
            {"match": "*.down_proj", "weights": None},
            rule(match="re:model\\.layers\\.0\\.", bits=8),
            rule(match="*"),
        ]
    )
    plan = prepare(str(twin_folder("llama")), recipe).plan
    by = {p.module: p for p in plan.layers}
    assert by["model.layers.1.mlp.down_proj"].scheme is None
    assert by["model.layers.0.mlp.up_proj"].scheme.bits == 8
    assert by["model.layers.1.mlp.up_proj"].scheme.bits == 4
    assert "rule 2" in by["model.layers.0.mlp.up_proj"].reason


def test_pattern_that_matches_nothing_is_an_error(twin_folder):
    with pytest.raises(UserError, match=r"rule 1 \('\*\.w1'\) matches no linear.*model\.layers\.0"):
        prepare(str(twin_folder("llama")), parse(rules=[rule(match="*.w1"), rule()]))


def test_format_refusal_names_module_and_reason(twin_folder):
    weights = {"bits": 4, "group": 48, "fit": "ragged"}
    with pytest.raises(UserError, match=r"q_proj \(64x64\): format compressed-tensors cannot hold.*group 48"):
        prepare(str(twin_folder("llama")), parse(rules=[{"weights": weights, "solver": "rtn"}]))


def test_quantized_model_and_remote_code_are_refused(twin_folder, tmp_path):
    from quantkit.quantize import quantize

    quantize(str(twin_folder("llama")), tmp_path / "q", parse(rules=[rule()]))
    with pytest.raises(UserError, match=r"already quantized \(compressed-tensors\)"):
        prepare(str(tmp_path / "q"), parse(rules=[rule()]))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    del config["quantization_config"]
    config["auto_map"] = {"AutoModelForCausalLM": "x.Y"}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="--trust-remote-code"):
        prepare(str(tmp_path / "q"), parse(rules=[rule()]))


def test_recipe_that_quantizes_nothing(twin_folder):
    job_recipe = parse(rules=[{"match": "*", "weights": None}])
    with pytest.raises(UserError, match="quantizes nothing"):
        prepare(str(twin_folder("llama")), job_recipe)


def test_plan_reads_no_weights(twin_folder, monkeypatch):
    import quantkit.checkpoint as checkpoint

    def forbidden(info):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(checkpoint, "read_tensor", forbidden)
    prepare(str(twin_folder("llama")), parse(rules=[rule()]))
