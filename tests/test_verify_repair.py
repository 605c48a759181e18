"""Sabotage: each damage is caught and named by verify; what can be mended, repair mends."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit import runtimes
from quantkit.checks import swap_nibbles
from quantkit.cli import cli
from quantkit.convert import export
from quantkit.errors import UserError
from quantkit.formats import gptq
from quantkit.quantize import quantize
from quantkit.recipe import ExportSpec, Recipe, Rule, WeightFormat
from quantkit.repair import diagnose, repair
from quantkit.verify import (
    LlamaCppModel,
    compare_answers,
    compare_full,
    eight_bit_blocks,
    our_logprobs,
    prompts,
    verify,
)


@pytest.fixture(scope="module")
def base(twin_folder):
    return twin_folder("llama")


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    cache = {}

    def get(fmt="compressed-tensors", symmetric=True, keep=()):
        key = (fmt, symmetric, keep)
        if key not in cache:
            rules = [Rule(match=k, weights=None) for k in keep]
            rules.append(Rule(weights=WeightFormat(group=32, symmetric=symmetric), solver="rtn"))
            out = tmp_path_factory.mktemp("made") / "model"
            recipe = Recipe(rules=tuple(rules), export=ExportSpec(format=fmt))
            cache[key] = quantize(str(base), out, recipe).folder
        return cache[key]

    return get


@pytest.fixture
def copy(made, tmp_path):
    def get(*args, foreign=False, **kwargs):
        folder = tmp_path / "copy"
        shutil.copytree(made(*args, **kwargs), folder)
        if foreign:  # as another tool leaves it: no manifest
            (folder / "quantkit.json").unlink()
        return folder

    return get


def edit_config(folder, change):
    for name in ("config.json", "quantize_config.json"):
        file = folder / name
        if file.is_file():
            config = json.loads(file.read_text())
            change(config if name == "config.json" else {"quantization_config": config})
            file.write_text(json.dumps(config))


def edit_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def words(report) -> str:
    assert not report.sound
    return " | ".join(map(str, report.findings))


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_sound_folders_have_no_findings(fmt, symmetric, made, base):
    report = verify(made(fmt, symmetric), against=base)
    assert report.findings == [] and report.facts["least cosine with the base"] > 0.95


def test_a_truncated_file_is_named(copy):
    folder = copy()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    assert "model.safetensors is truncated or damaged" in words(verify(folder))


def test_a_dropped_shard_is_named(copy):
    folder = copy()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in (0, 1)}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    gone = folder / "model-00002-of-00002.safetensors"
    gone.unlink()
    assert gone.name in words(verify(folder))
    (
        folder / "model.safetensors.index.json"
    ).unlink()  # even the index is gone: the model's own list of tensors tells
    (folder / "quantkit.json").unlink()
    assert "in no weight file" in words(verify(folder))


@pytest.mark.parametrize(
    "fmt, tensor", [("gptq", "qweight"), ("awq", "qweight"), ("compressed-tensors", "weight_packed")]
)
def test_exchanged_nibbles_are_named_and_mended(fmt, tensor, copy, base, tmp_path):
    folder, name = copy(fmt), f"model.layers.1.mlp.up_proj.{tensor}"

    def change(tensors):
        tensors[name] = swap_nibbles(tensors[name])

    edit_tensors(folder, change)
    said = words(verify(folder))
    assert name in said and "nibbles of every byte are exchanged" in said
    assert repair(folder, [r for r in diagnose(folder) if r.possible], tmp_path / "mended") == []
    want, have = load_file(tmp_path / "mended/model.safetensors"), load_file(folder / "model.safetensors")
    assert (
        torch.equal(want[name], swap_nibbles(have[name])) and verify(tmp_path / "mended", against=base).sound
    )


def test_exchanged_nibbles_of_a_foreign_checkpoint_are_seen_against_its_base(copy, base, tmp_path):
    folder = copy("gptq", foreign=True)
    edit_tensors(
        folder, lambda t: t.update({n: swap_nibbles(v) for n, v in t.items() if n.endswith("qweight")})
    )
    assert verify(folder).sound  # nothing in the folder itself can tell
    assert "does not resemble" in words(verify(folder, against=base))
    remedies = diagnose(folder, base)
    assert [r.finding.code for r in remedies if r.possible] == ["nibbles"]
    assert repair(folder, remedies, tmp_path / "mended") == []
    assert verify(tmp_path / "mended", against=base).sound


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("against", [True, False])
def test_a_flipped_zero_point_convention_is_named_and_mended(symmetric, against, copy, base, tmp_path):
    folder = copy("gptq", symmetric, foreign=True)
    right = gptq.V1 if symmetric else gptq.V2
    wrong = gptq.V2 if symmetric else gptq.V1
    edit_config(folder, lambda c: c["quantization_config"].update(checkpoint_format=wrong, format=wrong))
    said = words(verify(folder))
    assert "zero-points" in said and repr(right) in said
    remedies = diagnose(folder, base if against else None)
    assert repair(folder, [r for r in remedies if r.possible], tmp_path / "mended") == []
    config = json.loads((tmp_path / "mended/config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == right and verify(tmp_path / "mended", against=base).sound


def test_zero_points_rewritten_in_our_own_folder_are_named(copy):
    folder, name = copy("gptq"), "model.layers.0.mlp.up_proj.qzeros"
    edit_tensors(folder, lambda t: t.update({name: t[name] + 0x11111111}))
    said = words(verify(folder))
    assert name in said and "convention of GPTQ v2 instead of v1" in said


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq", "awq"])
def test_a_wrong_group_size_is_named_and_mended(fmt, copy, base, tmp_path):
    folder = copy(fmt, foreign=True)

    def change(config):
        q = config["quantization_config"]
        (q["config_groups"]["group_0"]["weights"] if "config_groups" in q else q)["group_size"] = 16

    edit_config(folder, change)
    said = words(verify(folder))
    assert "group-size" in said and "says group size 16" in said and "groups of 32" in said
    assert repair(folder, diagnose(folder), tmp_path / "mended") == []
    assert verify(tmp_path / "mended", against=base).findings == []


@pytest.mark.parametrize("name, flag", [("llama", True), ("llama-tied", False)])
def test_a_wrong_tie_flag_is_named_and_mended(name, flag, twin_folder, tmp_path):
    recipe = Recipe(rules=(Rule(weights=WeightFormat(group=32), solver="rtn"),))
    folder = quantize(str(twin_folder(name)), tmp_path / "q", recipe).folder
    (folder / "quantkit.json").unlink()
    edit_config(folder, lambda c: c.update(tie_word_embeddings=flag))
    assert "tie-flag" in words(verify(folder))
    assert repair(folder, diagnose(folder), tmp_path / "mended") == []
    assert json.loads((tmp_path / "mended/config.json").read_text())["tie_word_embeddings"] is not flag


@pytest.mark.parametrize(
    "fmt, key", [("compressed-tensors", "ignore"), ("gptq", "dynamic"), ("awq", "modules_to_not_convert")]
)
def test_an_incomplete_ignore_list_is_named_and_mended(fmt, key, copy, tmp_path):
    folder = copy(fmt, keep=("*down_proj",), foreign=True)

    def change(config):
        q = config["quantization_config"]
        q[key] = {} if key == "dynamic" else ["lm_head"] if key == "ignore" else None
        q.pop("modules_in_block_to_quantize", None)

    edit_config(folder, change)
    said = words(verify(folder))
    assert "ignore-list: model.layers.0.mlp.down_proj and 2 more" in said
    assert repair(folder, diagnose(folder), tmp_path / "mended") == []


def test_missing_files_and_template_are_named_and_taken_from_the_base(copy, base, tmp_path):
    folder = copy()
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    said = words(verify(folder))
    assert "chat-template: chat_template.jinja is promised" in said and "generation_config.json" in said
    assert not [r for r in diagnose(folder) if r.possible]  # from nowhere nothing can be taken
    remedies = diagnose(folder, base)
    assert repair(folder, remedies, tmp_path / "mended") == []
    assert (tmp_path / "mended/chat_template.jinja").read_bytes() == (
        base / "chat_template.jinja"
    ).read_bytes()


def test_a_changed_side_file_and_a_damaged_manifest_are_named(copy):
    folder = copy()
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    assert "side-files: tokenizer_config.json was changed" in words(verify(folder))
    (folder / "quantkit.json").write_text("{")
    assert "not valid JSON" in words(verify(folder))


def test_a_plan_that_differs_is_named(copy):
    folder = copy()
    manifest = json.loads((folder / "quantkit.json").read_text())
    manifest["plan"][0]["scheme"]["group"] = 64
    manifest["plan"][1]["scheme"] = None
    (folder / "quantkit.json").write_text(json.dumps(manifest))
    said = words(verify(folder))
    assert (
        "q_proj is W4A16 g32 sym" in said and "k_proj is quantized in the files and not by the plan" in said
    )


def test_repair_explains_and_writes_only_with_yes(copy):
    folder = copy("gptq", foreign=True)
    edit_config(folder, lambda c: c["quantization_config"].update(group_size=16))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    run = CliRunner().invoke
    done = run(cli, ["repair", str(folder)])
    assert done.exit_code == 1 and "remedy: write group size 32" in done.output and "--yes" in done.output
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before and len(
        list(folder.parent.iterdir())
    ) == 1
    done = run(cli, ["repair", str(folder), "--yes"])
    assert done.exit_code == 0, done.output
    assert verify(folder.with_name("copy-repaired")).sound and not verify(folder).sound
    assert run(cli, ["repair", str(folder), "--yes", "--in-place"]).exit_code == 0
    assert verify(folder).sound and run(cli, ["repair", str(folder)]).exit_code == 0


def test_exit_codes(copy):
    folder, run = copy(), CliRunner().invoke
    done = run(cli, ["verify", str(folder)])
    assert done.exit_code == 0 and "sound" in done.output
    (folder / "chat_template.jinja").unlink()
    done = run(cli, ["verify", str(folder)])
    assert done.exit_code == 1 and "FAIL chat-template" in done.output and "not sound" in done.output


# -------------------------------------------------------------------------------------------------------- runtimes


def test_transformers_computes_what_we_compute(made):
    pytest.importorskip("compressed_tensors")
    report = verify(made(), "transformers")
    assert report.sound and report.facts["kl"] < 1e-9 and report.facts["same top token"] == 1


def test_a_runtime_that_refuses_is_a_finding_in_its_own_words(made):
    pytest.importorskip("compressed_tensors")
    report = verify(made(symmetric=False), "transformers")  # packed zero points are not read
    assert "transformers" in words(report) and "does not load it" in words(report)


def test_gguf_in_transformers(made, tmp_path):
    pytest.importorskip("gguf")
    export(made(), "gguf", tmp_path / "m.gguf")
    report = verify(tmp_path / "m.gguf", "transformers")
    assert report.sound and report.facts["kl"] < 1e-9
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:-4000])
    assert "truncated" in words(verify(tmp_path / "m.gguf"))


def answers_of(logprobs, ids, k=64):
    top = logprobs[:, :-1].topk(k)
    return [
        {
            "ids": top.indices[i].tolist(), "values": top.values[i].tolist(), "top": top.indices[i][:, 0].tolist(),
            "logprobs": logprobs[i, torch.arange(ids.shape[1] - 1), ids[i, 1:]].tolist(),
        }
        for i in range(len(ids))
    ]  # fmt: skip


def test_gate_on_likeliest_tokens(made, base):
    """The binned KL is nothing between equals, below the full one between others, and near it."""
    ids = prompts(base)
    ours, theirs = our_logprobs(made(), ids), our_logprobs(base, ids)
    assert abs(compare_answers(ours, answers_of(ours, ids), ids)["kl"]) < 1e-6
    full = compare_full(ours[:, :-1], theirs[:, :-1])["kl"]
    binned = compare_answers(ours, answers_of(theirs, ids, 300), ids)
    assert 0.8 * full < binned["kl"] <= full * 1.001 and binned["largest difference"] > 0


def test_a_runtime_that_computes_something_else_is_a_finding(made, base, monkeypatch):
    ids = prompts(base)
    monkeypatch.setattr(
        runtimes, "ask", lambda *_: {"version": "0", "prompts": answers_of(our_logprobs(base, ids), ids)}
    )
    assert "vllm loads it and computes something else: KL" in words(verify(made(), "vllm"))
    monkeypatch.setattr(
        runtimes, "ask", lambda *_: {"version": "0", "prompts": answers_of(our_logprobs(made(), ids), ids)}
    )
    assert verify(made(), "vllm").sound


def test_activations_in_blocks_are_rounded_as_ggml_does():
    from quantkit.formats import _gguf_blocks as blocks

    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    x[0, :32] = 0
    want = blocks.dequantize("x", "Q8_0", blocks.quantize_q8_0(x))
    assert torch.equal(eight_bit_blocks(x), want) and not torch.equal(want, x)


def test_llama_cpp_is_allowed_what_its_rounding_costs_and_no_more(made, base, monkeypatch):
    pytest.importorskip("gguf")
    ids = prompts(base)
    rounded = answers_of(our_logprobs(made(), ids, kind=LlamaCppModel), ids)
    monkeypatch.setattr(runtimes, "ask", lambda *_: {"version": "0", "prompts": rounded})
    report = verify(made(), "llama.cpp", gate=0.0)
    floor = report.facts["KL of rounded activations"]
    assert report.sound and 0 < floor < 0.01
    assert report.facts["kl"] <= floor * 1.05 and report.facts["allowed KL"] == pytest.approx(2 * floor)
    other = answers_of(our_logprobs(base, ids), ids)
    monkeypatch.setattr(runtimes, "ask", lambda *_: {"version": "0", "prompts": other})
    assert "llama.cpp loads it and computes something else" in words(verify(made(), "llama.cpp"))


def test_vllm_answers_in_bfloat16_where_float16_overflows(made, base, monkeypatch):
    ids = prompts(base)
    fine = answers_of(our_logprobs(made(), ids), ids)
    broken = [{**a, "logprobs": [float("nan")] * len(a["logprobs"])} for a in fine]
    asked = []

    def ask(runtime, subject, given, options=()):
        asked.append(options[-1])
        return {"version": "0", "prompts": broken if options[-1] == "float16" else fine}

    monkeypatch.setattr(runtimes, "ask", ask)
    report = verify(made(), "vllm")
    assert report.sound and asked == ["float16", "bfloat16"] and report.facts["computed in"] == "bfloat16"


def test_answers_of_a_runner():
    assert runtimes.parse("vllm", 'noise\n{"prompts": [], "version": "1"}\n', "", 0)["version"] == "1"
    with pytest.raises(runtimes.Refused, match="ValueError: no such scheme"):
        runtimes.parse("vllm", '{"error": "ValueError: no such scheme"}', "", 1)
    with pytest.raises(runtimes.Refused, match="killed by OutOfMemoryError"):
        runtimes.parse("vllm", "", "start\nkilled by OutOfMemoryError\nend\n", 137)


def test_a_missing_environment_says_how_to_make_it(made, monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTKIT_RUNTIMES", str(tmp_path))
    assert "setup.sh vllm" in words(verify(made(), "vllm"))
    with pytest.raises(UserError, match="did you mean 'vllm'"):
        verify(made(), "vlm")
