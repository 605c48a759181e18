"""The rotation matrices: orthogonal at every width, true Hadamard where one is known."""

from __future__ import annotations

import pytest
import torch

from quantkit.rewrites._orthogonal import Orthogonal, paley


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 24, 28, 36, 44, 48, 60])
def test_paley_matrices_are_hadamard(order):
    h = paley(order)
    assert h is not None and set(h.unique().tolist()) <= {1.0, -1.0}
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [3, 6, 10, 18, 40])
def test_no_matrix_is_claimed_where_the_construction_has_none(order):
    assert paley(order) is None


@pytest.mark.parametrize(
    ("width", "kind"),
    [(64, "hadamard"), (72, "hadamard"), (96, "hadamard"), (576, "hadamard"), (640, "hadamard"), (896, "hadamard"),
     (24, "hadamard"), (1536, "hadamard"), (50, "hadamard x random"), (15, "hadamard x random")],
)  # fmt: skip
def test_orthogonal_and_its_inverse(width, kind):
    r = Orthogonal(width, seed=3)
    full = r.apply(torch.eye(width))
    assert r.kind == kind
    assert torch.allclose(full.T @ full, torch.eye(width, dtype=torch.float64), atol=1e-12)
    if kind == "hadamard":
        assert torch.allclose(full.abs(), torch.full_like(full, width**-0.5), atol=1e-12)
    x = torch.randn(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(r.apply(x), x @ full, atol=1e-12)
    assert torch.allclose(r.undo(x), x @ full.T, atol=1e-12)


def test_seeds_differ_and_repeat():
    eye = torch.eye(16)
    assert torch.equal(Orthogonal(16, 1).apply(eye), Orthogonal(16, 1).apply(eye))
    assert not torch.equal(Orthogonal(16, 1).apply(eye), Orthogonal(16, 2).apply(eye))
