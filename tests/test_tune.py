"""Tuning: gradients against autograd, and that it only ever helps."""

import json

import pytest
import torch
import torch.nn.functional as F

from quantkit import recipe as recipes
from quantkit.quantize import quantize
from quantkit.qweight import QuantWeight, round_scale
from quantkit.scheme import Scheme
from quantkit.tune import ScaledLinear, TuneOptions, Tuner
from quantkit.workdir import WorkFolder


def some_weight(scheme: Scheme, rows: int = 6, columns: int = 40, order=None) -> QuantWeight:
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=g)
    groups = scheme.groups(columns)
    scale = round_scale(0.2 * torch.rand(rows, groups, generator=g) + 0.1, scheme)
    scale[::2] *= -1 if scheme.symmetric else 1
    zero = None if scheme.symmetric else torch.randint(0, scheme.max_code + 1, (rows, groups), generator=g)
    return QuantWeight.from_float(weight, scale, zero, scheme, order)


@pytest.mark.parametrize(
    "scheme, order",
    [
        (Scheme(4, True, 8), None),
        (Scheme(4, False, 16), None),  # ragged: 40 = 16 + 16 + 8
        (Scheme(8, False, 0), None),
        (Scheme(2, True, 8), torch.randperm(40, generator=torch.Generator().manual_seed(2))),
    ],
)
def test_scaled_linear_value_and_gradients(scheme, order):
    qw = some_weight(scheme, order=order)
    layer = ScaledLinear(qw, bias=torch.randn(6))
    x = torch.randn(2, 5, 40, requires_grad=True)
    assert torch.allclose(layer(x), F.linear(x, qw.dequantize(), layer.bias), atol=1e-5)
    (layer(x) ** 2).sum().backward()
    by_x, by_theta = x.grad.clone(), layer.theta.grad.clone()

    theta = torch.zeros_like(layer.theta, requires_grad=True)
    x.grad = None
    zero = scheme.midpoint if qw.zero is None else qw.zero.float()[:, qw.columns_to_groups()]
    weight = (qw.codes.float() - zero) * (qw.scale.float() * (1 + theta))[:, qw.columns_to_groups()]
    (F.linear(x, weight, layer.bias) ** 2).sum().backward()
    assert torch.allclose(by_x, x.grad, rtol=1e-4, atol=1e-4)
    assert torch.allclose(by_theta, theta.grad, rtol=1e-4, atol=1e-3)
    assert layer.result().same_as(qw) is None


def test_loss_gradient_is_that_of_the_divergence(monkeypatch):
    import quantkit.tune as tune

    monkeypatch.setattr(tune, "HEAD_ROWS", 3)
    head, states, goal = torch.randn(11, 7), torch.randn(1, 8, 7, requires_grad=True), torch.randn(1, 8, 7)
    tuner = Tuner(lambda ids: states, torch.nn.Module(), head)
    kl, gradient = tuner.loss(states, goal)
    p, log_q = (goal @ head.T).softmax(-1), (states @ head.T).log_softmax(-1)
    want = (p * (p.log() - log_q)).sum(-1).mean()
    want.backward()
    assert kl == pytest.approx(want.item(), rel=1e-5)
    assert torch.allclose(gradient, states.grad, atol=1e-6)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "qwen2-tied"])
def test_tuning_lowers_held_out_divergence_and_keeps_codes(twin_folder, calib_file, tmp_path, name):
    folder = twin_folder(name)
    base = {
        "rules": [{"weights": {"bits": 3, "group": 32}, "solver": "rtn"}],
        "calib": {"source": str(calib_file), "samples": 12, "seq_len": 40},
    }
    quantize(str(folder), tmp_path / "plain", recipes.parse(base, "t"))
    said = []
    tuned = {**base, "tune": {"steps": 30, "lr": 5e-3, "held": 3, "every": 5}}
    quantize(str(folder), tmp_path / "tuned", recipes.parse(tuned, "t"), tell=said.append)
    report = json.loads((tmp_path / "tuned" / "quantkit.json").read_text())["tuning"]
    assert report["accepted"] and report["after"] < report["before"] and 0 < report["best_step"] <= 30
    assert any("held-out windows, kept" in s for s in said)
    from safetensors.torch import load_file

    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "tuned"))
    assert a.keys() == b.keys()
    packed = [n for n in a if n.endswith("weight_packed")]
    assert packed and all(torch.equal(a[n], b[n]) for n in packed), "codes must stay"
    assert any(not torch.equal(a[n], b[n]) for n in a if n.endswith("weight_scale"))
    assert all(a[n].dtype == b[n].dtype for n in a)


def test_tuning_that_does_not_help_changes_nothing():
    """With a learning rate that wrecks the model the start is kept."""
    qw = some_weight(Scheme(4, True, 8), rows=40)
    layer = torch.nn.Sequential(ScaledLinear(qw, None))
    embedding, goal_weight = torch.randn(50, 40), qw.dequantize()
    tuner = Tuner(lambda ids: layer(embedding[ids]), layer, torch.randn(30, 40))
    ids = torch.randint(0, 50, (8, 6))
    teacher = embedding[ids] @ goal_weight.T
    report = tuner.train(ids, teacher, TuneOptions(steps=5, lr=10.0, every=1), lambda *_: None)
    assert not report.accepted and report.before == pytest.approx(0, abs=1e-6)
    assert tuner.weights()["0"].same_as(qw) is None


def test_unfinished_tuning_does_not_count(tmp_path):
    from quantkit.workdir import BlockResult

    work = WorkFolder(tmp_path / "w", {"model": "x"})
    plain, other = some_weight(Scheme(4, True, 8)), some_weight(Scheme(2, True, 8))
    work.commit(0, BlockResult({"m": plain}, {}, []))
    work.commit_tuned(0, BlockResult({"m": other}, {}, []))
    assert work.load(0).weights["m"].same_as(plain) is None
    work.finish_tuning({"accepted": True})
    assert work.load(0).weights["m"].same_as(other) is None
    work.clear()
    assert not (tmp_path / "w").exists()
