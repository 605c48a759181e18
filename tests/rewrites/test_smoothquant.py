"""SmoothQuant's scale and its search."""

from __future__ import annotations

import pytest
import torch

from quantkit.rewrites.smoothquant import Rewrite, int8_tokens
from quantkit.scheme import Scheme

W8A8 = Scheme(8, activation="int8")


def test_scale_follows_the_paper():
    s = Rewrite.scale(torch.tensor([16.0, 1.0, 0.0]), torch.tensor([1.0, 4.0, 2.0]), 0.5)
    assert s.tolist() == [4.0, 0.5, 1.0]  # sqrt(16 / 1), sqrt(1 / 4), dead channel


def test_int8_tokens_has_one_scale_per_token():
    x = torch.tensor([[127.0, 1.4, -127.0], [1.27, 0.014, 0.0]])
    assert torch.allclose(int8_tokens(x), torch.tensor([[127.0, 1.0, -127.0], [1.27, 0.01, 0.0]]), atol=1e-6)


def test_loss_is_the_error_of_the_integer_product():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, 16, generator=generator), torch.randn(8, 16, generator=generator)
    s = torch.exp2(torch.rand(16, generator=generator))
    ws, xs = w * s, x / s
    step_w = (ws.abs().amax(1, keepdim=True) / 127.5).bfloat16().float()
    codes_w = torch.round(ws / step_w).clamp(-128, 127)
    step_x = xs.abs().amax(1, keepdim=True) / 127
    codes_x = torch.round(xs / step_x).clamp(-127, 127)
    expected = ((codes_x @ codes_w.T) * step_x * step_w.T - x @ w.T).square().sum()
    assert Rewrite.loss(x, s, [(w, W8A8)]) == pytest.approx(float(expected), rel=1e-3)


def test_outlier_channels_are_smoothed_and_the_error_falls():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(200, 64, generator=generator), torch.randn(32, 64, generator=generator)
    x[:, 5] *= 60
    peak, top = w.abs().amax(0), x.abs().amax(0)
    alpha, note = Rewrite()._search(x, top, peak, [(w, W8A8)])
    smoothed = Rewrite.loss(x, Rewrite.scale(top, peak, alpha), [(w, W8A8)])
    plain = Rewrite.loss(x, torch.ones(64), [(w, W8A8)])
    assert alpha in Rewrite().alphas and "-" in note
    assert smoothed < 0.2 * plain


def test_no_alpha_is_taken_when_none_helps():
    """One-hot inputs and weights of one size: int8 is exact as it stands."""
    x, w = torch.eye(8) * 127, torch.eye(8)
    assert Rewrite()._search(x, x.abs().amax(0), w.abs().amax(0), [(w, W8A8)])[0] == 0.0
