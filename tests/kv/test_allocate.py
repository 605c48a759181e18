import itertools

import pytest
import torch

from quantkit.errors import UserError
from quantkit.kv.allocate import Choice, allocate, sensitivity
from quantkit.kvscheme import KVScheme


def offers(seed, layers=4):
    g = torch.Generator().manual_seed(seed)
    return [
        Choice(layer, bits, bits, float(torch.rand(1, generator=g)) * 4.0**-bits, 10.0 * bits)
        for layer in range(layers)
        for bits in (2, 4, 8)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_never_over_budget_and_close_to_exhaustive_search(seed):
    choices = offers(seed)
    layers = [[c for c in choices if c.layer == i] for i in range(4)]
    for budget in (90, 140, 200, 400):
        picked = {layer: k for layer, k, _ in allocate(choices, budget)}
        mine = [next(c for c in choices if (c.layer, c.k_bits) == item) for item in picked.items()]
        assert sum(c.bytes for c in mine) <= budget
        feasible = [p for p in itertools.product(*layers) if sum(c.bytes for c in p) <= budget]
        best = min(sum(c.cost for c in p) for p in feasible)
        worst = max(sum(c.cost for c in p) for p in feasible)
        assert sum(c.cost for c in mine) <= best + 0.3 * (worst - best) + 1e-12


def test_an_ample_budget_buys_the_best_of_everything_and_a_small_one_is_refused():
    choices = offers(1)
    assert {k for _, k, _ in allocate(choices, 1e9)} == {8}
    with pytest.raises(UserError, match="too small"):
        allocate(choices, 79)


def test_sensitivity_is_measured_per_layer_and_falls_with_bits(llama, ids):
    found = sensitivity(llama, [ids[0]], KVScheme.parse("int4"), ((8, 8), (4, 4)))
    assert [(c.layer, c.k_bits) for c in found] == [(0, 8), (0, 4), (1, 8), (1, 4)]
    for layer in (0, 1):
        eight, four = (c for c in found if c.layer == layer)
        assert 0 < eight.cost < four.cost and eight.bytes > four.bytes
