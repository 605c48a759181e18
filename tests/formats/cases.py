"""QuantWeights to try formats on: random ones over odd shapes, and ones made of golden codes."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme


def random_qweight(
    rows: int, columns: int, scheme: Scheme, seed: int = 0, order: bool = False
) -> QuantWeight:
    """Uniform codes and zero points over their whole range, scales of either sign when symmetric."""
    g = torch.Generator().manual_seed(seed)
    groups = scheme.groups(columns)
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), generator=g, dtype=torch.uint8)
    scale = torch.rand(rows, groups, generator=g) * 0.1 + 1e-4
    zero = None
    if scheme.symmetric:
        scale *= torch.where(torch.rand(scale.shape, generator=g) < 0.3, -1.0, 1.0)
    else:
        zero = torch.randint(0, scheme.max_code + 1, (rows, groups), generator=g, dtype=torch.uint8)
        zero[0, 0], zero[-1, -1] = 0, scheme.max_code
    permutation = torch.randperm(columns, generator=g) if order else None
    return QuantWeight(scheme, codes, scale.to(getattr(torch, scheme.scale_dtype)), zero, permutation)


def golden_qweight(tensors: dict[str, Tensor], meta: dict[str, str], symmetric: bool) -> QuantWeight:
    """The QuantWeight that a golden file describes in neutral terms (codes, scales, zeros)."""
    group = max(int(meta["group_size"]), 0)
    scheme = Scheme(int(meta["bits"]), symmetric, group, "float16")
    g_idx = tensors.get("g_idx")
    order = None if g_idx is None else torch.argsort(g_idx, stable=True)
    return QuantWeight(
        scheme, tensors["codes"], tensors["scales"], None if symmetric else tensors["zeros"], order
    )


@st.composite
def qweights(draw, bits=(2, 3, 4, 8), unit: int = 8, groups=(8, 32, 64, 128), dtypes=("bfloat16", "float16")):
    """Shapes in multiples of ``unit``; the group always divides the columns."""
    group = draw(st.sampled_from((0, *groups)))
    columns = unit * draw(st.integers(1, 5)) if group == 0 else group * draw(st.integers(1, 3))
    scheme = Scheme(draw(st.sampled_from(bits)), draw(st.booleans()), group, draw(st.sampled_from(dtypes)))
    return random_qweight(unit * draw(st.integers(1, 5)), columns, scheme, draw(st.integers(0, 2**16)))
