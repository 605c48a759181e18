"""Pages against a brute-force oracle: plain Python over single numbers, sharing no code with the package."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.hadamard import hadamard
from quantkit.kv.pages import MIN_RANGE, SHRINK, decode, encode, grid, pack_planes, unpack_planes
from quantkit.kvscheme import PRESETS, Side
from quantkit.scheme import SchemeError

SIDES = sorted(
    {s for scheme in PRESETS.values() for s in (scheme.keys_at(0), scheme.values_at(0)) if s.bits < 16},
    key=str,
)


def states(seed=0, pages=2, heads=2, tokens=64, dim=16):
    g = torch.Generator().manual_seed(seed)
    spread = torch.rand(dim, generator=g) * 4 + 0.01
    return torch.randn(pages, heads, tokens, dim, generator=g) * spread + torch.randn(dim, generator=g) * 3


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def half(x):
    return struct.unpack("e", struct.pack("e", x))[0]


def brute_force(x, bits, kind):
    """Asymmetric float16 grid of one group, number by number: [dequantized]."""
    lo, hi = half(min(x)), max(x)
    scale = half(max(hi - lo, MIN_RANGE) / (2**bits - 1))
    out = []
    for value in x:
        code = min(max(round((value - lo) / scale), 0), 2**bits - 1)  # round: half to even, as torch
        out.append(code * scale + lo)
    return out


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("layout", ["channel", "token"])
def test_float16_grid_equals_brute_force(bits, layout):
    x = states(bits)[:1, :1]
    got = decode(encode(x, Side(bits, layout, meta="float16")), Side(bits, layout, meta="float16"))[0, 0]
    groups, results = (x[0, 0].T, got.T) if layout == "channel" else (x[0, 0], got)
    for group, result in zip(groups.tolist(), results.tolist()):
        want = brute_force(group, bits, layout)
        step = (max(group) - min(group)) / (2**bits - 1)
        near = sum(abs(a - b) <= 1e-4 * step + 1e-6 for a, b in zip(want, result))
        assert near >= len(want) - 1  # a value half-way between codes may fall either way
        assert max(abs(a - b) for a, b in zip(want, result)) <= 1.01 * step + 1e-6


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_error_is_at_most_half_a_step_where_nothing_is_clipped(side):
    side = Side(side.bits, side.layout, side.symmetric, side.meta, search=False)
    x = states(3)
    fields = encode(x, side)
    scale, _ = grid(fields, side)
    if side.rotated:
        error = (decode(fields, side) - x) @ hadamard(16)
    else:
        error = decode(fields, side) - x
    axis = -2 if side.layout == "channel" else -1
    # low itself is rounded: to 11 bits (float16), 8 bits (bfloat16), or 1/510 of the range (compact tokens)
    slack = x.abs().max() * 2.0**-11 + (scale * side.max_code / 510).unsqueeze(axis) * (
        side.meta == "compact"
    )
    assert bool((error.abs() <= scale.unsqueeze(axis) / 2 + slack + 1e-6).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("layout", ["channel", "token", "hadamard"])
def test_compact_scales_cost_at_most_a_sixteenth_octave(bits, layout):
    x = states(4)
    wide, _ = grid(encode(x, Side(bits, layout, meta="float16")), Side(bits, layout, meta="float16"))
    compact, _ = grid(encode(x, Side(bits, layout, meta="compact")), Side(bits, layout, meta="compact"))
    ratio = compact / wide
    assert float(ratio.min()) > 0.99
    if layout == "channel":  # token ranges are extended to hold zero, which these shifted states do not
        assert float(ratio.max()) < 2 ** (1 / 16) * 1.01


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("layout", ["channel", "token", "hadamard"])
def test_search_never_loses_and_wins_on_a_heavy_tail(bits, layout):
    x = states(6) ** 3
    plain, searched = Side(bits, layout), Side(bits, layout, search=True)
    axis = -2 if layout == "channel" else -1
    turn = hadamard(16) if layout == "hadamard" else torch.eye(16)
    errors = [(((decode(encode(x, s), s) - x) @ turn) ** 2).sum(axis) for s in (plain, searched)]
    assert bool((errors[1] <= errors[0] * (1 + 1e-4) + 1e-6).all())
    assert float(errors[1].sum()) < 0.98 * float(errors[0].sum())
    assert SHRINK[0] == 1.0


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_constant_and_zero_pages(side):
    """A range of zero must not divide by zero; a constant is off by the rounding of a scale at most."""
    for value in (0.0, 1.0, -250.0):
        x = torch.full((1, 2, 64, 16), value)
        bound = (
            0.5 if side.rotated else 0.05
        )  # rotated, a constant is one large coefficient, and may be clipped
        assert float((decode(encode(x, side), side) - x).abs().max()) <= bound * abs(value) + 1e-3


def test_sixteen_bits_are_kept_as_they_are():
    x = states().to(torch.bfloat16)
    side = Side(16, "token")
    assert torch.equal(decode(encode(x, side), side, torch.bfloat16), x)


@given(
    bits=st.sampled_from([2, 4, 8]),
    dim=st.sampled_from([-1, -2]),
    n=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_planes_round_trip(bits, dim, n, seed):
    codes = torch.randint(
        0, 2**bits, (2, 8 * n, 4 * n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = pack_planes(codes, bits, dim)
    assert packed.numel() == codes.numel() * bits // 8
    assert torch.equal(unpack_planes(packed, bits, dim), codes)


def test_planes_as_documented():
    codes = torch.arange(8, dtype=torch.uint8)[:, None]
    assert pack_planes(codes, 4, 0).flatten().tolist() == [0 | 4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4]
    assert pack_planes(codes % 4, 2, 0).flatten().tolist() == [
        0 | 2 << 2 | 0 << 4 | 2 << 6,
        1 | 3 << 2 | 1 << 4 | 3 << 6,
    ]


def test_one_outlier_channel_leaves_the_others_alone():
    """Why keys are quantized per channel: a token-wise scale lets one channel drown fifteen."""
    x = states(8)
    x[..., 3] *= 100
    others = [d for d in range(16) if d != 3]
    channel, token = (
        (decode(encode(x, side), side) - x)[..., others].square().mean()
        for side in (Side(4, "channel"), Side(4, "token"))
    )
    assert float(token) > 50 * float(channel)


def test_hadamard_is_its_own_inverse_and_refuses_other_sizes():
    for size in (1, 2, 64, 256):
        assert torch.allclose(hadamard(size) @ hadamard(size), torch.eye(size), atol=1e-5)
    with pytest.raises(SchemeError, match="96"):
        hadamard(96)


def test_what_cannot_be_stored_is_refused():
    x = states()
    x[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="1 non-finite"):
        encode(x, Side(4, "channel"))
    with pytest.raises(ValueError, match="65504"):
        encode(states() * 1e6, Side(4, "channel"))
    with pytest.raises(SchemeError, match="fill bytes"):
        encode(torch.randn(1, 1, 64, 7), Side(4, "token"))
