"""The bit stream: hand-computed words, an independent bit-by-bit definition, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit import packing


def by_definition(codes: list[int], bits: int) -> list[int]:
    """The whole row as one integer, least significant bit first, cut into signed 32-bit words."""
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    words = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(codes) * bits // 32))]
    return [w - (1 << 32) if w >= 1 << 31 else w for w in words]


@pytest.mark.parametrize("bits, codes, words", [
    (4, [1, 2, 3, 4, 5, 6, 7, 8], [0x87654321 - (1 << 32)]),
    (8, [1, 2, 3, 255, 5], [0xFF030201 - (1 << 32), 5]),
    (2, [3, 0, 1], [0b010011]),
    (3, [0] * 10 + [7], [0xC0000000 - (1 << 32), 1]),
])  # fmt: skip
def test_by_hand(bits, codes, words):
    assert packing.pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == words


@settings(max_examples=80, deadline=None)
@given(st.sampled_from((2, 3, 4, 8)), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**16))
def test_equals_the_definition_and_comes_back(bits, count, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, 2, count), generator=generator, dtype=torch.uint8)
    words = packing.pack(codes, bits)
    assert words.shape == (rows, 2, packing.packed_words(count, bits)) and words.dtype == torch.int32
    for row, packed in zip(codes.flatten(0, 1).tolist(), words.flatten(0, 1).tolist()):
        assert packed == by_definition(row, bits)
    assert torch.equal(packing.unpack(words, bits, count), codes)


def test_slices_of_rows_do_not_change_the_stream():
    # 3-bit rows are handled 2**24/(8n) at a time; this many rows makes three slices
    n = 4099
    rows = 2 * ((1 << 24) // (n * 8)) + 1
    codes = (torch.arange(rows * n) % 8).to(torch.uint8).reshape(rows, n)
    words = packing.pack(codes, 3)
    assert words[-1].tolist() == by_definition(codes[-1].tolist(), 3)
    assert torch.equal(packing.unpack(words, 3, n), codes)


def test_refusals():
    with pytest.raises(ValueError, match="code 16 does not fit in 4 bits"):
        packing.pack(torch.tensor([16], dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="uint8"):
        packing.pack(torch.tensor([1]), 4)
    with pytest.raises(ValueError, match="hold fewer than 9 codes"):
        packing.unpack(torch.zeros(1, dtype=torch.int32), 4, 9)
    with pytest.raises(ValueError, match="int32"):
        packing.unpack(torch.zeros(1, dtype=torch.int64), 4, 8)
