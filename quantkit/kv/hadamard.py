"""The orthonormal Hadamard matrix that spreads outlier channels over a head."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.scheme import SchemeError


@lru_cache(maxsize=16)
def hadamard(size: int) -> Tensor:
    """float32 ``[size, size]``, symmetric and its own inverse (Sylvester's construction).

    >>> hadamard(2) * 2**0.5
    tensor([[ 1.,  1.],
            [ 1., -1.]])

    Raises SchemeError when ``size`` is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise SchemeError(
            f"the hadamard layout needs a head size that is a power of two, not {size}; use 'token'"
        )
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / size**0.5
