"""What every folder format owes, tried on all schemes: a format inherits these tests by standing in its folder."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from quantkit import plugins
from quantkit.formats import CannotStore, modules_of
from quantkit.scheme import Scheme
from tests.formats.cases import random_qweight

FOLDERS = [n for n in plugins.names("formats") if hasattr(plugins.load("formats", n), "pack")]
SCHEMES = [
    Scheme(b, s, g, d) for b, s, g, d in itertools.product((2, 3, 4, 8), (True, False), (0, 8, 32, 64, 128), ("bfloat16", "float16"))
] + [Scheme(8, activation="int8"), Scheme(4, True, 32, "float32")]  # fmt: skip
SHAPES = [(32, 128), (96, 192), (64, 640), (33, 64), (8, 24), (64, 100)]


def test_all_are_here():
    assert {"compressed-tensors", "gptq", "awq"} <= set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_exact_or_refused(name):
    fmt = plugins.load("formats", name)
    stored = 0
    for scheme, (rows, columns) in itertools.product(SCHEMES, SHAPES):
        q = random_qweight(rows, columns, scheme)
        reason = fmt.why_not(scheme, rows, columns)
        if reason:
            assert len(reason) > 20
            with pytest.raises(CannotStore):
                fmt.pack("a.m", q)
            continue
        config = json.loads(json.dumps(fmt.config({"a.m": scheme}, ["lm_head"])))
        assert fmt.matches(config)
        tensors = fmt.pack("a.m", q, config)
        label = f"{name} {scheme} {rows}x{columns}"
        assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == fmt.layout(
            "a.m", rows, columns, scheme
        ), label
        assert all(t.is_contiguous() for t in tensors.values())
        assert modules_of(fmt, [*tensors, "a.norm.weight", "a.m.bias"]) == {"a.m": sorted(tensors)}
        back = fmt.unpack("a.m", tensors, config, (rows, columns))
        assert back.same_as(q) is None, f"{label}: {back.same_as(q)}"
        assert (back.scheme.bits, back.scheme.symmetric, back.scheme.group) == (
            scheme.bits,
            scheme.symmetric,
            scheme.group,
        )
        assert torch.equal(back.dequantize(), q.dequantize())
        stored += 1
    assert stored >= 8


@pytest.mark.parametrize("name", FOLDERS)
def test_only_one_format_claims_a_configuration(name):
    config = plugins.load("formats", name).config({"a.m": Scheme(4, True, 32)}, [])
    claims = [
        n
        for n in plugins.names("formats")
        if hasattr(f := plugins.load("formats", n), "matches") and f.matches(config)
    ]
    assert claims == [name]


def damaged(tensors: dict[str, torch.Tensor]):
    """(what was done, tensors) for every integer tensor with the nibbles of its bytes exchanged."""
    for key, value in tensors.items():
        if value.dtype == torch.int32 and not key.endswith("g_idx"):
            raw = value.view(torch.uint8)
            yield key, tensors | {key: ((raw >> 4) | (raw << 4)).view(torch.int32)}


@pytest.mark.parametrize("name", FOLDERS)
def test_exchanged_nibbles_do_not_go_unseen(name):
    fmt = plugins.load("formats", name)
    q = random_qweight(32, 128, Scheme(4, False, 32))
    config = fmt.config({"m": q.scheme}, [])
    cases = list(damaged(fmt.pack("m", q, config)))
    assert cases
    for key, tensors in cases:
        assert fmt.unpack("m", tensors, config).same_as(q) is not None, key
