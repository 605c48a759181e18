"""The command line: help is cheap, mistakes are one sentence and exit code 2, and the whole path works."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from quantkit.cli import COMMANDS, cli, main
from quantkit.commands.quantize import default_output
from quantkit.recipe import Recipe


def run(*args: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


@pytest.fixture(scope="module", autouse=True)
def models_are_made_first(twin_folder):
    """Saving a model prints a progress bar, which must not end up in the output that a test reads."""
    for name in ("llama", "llama-tied"):
        twin_folder(name)


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom quantkit.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert not e.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name):
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.parametrize(
    "args, words",
    [
        (["quantise", "x"], "no command 'quantise': did you mean 'quantize'?"),
        (["quantize", "nowhere"], "neither a folder, nor a .gguf file, nor a hub id"),
        (["quantize", "nowhere.gguf"], "nowhere.gguf does not exist"),
        (["plan", "MODEL", "--method", "gtpq"], "unknown solver 'gtpq': did you mean 'gptq'?"),
        (["plan", "MODEL", "--recipe", "balancd"], "did you mean 'balanced'"),
        (["plan", "MODEL", "--format", "gpt"], "unknown format 'gpt': did you mean 'gptq'"),
        (["plan", "MODEL", "--group-size", "7"], "group size 7 must be 0"),
        (["plan", "MODEL", "--bits", "5"], "'5' is not one of"),
        (["plan", "MODEL", "--activations", "int8", "--bits", "4"], "int8 activations go with 8-bit"),
        (["quantize", "MODEL", "--calib", "nofile.txt", "--seq-len", "64", "-o", "OUT"], "nofile.txt"),
        (["quantize", "MODEL", "--seq-len", "5000", "-o", "OUT"], "longer than the model's context of 256"),
        (["eval", "MODEL", "--corpus", "nothing"], "neither a file nor one of heldout"),
        (["inspect", "nowhere"], "is not a folder"),
        (["export", "nowhere", "--format", "gptq"], "is not a folder"),
        (["export", "MODEL", "--format", "gptq"], "is not quantized; use `quantkit quantize"),
        (["verify", "nowhere"], "does not exist"),
        (["verify", "MODEL", "--runtime", "vlm"], "did you mean 'vllm'"),
        (["card", "MODEL"], "has no quantkit.json"),
        (["push", "MODEL", "name"], "write owner/name"),
        (["plan", "MODEL", "--for", "vlm"], "no rules for runtime 'vlm'"),
        (["recipes", "show", "fasst"], "did you mean 'fast'"),
    ],
)
def test_mistakes_are_one_sentence(args, words, twin_folder, tmp_path, capsys):
    model = str(twin_folder("llama"))
    args = [model if a == "MODEL" else str(tmp_path / "o") if a == "OUT" else a for a in args]
    code, _, err = run(*args, capsys=capsys)
    assert code == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_hub_id_offline_says_what_is_missing(capsys):
    code, _, err = run("quantize", "no-such-owner/no-such-model", capsys=capsys)
    assert code == 2 and "no folder here, it is not in the hub cache" in err


def test_debug_shows_the_traceback(twin_folder):
    done = subprocess.run(
        [sys.executable, "-m", "quantkit.cli", "--debug", "inspect", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_quantize_plan_inspect_eval_together(twin_folder, calib_file, tmp_path, capsys):
    model, out = str(twin_folder("llama-tied")), tmp_path / "q4"
    shared = ["--group-size", "32", "--calib", str(calib_file), "--samples", "6", "--seq-len", "48"]
    code, text, _ = run("plan", model, *shared, "--json", capsys=capsys)
    planned = json.loads(text)
    assert code == 0 and planned["bits_per_weight"] == pytest.approx(4.5)
    code, text, err = run("quantize", model, *shared, "-o", str(out), capsys=capsys)
    assert code == 0 and text.strip() == str(out)
    assert "verified" in err and "relative output error" in err
    assert (out / "model.safetensors").stat().st_size == planned["output_bytes"]
    code, text, _ = run("inspect", str(out), "--modules", capsys=capsys)
    assert code == 0 and "compressed-tensors; 14 quantized modules" in text
    rows = tmp_path / "rows.jsonl"
    args = ["eval", str(out), "--against", model, "--windows", "2", "--seq-len", "64", "--json", str(rows)]
    code, text, _ = run(*args, capsys=capsys)
    found = {r["metric"]: r for r in map(json.loads, rows.read_text().splitlines())}
    assert code == 0 and found["kl"]["value"] > 0 and "perplexity" in found and found["kl"]["data_sha256"]
    code, _, err = run("quantize", model, *shared, "-o", str(out), capsys=capsys)
    assert code == 2 and "--overwrite" in err


def test_a_model_is_at_zero_distance_from_itself(twin_folder, tmp_path, capsys):
    model, rows = str(twin_folder("llama")), tmp_path / "rows.jsonl"
    code, _, _ = run(
        "eval",
        model,
        "--against",
        model,
        "--windows",
        "2",
        "--seq-len",
        "64",
        "--json",
        str(rows),
        capsys=capsys,
    )
    found = {r["metric"]: r["value"] for r in map(json.loads, rows.read_text().splitlines())}
    assert code == 0 and found["kl"] == pytest.approx(0, abs=1e-7) and found["top1_agreement"] == 1


def test_default_output_name():
    assert default_output("some/SmolLM2-135M", Recipe()) == "SmolLM2-135M-w4"
    assert default_output("x/model.gguf", Recipe()) == "model-w4"
