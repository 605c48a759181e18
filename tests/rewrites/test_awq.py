"""The AWQ search against brute force, on problems where the answer is known."""

from __future__ import annotations

import pytest
import torch
from helpers import calibrate, rewrite_blocks
from twins import build, token_ids

from quantkit.models.llama import SPEC
from quantkit.modelspec import Fold
from quantkit.qweight import QuantWeight, round_scale
from quantkit.rewrites import awq, rescaled
from quantkit.scheme import Scheme
from quantkit.skeleton import capture, decoder_blocks

FOLD = Fold("input_layernorm", ("self_attn.q_proj",))


def problem(width: int = 48, rows: int = 40, tokens: int = 400, outliers: int = 3):
    """Weights ``[rows, width]`` and inputs ``[tokens, width]`` with some channels thirty times larger."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, width, generator=generator)
    x[:, torch.randperm(width, generator=generator)[:outliers]] *= 30
    return torch.randn(rows, width, generator=generator), x


def plain_rounding(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Independent of the code under test: absmax (or min/max) per group, through QuantWeight."""
    scales, zeros = [], []
    step = scheme.group or weight.shape[1]
    for part in weight.split(step, dim=1):
        if scheme.symmetric:
            scales.append(part.abs().amax(1) / (scheme.max_code / 2))
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales.append((high - low) / scheme.max_code)
            zeros.append(torch.round(-low / round_scale(scales[-1], scheme)).clamp(0, scheme.max_code))
    scale = round_scale(torch.stack(scales, 1), scheme)
    zero = torch.stack(zeros, 1) if zeros else None
    return QuantWeight.from_float(weight, scale, zero, scheme).dequantize()


@pytest.mark.parametrize(
    "scheme", [Scheme(4, group=16), Scheme(4), Scheme(3, group=32), Scheme(4, False, group=16)]
)
def test_loss_is_the_output_error_over_the_data(scheme):
    """tr(E H ET) with H = 2/n sum x xT, against rounding the scaled weight and multiplying the inputs."""
    weight, x = problem()
    s = torch.exp2(torch.rand(48, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    hessian = 2 / len(x) * x.T @ x
    got = awq.Rewrite(signed=False).loss([(weight, scheme), (2 * weight, scheme)], s, hessian)
    expected = 0.0
    for w in (weight.double(), 2 * weight.double()):
        rounded = plain_rounding((w * s).float(), scheme).double()
        error = (x.double() / s) @ rounded.T - x.double() @ w.T
        expected += float(error.square().sum()) * 2 / len(x)
    assert got == pytest.approx(expected, rel=1e-4)


def test_search_finds_the_best_alpha_of_the_grid():
    weight, x = problem()
    scheme, hessian, size = Scheme(4, group=16), 2 / len(x) * x.T @ x, x.abs().mean(0)
    rewrite = awq.Rewrite(exact=19)
    alpha, s, loss, plain = rewrite.search(size, [(weight, scheme)], hessian, FOLD, None)
    brute = {}
    for step in range(20):
        scale = size ** (step / 20)
        scale = scale / (scale.max() * scale.min()).sqrt()
        brute[step / 20] = rewrite.loss([(weight, scheme)], scale, hessian)
    assert alpha == min(brute, key=brute.__getitem__)
    assert loss == pytest.approx(brute[alpha], rel=1e-5)
    assert plain == pytest.approx(brute[0.0], rel=1e-5)
    assert s.max() * s.min() == pytest.approx(1.0, rel=1e-4)


def test_the_quick_search_is_nearly_as_good_and_the_loss_falls():
    weight, x = problem()
    scheme, hessian, size = Scheme(4, group=16), 2 / len(x) * x.T @ x, x.abs().mean(0)
    _, _, quick, plain = awq.Rewrite().search(size, [(weight, scheme)], hessian, FOLD, None)
    _, _, full, _ = awq.Rewrite(exact=19).search(size, [(weight, scheme)], hessian, FOLD, None)
    assert quick < 0.6 * plain  # outlier channels: most of the error goes
    assert quick <= 1.05 * full


def test_flat_activations_leave_the_weights_alone():
    """All channels equally loud: no alpha can help, so nothing may change."""
    weight, _ = problem()
    alpha, s, loss, plain = awq.Rewrite().search(
        torch.ones(48), [(weight, Scheme(4))], torch.eye(48), FOLD, None
    )
    assert (alpha, loss) == (0.0, plain)
    assert torch.equal(s, torch.ones(48))


def test_dead_channels_do_not_blow_up():
    size = torch.tensor([0.0, 1.0, 2.0, 0.0])
    s = awq.Rewrite().scale(size, 0.95)
    assert torch.isfinite(s).all() and s.min() >= 1 / 100 and s.max() <= 100
    assert torch.equal(awq.Rewrite().scale(torch.zeros(3), 0.5), torch.ones(3))


def test_grouped_query_scales_are_shared_by_the_heads_of_a_group():
    model = build("llama")
    reports = rewrite_blocks(model, SPEC, awq.Rewrite(kinds=("value",)), Scheme(4, group=16))
    columns = [r.input_scales["self_attn.o_proj"] for r in reports if r.input_scales]
    assert columns
    for s in columns:
        by_head = s.view(2, 2, 16)  # kv heads, query heads of each, channels
        assert torch.equal(by_head[:, 0], by_head[:, 1])


def test_reported_scales_turn_old_statistics_into_new_ones():
    """rescaled(seen, s) equals calibrating the rewritten block again."""
    model = build("qwen2")
    spec, config = SPEC, model.config
    from quantkit.rewrites import Probe

    hidden, calls = capture(model, spec, token_ids(4, 48))
    block = decoder_blocks(model, spec)[0]
    old = calibrate(block, spec, hidden, calls[0])
    schemes = dict.fromkeys(spec.linears_in(block), Scheme(3, group=16))
    report = awq.Rewrite().apply(block, spec, old, schemes, config, probe=Probe(hidden, calls[0]))
    assert report.input_scales
    new = calibrate(block, spec, hidden, calls[0])
    for group, s in report.input_scales.items():
        said = rescaled(old[group], s)
        assert said.abs_mean is not None and new[group].abs_mean is not None
        torch.testing.assert_close(said.hessian, new[group].hessian, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(said.abs_mean, new[group].abs_mean, rtol=1e-4, atol=1e-5)


def test_only_quantized_linears_count():
    model = build("llama")
    hidden, calls = capture(model, SPEC, token_ids(2, 16))
    from quantkit.rewrites import Probe

    block = decoder_blocks(model, SPEC)[0]
    seen = calibrate(block, SPEC, hidden, calls[0])
    report = awq.Rewrite().apply(block, SPEC, seen, {}, model.config, probe=Probe(hidden, calls[0]))
    assert not report.changes
    assert set(report.skipped.values()) == {"none of the consumers is quantized"}
