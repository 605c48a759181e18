"""fit against real models and by hand; doctor finds a wrong kernel."""

import json

import pytest
import torch
import twins
from click.testing import CliRunner

from quantkit import doctor
from quantkit.cli import cli, main
from quantkit.fit import count, fit, weight_bytes
from quantkit.scheme import Scheme


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3", "gpt2", "mixtral", "qwen3-moe"])
def test_counts_are_those_of_the_real_model(name):
    model = twins.build(name)
    parameters = count(twins.config(name))
    assert parameters.total == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    tied = model.config.tie_word_embeddings
    assert (parameters.head == 0) == tied
    assert parameters.embedding == model.get_input_embeddings().weight.numel()


def test_bytes_and_rate_by_hand():
    config = twins.config("llama")
    parameters = count(config)
    linears = sum(r * c * n for r, c, n in parameters.linears)
    assert linears == 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160)
    held, read = weight_bytes(parameters, Scheme(4, True, 32))
    assert held == linears * 4.5 / 8 + 2 * (parameters.total - linears)
    assert held - read == 2 * twins.VOCAB * 64
    found = {(f.weights_name, f.cache_name): f for f in fit(config, 100, 2, 1e9)}
    one = found["bf16", "none"]
    assert one.cache == 2 * 100 * 3 * 2 * 16 * 2 * 2
    assert one.rate == pytest.approx(2 * 1e9 / (weight_bytes(parameters, None)[1] + one.cache))
    assert found["W4 g32", "int4"].cache < found["bf16", "int8"].cache < one.cache
    assert found["W4 g32", "int4"].rate > one.rate


def test_fit_of_a_bare_config(tmp_path):
    twins.config("llama").save_pretrained(tmp_path)
    args = ["fit", str(tmp_path / "config.json"), "--bandwidth", "1GB", "--context", "64", "--memory"]
    rows = json.loads(CliRunner().invoke(cli, [*args, "1GB", "--json"]).output)
    assert len(rows) == 12 and all(r["fits"] for r in rows)
    room = sorted(r["total"] for r in rows)[6]
    rows = json.loads(CliRunner().invoke(cli, [*args, str(int(room)), "--json"]).output)
    assert {r["fits"] for r in rows} == {True, False}
    args.append("1MB")
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0 and "parameters" in done.output


@pytest.mark.parametrize(
    "args, words",
    [
        (["MODEL"], "how much memory is there?"),
        (["MODEL", "--device", "L5"], "did you mean"),
        (["none.json", "--memory", "1GB"], "cannot read"),
    ],
)
def test_fit_mistakes(args, words, twin_folder, capsys):
    args = [str(twin_folder("llama")) if a == "MODEL" else a for a in args]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args])
    assert stop.value.code == 2 and words in " ".join(capsys.readouterr().err.split())


def test_doctor_reports_every_backend():
    done = CliRunner().invoke(cli, ["doctor", "--no-timing"])
    assert done.exit_code == 0, done.output
    for word in ("torch", "native library", "kernel cpu", "runtimes"):
        assert word in done.output


def test_doctor_finds_a_wrong_kernel(monkeypatch):
    class Wrong:
        why_not = staticmethod(lambda request: None)

        @staticmethod
        def prepare(weight, bias, request):
            right = doctor.reference.prepare(weight, bias, request)
            return lambda x: right(x) + 0.01 * torch.ones(weight.shape[0])

    class Right:
        why_not = staticmethod(lambda request: None)
        prepare = staticmethod(doctor.reference.prepare)

    monkeypatch.setattr(doctor, "backends", lambda: {"wrong": Wrong, "right": Right})
    checks = doctor.check_kernels()
    assert all(c.ok == (c.backend == "right") for c in checks) and len(checks) == 2 * len(doctor.SCHEMES)
    assert CliRunner().invoke(cli, ["doctor", "--no-timing"]).exit_code == 1
