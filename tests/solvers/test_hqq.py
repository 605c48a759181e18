"""HQQ without data: integer zero points by a robust error, never above rounding."""

import pytest
import torch
from problems import weights

from quantkit.scheme import Scheme, SchemeError
from quantkit.solvers import hqq, rtn
from quantkit.stages.grid import Grid, minmax, round_to
from quantkit.stages.halfquadratic import fit_zero, robust

SKEWED = weights(40, 72).exp()  # one-sided, heavy tail: where a zero point matters


@pytest.mark.parametrize("scheme", [Scheme(b, False, g) for b in (2, 3, 4) for g in (0, 32, 64)], ids=str)
def test_lowers_the_robust_error_and_never_the_squared_one_above_rounding(scheme):
    solution = hqq.Solver().solve(SKEWED, None, scheme)
    plain = rtn.Solver().solve(SKEWED, None, scheme)
    assert solution.error <= plain.error and not solution.notes
    ours, theirs = (robust((SKEWED - s.weight.dequantize()).T, 0.7).sum() for s in (solution, plain))
    assert ours <= theirs
    assert torch.equal(solution.weight.scale, plain.weight.scale)


def test_finds_the_best_integer_zero_often():
    """Against trying every zero point: most groups end within one part in a hundred of the best."""
    scheme, w = Scheme(3, False, 0), weights(64, 32).T.contiguous()
    grid = minmax(w, scheme)
    every = []
    for zero in range(8):
        trial = Grid(grid.scale, torch.full_like(grid.scale, zero))
        every.append(robust((w - round_to(w, trial, scheme) * grid.scale) / grid.scale, 0.7))
    best, plain = (
        torch.stack(every).amin(0),
        robust((w - round_to(w, grid, scheme) * grid.scale) / grid.scale, 0.7),
    )
    found = fit_zero(w, scheme, 0.7, 20)
    got = robust((w - round_to(w, found, scheme) * grid.scale) / grid.scale, 0.7)
    assert (got <= plain).all() and (got <= 1.01 * best).float().mean() > 0.5


def test_does_not_depend_on_the_size_of_the_weight():
    scheme = Scheme(3, False, 32)
    a = hqq.Solver().solve(SKEWED, None, scheme).weight
    b = hqq.Solver().solve(SKEWED * 2.0**-6, None, scheme).weight
    assert torch.equal(a.zero, b.zero) and torch.equal(a.codes, b.codes)


def test_symmetric_schemes_are_refused():
    with pytest.raises(SchemeError, match="asymmetric"):
        hqq.Solver().solve(SKEWED, None, Scheme(4, True, 32))
