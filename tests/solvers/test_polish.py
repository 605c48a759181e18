"""Descent and refit: monotone, and at their optimum by brute force."""

import pytest
import torch
from problems import correlated, seen_of, weights

from quantkit.scheme import Scheme
from quantkit.stages.damping import damped
from quantkit.stages.grid import group_of, minmax, per_group, round_to, spans
from quantkit.stages.polish import polish


def rounded(w, scheme):
    grid = per_group(w, scheme, lambda run, at: minmax(run, scheme))
    index = group_of(len(w), scheme.group, None)
    codes = torch.cat(
        [round_to(w[a:b], row, scheme) for (a, b), row in zip(spans(len(w), scheme.group), grid.rows())]
    )
    return codes, grid, index


def costs(w, h, codes, grid, index):
    d = (w - codes * grid.scale[index]).double()
    return ((h.double() @ d) * d).sum(0)


@pytest.mark.parametrize("scheme", [Scheme(3, True, 0), Scheme(4, False, 32), Scheme(2, True, 64)], ids=str)
def test_descent_is_monotone_and_ends_where_no_single_code_can_improve(scheme):
    h = damped(seen_of(correlated(500, 72)).hessian, 0.01)
    w = weights(11, 72).T.contiguous()
    codes, grid, index = rounded(w, scheme)
    start = now = costs(w, h, codes, grid, index)
    for _ in range(40):
        (codes, same), before = polish(w, h, codes, grid, scheme, move_scales=False), now
        now = costs(w, h, codes, grid, index)
        assert (now <= before * (1 + 1e-6)).all(), f"cost rose by {(now - before).max():.3g}"
    assert (now < start).all() and torch.equal(same.scale, grid.scale)
    low, high = grid.bounds(scheme)
    assert (codes >= low[index]).all() and (codes <= high[index]).all()
    for j in range(72):
        for step in (-2, -1, 1, 2):
            other = codes.clone()
            other[j] += step
            allowed = (other[j] >= low[index[j]]) & (other[j] <= high[index[j]])
            better = costs(w, h, other, grid, index) < now * (1 - 1e-5)
            assert not (better & allowed).any(), f"column {j}: a step of {step} codes lowers the cost"


def test_refit_equals_least_squares():
    """Storable scales are float32 here, so that rounding them does not hide a wrong optimum."""
    scheme = Scheme(4, True, 32, scale_dtype="float32")
    x = correlated(500, 72)
    h = seen_of(x).hessian
    w = weights(6, 72).T.contiguous()
    codes, grid, _ = rounded(w, scheme)
    _, got = polish(w, h, codes, grid, scheme, passes=200, move_codes=False)
    for r in range(6):
        per_scale = torch.stack(
            [x[:, a:b].double() @ codes[a:b, r].double() for a, b in spans(72, 32)], dim=1
        )
        want = torch.linalg.lstsq(per_scale, x.double() @ w[:, r].double()).solution
        torch.testing.assert_close(got.scale[:, r].double(), want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scheme", [Scheme(4, True, 32), Scheme(2, False, 0), Scheme(3, True, 64)], ids=str)
def test_refit_lowers_every_output_with_stored_scales(scheme):
    h = damped(seen_of(correlated(500, 72)).hessian, 0.01)
    w = weights(20, 72).T.contiguous()
    codes, grid, index = rounded(w, scheme)
    before = costs(w, h, codes, grid, index)
    same, fitted = polish(w, h, codes, grid, scheme, move_codes=False)
    assert torch.equal(same, codes)
    after = costs(w, h, codes, fitted, index)
    assert (after <= before * (1 + 1e-6)).all() and after.sum() < before.sum()
    assert torch.equal(fitted.scale, fitted.scale.bfloat16().float()), "a scale is not as it will be stored"


def test_refit_leaves_empty_groups_alone():
    scheme = Scheme(4, True, 8)
    w = weights(3, 16).T.contiguous()
    codes, grid, _ = rounded(w, scheme)
    codes[:8] = 0
    _, fitted = polish(w, torch.eye(16), codes, grid, scheme, move_codes=False)
    assert torch.equal(fitted.scale[0], grid.scale[0])
    assert torch.isfinite(fitted.scale).all()


@pytest.mark.parametrize("scheme", [Scheme(4, True, 32), Scheme(3, False, 0), Scheme(4, False, 64)], ids=str)
def test_codes_and_scales_together_beat_each_alone(scheme):
    h = damped(seen_of(correlated(500, 72)).hessian, 0.01)
    w = weights(20, 72).T.contiguous()
    codes, grid, index = rounded(w, scheme)

    def total(**options):
        return costs(w, h, *polish(w, h, codes, grid, scheme, passes=3, **options), index).sum()

    assert (
        total()
        < min(total(move_codes=False), total(move_scales=False))
        < costs(w, h, codes, grid, index).sum()
    )
