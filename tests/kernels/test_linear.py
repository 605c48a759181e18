"""Every kernel, scheme and instruction set against exact arithmetic, on ugly shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights import check, random_weight

from quantkit.kernels import linear, native
from quantkit.kernels.linear import Request, cpu, reference
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

SHAPES = (
    (33, 70),
    (48, 576),
    (16, 16),
    (1, 200),
)  # ragged rows, ragged columns, a ragged last group, one row
GROUPS = (0, 32, 64, 128)


def run(weight, x, bias, **request):
    """Kernel output and its request."""
    asked = Request.of(weight, dtype=x.dtype, **request)
    return linear.prepare(weight, bias, asked, "cpu")(x), asked


def activations(tokens: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """bf16 values in any dtype, with an outlier: then the exact kernels must be exact."""
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(seed))
    x[0, cols // 2] = 40.0
    return x.to(torch.bfloat16).to(dtype)


@pytest.mark.parametrize("precision", ["exact", "int16", "int8"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_schemes(each_isa, bits, symmetric, precision):
    for group in GROUPS:
        for i, (rows, cols) in enumerate(SHAPES):
            weight = random_weight(Scheme(bits, symmetric, group), rows, cols, seed=i)
            for tokens, dtype in ((1, torch.bfloat16), (1, torch.float32), (19, torch.float32)):
                x = activations(tokens, cols, dtype, i)
                y, request = run(weight, x, None, precision=precision)
                check(
                    y, x, weight, None, request, f"{request.scheme} {rows}x{cols}, {tokens} tokens, {dtype}"
                )


def test_token_counts_and_bias(each_isa):
    weight = random_weight(Scheme(4, True, 64), 40, 192)
    bias = torch.randn(40)
    for tokens in (1, 2, 3, 4, 5, 7, 8, 9, 15, 64):
        for precision in ("exact", "bf16", "int16", "int8"):
            for dtype in (torch.float32, torch.bfloat16):
                x = activations(tokens, 192, dtype, tokens)
                y, request = run(weight, x, bias, precision=precision)
                check(y, x, weight, bias, request, f"{tokens} tokens, {precision}, {dtype}")


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
def test_scale_and_activation_dtypes(each_isa, scale_dtype):
    for bits in (4, 8):
        weight = random_weight(Scheme(bits, False, 32, scale_dtype), 32, 80)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = activations(3, 80, dtype, bits)
            y, request = run(weight, x, None)
            assert y.dtype == dtype
            check(y, x, weight, None, request, f"{bits} bits, {scale_dtype} scales, {dtype}")


def test_act_order(each_isa):
    for bits, group in ((4, 64), (8, 32), (4, 0)):
        weight = random_weight(Scheme(bits, True, group), 32, 176, order=True)
        for precision in ("exact", "int16", "int8"):
            x = activations(5, 176, torch.float32, 1)
            y, request = run(weight, x, None, precision=precision)
            check(y, x, weight, None, request, f"order, {bits} bits, group {group}, {precision}")


def test_w8a8_rounds_once_per_token(each_isa):
    weight = random_weight(Scheme(8, True, 0, activation="int8"), 48, 208)
    x = torch.randn(9, 208)
    x[3, 5] = 100.0  # a scale per group would hide this outlier from the other groups
    y, request = run(weight, x, None)
    want = reference.ReferenceLinear(weight, None, request)(x)
    error = ((y - want).norm() / want.norm()).item()
    assert error < 1e-3, f"differs from per-token int8 by {error:.1e}"
    check(y, x, weight, None, request, "W8A8")


def test_bf16_weights(each_isa):
    """Layers left unquantized: bf16 in the same layout, 16 bits."""
    weight = torch.randn(37, 90).to(torch.bfloat16)
    packed = native.pack(weight, torch.ones(37))
    x = torch.randn(6, 90).to(torch.bfloat16).float()
    for precision in (native.FP32, native.BF16_DOT, native.INT16, native.INT8):
        y = torch.ops.quantkit.linear_cpu(x, packed.data, 37, 90, 16, 0, 2, 4, precision)
        want = x.double() @ weight.double().T + 1
        error = ((y - want).norm() / want.norm()).item()
        assert error < 1e-5, f"bf16 weights are off by {error:.1e}"
    assert torch.equal(packed.row(36), weight[36].float())


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rows_unpack_to_what_was_packed(lib, bits):
    for symmetric, order in ((True, False), (False, True)):
        weight = random_weight(Scheme(bits, symmetric, 32, "float16"), 21, 100, order=order)
        packed, want = native.pack(weight), weight.dequantize()
        for row in (0, 15, 16, 20):
            assert torch.equal(packed.row(row), want[row]), f"row {row} of {weight.scheme}"
    with pytest.raises(native.NativeError, match="row 21 of a weight with 21 rows"):
        packed.row(21)


def test_extreme_activations(each_isa):
    """Zeros, the largest bf16 and subnormals go through; a NaN comes out as NaN in its own token only."""
    weight = random_weight(Scheme(4, True, 32), 16, 64)
    x = torch.zeros(4, 64)
    x[1, 3] = 2.0**100
    x[2] = 2.0**-126
    x[3, 0] = float("nan")
    for precision in ("exact", "int16", "int8"):
        y, request = run(weight, x, None, precision=precision)
        assert torch.equal(y[0], torch.zeros(16))
        check(y[1:2], x[1:2], weight, None, request, f"huge, {precision}")
        assert y[2].isfinite().all()
    y, _ = run(weight, x, None)
    assert y[3].isnan().all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 300),
    tokens=st.integers(0, 20),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    group=st.sampled_from([0, 16, 48, 64, 128]),
    order=st.booleans(),
    precision=st.sampled_from(["exact", "bf16", "int16", "int8"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_fuzz(lib, rows, cols, tokens, bits, symmetric, group, order, precision, dtype):
    weight = random_weight(Scheme(bits, symmetric, group), rows, cols, order=order)
    x = torch.randn(tokens, cols).to(dtype)
    y, request = run(weight, x, None, precision=precision)
    assert y.shape == (tokens, rows) and y.dtype == dtype
    if tokens:
        check(y, x, weight, None, request, str(request))


# ---- the operator --------------------------------------------------------------------------------------------------


def test_operator_contract(lib):
    weight = random_weight(Scheme(4, True, 32), 24, 64)
    prepared = cpu.prepare(weight, None, Request.of(weight))
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    arguments = (x, *[getattr(prepared, name) for name in cpu.CpuLinear.__dataclass_fields__])
    torch.library.opcheck(torch.ops.quantkit.linear_cpu.default, arguments)
    assert prepared(x).shape == (2, 3, 24)
    with pytest.raises(ValueError, match="x has 63 columns, the weight 64"):
        prepared(x[..., :63])


def test_compile_sees_one_node(lib):
    weight = random_weight(Scheme(4, True, 32), 24, 64)
    prepared = cpu.prepare(weight, None, Request.of(weight))
    nodes = []

    def backend(graph, _):
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    x = torch.randn(2, 64, dtype=torch.bfloat16)
    compiled = torch.compile(lambda v: prepared(v), fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), prepared(x))
    assert nodes == ["quantkit.linear_cpu"], nodes


def test_strided_input(lib):
    weight = random_weight(Scheme(4, True, 32), 24, 64)
    prepared = cpu.prepare(weight, None, Request.of(weight, dtype=torch.float32))
    x = torch.randn(64, 5)
    assert torch.equal(prepared(x.T), prepared(x.T.contiguous()))


# ---- choosing and refusing -----------------------------------------------------------------------------------------


def test_cpu_is_chosen_and_reference_never_refuses(lib):
    weight = random_weight(Scheme(4, True, 64), 32, 128)
    request = Request.of(weight)
    assert linear.choose(request).backend == "cpu"
    assert linear.choose(request, "reference").refusals == {}


def test_refusals_are_sentences(lib):
    odd = random_weight(Scheme(4, True, 24), 32, 128)
    choice = linear.choose(Request.of(odd))
    assert choice.backend == "reference"
    assert "multiples of 16 columns, not 24" in choice.refusals["cpu"]
    with pytest.raises(linear.NoBackend, match="multiples of 16"):
        linear.choose(Request.of(odd), "cpu")
    with pytest.raises(native.NativeError, match="multiples of 16"):
        native.pack(odd)
    gpu = Request.of(odd.__class__(Scheme(4), odd.codes, odd.scale[:, :1]), device="meta")
    assert "run on the CPU, not on meta" in (cpu.why_not(gpu) or "")
    assert "float64" in (cpu.why_not(Request.of(odd, dtype=torch.float64)) or "")


def test_unknown_names_get_their_neighbours(lib):
    weight = random_weight(Scheme(4), 16, 16)
    with pytest.raises(LookupError, match="did you mean 'cpu'"):
        linear.choose(Request.of(weight), "cpuu")
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        Request.of(weight, precision="exakt")


def test_missing_library_is_a_reason(monkeypatch):
    monkeypatch.setenv("QUANTKIT_CPU_LIB", "/nonexistent/_quantkit_cpu.so")
    native.library.cache_clear()
    try:
        reason = cpu.why_not(Request(Scheme(4), 16, 16))
    finally:
        native.library.cache_clear()
    assert reason is not None and "does not load" in reason


def test_int16_overflow_is_refused(lib):
    assert "65536" in (native.why_not_pack(8, 0, 70000) or "")
    shape = native.CShape(16, 70000, 8, 0, 0, 0, 0, 0)
    assert lib.qk_packed_bytes(shape) == -1
    assert "65536" in native.last_error()


def test_bad_order_is_refused(lib):
    weight = random_weight(Scheme(4, True, 32), 16, 64)
    broken = type(weight)(weight.scheme, weight.codes, weight.scale, None, torch.arange(1, 65))
    with pytest.raises(native.NativeError, match=r"order\[63\] = 64"):
        native.pack(broken)


@pytest.mark.parametrize("precision", ["exact", "bf16", "int16", "int8"])
def test_codes_at_the_zero_point_give_exactly_zero(lib, precision):
    """The smallest case that fuzzing found: one weight, and it is 0."""
    scheme = Scheme(3, True, 0)
    weight = QuantWeight(
        scheme, torch.full((1, 1), 4, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16)
    )
    y, request = run(weight, torch.randn(1, 1), None, precision=precision)
    assert torch.equal(y, torch.zeros(1, 1))
    check(y, torch.randn(1, 1), weight, None, request, str(request))
