"""Orthogonal matrices that are cheap to apply: random signs, then a Hadamard matrix where the width has one.

A Hadamard matrix of order n is a Kronecker product of order 2**k (applied as a fast butterfly) and order m.
For m beyond 1 and 2 Paley's constructions serve (Paley 1933): q + 1 for a prime q = 3 mod 4, 2 (q + 1) for a
prime q = 1 mod 4. Where no such m divides n in this way, the factor of odd order is a random orthogonal
matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> Tensor:
    """``[q, q]``: +1 where column - row is a non-zero square modulo q, -1 where it is no square, 0 on the
    diagonal."""
    squares = {i * i % q for i in range(1, q)}
    chi = torch.tensor([0] + [1 if i in squares else -1 for i in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    return chi[(index[None] - index[:, None]) % q]


def paley(order: int) -> Tensor | None:
    """A Hadamard matrix ``[order, order]`` of entries +-1 by Paley's constructions, or None."""
    if order in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:order, :order]
    q = order - 1
    if order % 4 == 0 and _is_prime(q) and q % 4 == 3:
        skew = torch.zeros(order, order, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0] = 1, -1
        skew[1:, 1:] = _jacobsthal(q)
        return skew + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if order % 4 == 0 and _is_prime(q) and q % 4 == 1:
        half = torch.ones(q + 1, q + 1, dtype=torch.float64)
        half[0, 0] = 0
        half[1:, 1:] = _jacobsthal(q)
        eye = torch.eye(q + 1, dtype=torch.float64)
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(half, plus) + torch.kron(eye, minus)
    return None


class Orthogonal:
    """A randomized orthogonal R ``[width, width]``, never formed: ``apply(x)`` is ``x @ R`` in float64.

    kind: "hadamard" when all entries of R have the same magnitude, else "hadamard x random".
    """

    def __init__(self, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.width = width
        self.signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
        power = width & -width  # the largest power of two that divides the width
        self.kind, self.power, self.factor = "hadamard x random", power, torch.empty(0)
        while power >= 1:
            if (found := paley(width // power)) is not None:
                self.kind, self.power = "hadamard", power
                self.factor = found / (width // power) ** 0.5
                return
            power //= 2
        odd = width // self.power
        gauss = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
        self.factor = torch.linalg.qr(gauss)[0]

    def _butterfly(self, x: Tensor) -> Tensor:
        """Axis -2, of length ``power``, times the symmetric Hadamard matrix, scaled to be orthogonal."""
        shape, step = x.shape, 1
        while step < self.power:
            pairs = x.reshape(*shape[:-2], self.power // (2 * step), 2, step, shape[-1])
            a, b = pairs.unbind(-3)
            x = torch.stack((a + b, a - b), dim=-3).reshape(shape)
            step *= 2
        return x / self.power**0.5

    def apply(self, x: Tensor) -> Tensor:
        """``x [..., width] @ R``, float64."""
        y = (x.double() * self.signs).unflatten(-1, (self.power, self.width // self.power))
        return (self._butterfly(y) @ self.factor).flatten(-2)

    def undo(self, x: Tensor) -> Tensor:
        """``x [..., width] @ RT``, float64."""
        y = x.double().unflatten(-1, (self.power, self.width // self.power))
        return self._butterfly(y @ self.factor.t()).flatten(-2) * self.signs
