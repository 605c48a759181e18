"""GPTQ against slow, independent versions of the same mathematics."""

import pytest
import torch
from problems import brain_surgeon, correlated, greedy, nearest, relative_error, seen_of, weights

from quantkit.scheme import Scheme
from quantkit.solvers.gptq import Solver
from quantkit.stages import feedback
from quantkit.stages.damping import cholesky, damped, descending, factorize
from quantkit.stages.grid import Grid, group_of, minmax, per_group, spans
from quantkit.stages.upstream import gptaq, qep_target

CHANNEL = Scheme(3, symmetric=True, group=0)


def walked(weight, factor, scheme, grid):
    """feedback.static's weight values [out, in] in natural order."""
    index = group_of(weight.shape[1], scheme.group, factor.order)
    codes = feedback.static(
        factor.walk(weight.T.contiguous()), feedback.normalised(factor.upper), grid, index, scheme
    )
    return (factor.unwalk(codes) * grid.scale[group_of(weight.shape[1], scheme.group, None)]).T


def test_equals_exact_greedy_least_squares():
    x = correlated(400, 16)
    w = weights(10, 16)
    grid = minmax(w.T, CHANNEL)
    got = walked(w, factorize(seen_of(x).hessian, 0.0), CHANNEL, grid)
    want = greedy(x.double() @ w.double().T, x.double(), grid.scale[0].double(), CHANNEL)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_equals_optimal_brain_quantization_in_act_order():
    h = seen_of(correlated(400, 24)).hessian
    w = weights(12, 24)
    order = descending(h)
    grid = minmax(w.T, CHANNEL)
    got = walked(w, factorize(h, 0.01, order), CHANNEL, grid)
    damped = h.double() + 0.01 * h.double().diagonal().mean() * torch.eye(24, dtype=torch.float64)
    want = brain_surgeon(w[:, order], damped[order][:, order], grid.scale[0].double(), CHANNEL)
    torch.testing.assert_close(got.double()[:, order], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [5, 32, 33, 100, 257])
def test_halving_equals_the_column_loop(width):
    """sweep() against the loop of the paper, at widths around and beyond its leaf."""
    h = seen_of(correlated(600, width)).hessian
    w = weights(7, width)
    grid = minmax(w.T, CHANNEL)
    upper = factorize(h, 0.05).upper.double()
    loop, want = w.double().clone(), torch.empty(7, width, dtype=torch.float64)
    for j in range(width):
        want[:, j] = nearest(loop[:, j], grid.scale[0].double(), CHANNEL)
        loop[:, j:] -= ((loop[:, j] - want[:, j]) / upper[j, j])[:, None] * upper[j, j:]
    got = walked(w, factorize(h, 0.05), CHANNEL, grid).double()
    # One column whose value sits within float32 rounding of a tie may differ, and then all after it.
    assert (got != want.float().double()).any(1).sum() <= 1, (
        "more than one output differs from the plain loop"
    )


@pytest.mark.parametrize("group", [8, 32, 64])
def test_groups_of_the_walk_choose_from_corrected_weights(group):
    """Natural order: each group's scale must come from the weights as corrected when the walk reaches it."""
    scheme = Scheme(4, True, group)
    h = seen_of(correlated(500, 72)).hessian
    w = weights(9, 72).double()
    upper = factorize(h, 0.01).upper.double()
    want = torch.empty_like(w)
    loop = w.clone()
    for start, stop in spans(72, group):
        scale = loop[:, start:stop].abs().amax(1) / 7.5
        scale = scale.float().bfloat16().double()
        for j in range(start, stop):
            want[:, j] = nearest(loop[:, j], scale, scheme)
            loop[:, j:] -= ((loop[:, j] - want[:, j]) / upper[j, j])[:, None] * upper[j, j:]
    got = Solver(act_order="none", damping=0.01).solve(w.float(), seen_of(correlated(500, 72)), scheme).weight
    different = (got.dequantize().double() - want).abs().amax(1) > 1e-5
    assert different.sum() <= 1, f"{int(different.sum())} of 9 outputs differ from the paper's loop"


def test_corrected_target_is_greedy_least_squares_for_the_float_output():
    """QEP with strength 1 and no damping, then feedback: min ||W X_float - W^ X|| greedily (algorithms.md section 2)."""
    x_float = correlated(500, 16, seed=3)
    x = x_float + 0.2 * correlated(500, 16, seed=4)
    w = weights(10, 16)
    seen = seen_of(x, x_float)
    factor = factorize(seen.hessian, 0.0)
    target = qep_target(w.T.contiguous(), seen.cross, cholesky(seen.hessian, 0.0)[0], 1.0)
    grid = minmax(w.T, CHANNEL)
    got = walked(target.T, factor, CHANNEL, grid)
    want = greedy(x_float.double() @ w.double().T, x.double(), grid.scale[0].double(), CHANNEL)
    different = ((got.double() - want).abs() > 1e-5).any(1)
    assert different.sum() <= 1, (
        f"{int(different.sum())} of 10 outputs differ from exact greedy least squares"
    )
    plain = walked(w, factor, CHANNEL, grid)

    def miss(q):
        return float((x_float @ w.T - x @ q.float().T).square().sum())

    assert miss(got) < 0.9 * miss(plain)


def test_gptaq_equals_its_column_loop():
    x_float = correlated(500, 40, seed=3)
    seen = seen_of(x_float + 0.2 * correlated(500, 40, seed=4), x_float)
    factor = factorize(seen.hessian, 0.05)
    w = weights(8, 40)
    grid = minmax(w.T, CHANNEL)
    scale = grid.scale[0].double()
    upper = factor.upper.double()
    spread = 0.5 * torch.triu(seen.cross.double() @ upper.T, 1) @ upper
    loop, want = w.double().clone(), torch.empty(8, 40, dtype=torch.float64)
    for j in range(40):
        value = loop[:, j].clone()
        want[:, j] = nearest(value, scale, CHANNEL)
        error = (value - want[:, j]) / upper[j, j]
        loop[:, j + 1 :] += value[:, None] * spread[j, j + 1 :] - error[:, None] * upper[j, j + 1 :]
    moved, coupling = gptaq(w.T.contiguous(), seen.cross, factor, 0.5)
    codes = feedback.static(moved, coupling, grid, [0] * 40, CHANNEL)
    different = ((codes * grid.scale).T.double() - want).abs().amax(1) > 1e-5
    assert different.sum() <= 1, f"{int(different.sum())} of 8 outputs differ from GPTAQ's loop"


def test_block_is_speed_only():
    seen, w, scheme = seen_of(correlated(900, 200)), weights(16, 200), Scheme(4, True, 64)
    whole = Solver(block=1000).solve(w, seen, scheme)
    for block in (8, 100, 128):
        split = Solver(block=block).solve(w, seen, scheme)
        assert split.error == pytest.approx(whole.error, rel=0.05)


def test_factor_matches_the_definition():
    h = seen_of(correlated(300, 50)).hessian
    order = descending(h)
    factor = factorize(h, 0.02, order)
    damped = h.double()[order][:, order] + 0.02 * h.double().diagonal().mean() * torch.eye(
        50, dtype=torch.float64
    )
    want = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    torch.testing.assert_close(factor.upper.double(), want, rtol=1e-4, atol=1e-6)
    assert factor.escalations == 0 and factor.damping == 0.02
    torch.testing.assert_close(factor.unwalk(factor.walk(h)), h, rtol=0, atol=0)


def test_feedback_error_is_the_sum_of_prices():
    """tr(D H DT) = sum of (error / U_jj)**2: the price the omega grid search stands on."""
    h = seen_of(correlated(300, 48)).hessian
    w = weights(6, 48).T.contiguous()
    factor = factorize(h, 0.01)
    metric = damped(h, 0.01)
    grid = per_group(w, Scheme(4, True, 0), lambda run, at: minmax(run, Scheme(4, True, 0)))
    values, codes, change = w.clone(), torch.empty_like(w), torch.empty_like(w)
    rows = feedback.rows_of(grid, [0] * 48, Scheme(4, True, 0))
    feedback.sweep(values, feedback.normalised(factor.upper), rows, codes, change)
    paid = (change.square() * factor.price[:, None]).sum().item()
    want = relative_error(w.T, (codes * grid.scale).T, metric)
    d = (w - codes * grid.scale).double()
    assert paid == pytest.approx(float((d * (metric.double() @ d)).sum()), rel=1e-4)
    assert 0 < want < 1


def test_grid_bounds_are_codes():
    scheme = Scheme(3, symmetric=False, group=0)
    low, high = Grid(torch.ones(1, 3), torch.tensor([[0.0, 3.0, 7.0]])).bounds(scheme)
    assert low.tolist() == [[0.0, -3.0, -7.0]] and high.tolist() == [[7.0, 4.0, 0.0]]
