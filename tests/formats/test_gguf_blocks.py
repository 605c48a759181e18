"""GGML blocks: bytes that ggml itself wrote, hand-made blocks, and exact round trips."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats import _gguf_blocks as blocks
from quantkit.formats import _gguf_file as container
from quantkit.formats._common import CannotRead, CannotStore
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from tests import golden
from tests.formats.cases import random_qweight

HALF = np.array([1.5], np.float16).view(np.uint8).tolist()  # [0x00, 0x3E]


def test_q4_0_by_hand():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0], codes[0, 16], codes[0, 1] = 1, 2, 15
    kind, raw = blocks.pack("w", QuantWeight(Scheme(4), codes, torch.full((1, 1), 1.5)))
    assert kind == "Q4_0" and raw.tolist() == [[*HALF, 0x21, 0x0F, *[0] * 14]]


def test_q8_0_by_hand():
    codes = torch.full((1, 32), 128, dtype=torch.uint8)
    codes[0, :3] = torch.tensor([0, 127, 255])
    kind, raw = blocks.pack("w", QuantWeight(Scheme(8), codes, torch.full((1, 1), 1.5)))
    assert kind == "Q8_0" and raw.view(np.int8).tolist() == [[0, 0x3E, -128, -1, 127, *[0] * 29]]


def test_q4_k_by_hand():
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 0], codes[0, 32], codes[0, 64] = 3, 5, 7
    weight = QuantWeight(
        Scheme(4, False), codes, torch.full((1, 1), 1.5), torch.tensor([[9]], dtype=torch.uint8)
    )
    kind, raw = blocks.pack("w", weight)
    assert kind == "Q4_K" and raw.shape == (1, 144)
    assert raw[0, :16].tolist() == [*HALF, *HALF, 1, 1, 1, 1, 9, 9, 9, 9, 0x91, 0x91, 0x91, 0x91]
    assert raw[0, 16] == 0x53 and raw[0, 48] == 7


@pytest.mark.parametrize("source, kind", [
    ("sym4_g128", "Q4_0"), ("asym4_g128", "Q4_1"), ("asym4_g256", "Q4_K"), ("sym8_g128", "Q8_0"),
])  # fmt: skip
def test_golden_mapping_of_int_groups(source, kind):
    tensors, _ = golden.load("gguf_from_int_groups")
    zero = tensors.get(f"{source}.zeros")
    scheme = Scheme(8 if "8_" in source else 4, zero is None, int(source.rpartition("g")[2]), "float16")
    weight = QuantWeight(scheme, tensors[f"{source}.codes"], tensors[f"{source}.scales"], zero)
    found, raw = blocks.pack("w", weight)
    assert found == kind and torch.equal(torch.from_numpy(raw), tensors[f"{source}.{kind}"])
    values = blocks.dequantize("w", kind, raw)
    step = weight.scale.float()[:, weight.columns_to_groups()].abs()
    error = ((values - weight.dequantize()).abs() / step).max().item()
    assert error <= (blocks.Q4_1_ERROR if kind == "Q4_1" else 0.0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_decodes_what_ggml_wrote(kind):
    tensors, _ = golden.load("gguf_blocks")
    raw = tensors[f"{kind}.bytes"].numpy()
    values = blocks.dequantize("w", kind, raw)
    if f"{kind}.dequant" in tensors:
        assert torch.equal(values, tensors[f"{kind}.dequant"])
    weight = blocks.unpack("w", kind, raw)
    if kind in ("Q4_0", "Q8_0"):
        codes = tensors[f"{kind}.codes"]
        assert torch.equal(weight.codes, codes if kind == "Q4_0" else (codes.int() + 128).to(torch.uint8))
        assert torch.equal(weight.dequantize(), values)
        repacked = blocks.pack("w", weight)
        assert repacked[0] == kind and np.array_equal(repacked[1], raw)
    else:
        assert weight is None  # ggml's own minima are no integer multiples of the scale


def test_rounds_to_q8_0_as_ggml_does():
    tensors, _ = golden.load("gguf_blocks")
    assert torch.equal(torch.from_numpy(blocks.quantize_q8_0(tensors["weight"])), tensors["Q8_0.bytes"])
    assert not blocks.quantize_q8_0(torch.zeros(2, 32)).any()


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_decodes_as_the_gguf_package(kind):
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (3, container.row_bytes(kind, 512)), dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # random bytes hold infinite scales
        want = package.quants.dequantize(raw, package.GGMLQuantizationType[kind])
    finite = np.isfinite(want)
    assert finite.mean() > 0.7
    assert np.array_equal(blocks.dequantize("w", kind, raw).numpy()[finite], want[finite])


def test_type_table_equals_the_gguf_package():
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    for number, (name, block, size) in container.TYPES.items():
        kind = package.GGMLQuantizationType(number)
        assert kind.name == name and package.GGML_QUANT_SIZES[kind] == (block, size)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(((4, True, "Q4_0"), (8, True, "Q8_0"), (4, False, "Q4_1"), (4, False, "Q4_K"))),
    st.sampled_from((0, 32, 64, 256)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2**16),
)
def test_round_trip(case, group, rows, units, seed):
    bits, symmetric, kind = case
    if kind == "Q4_K":
        group, columns = (256 if group else 0), 256 * units
    else:
        columns = 32 * units if kind == "Q4_1" else 64 * units  # groups may be ragged: 256 over 64 columns
        if kind == "Q4_1" and columns % 256 == 0 and group % 256 == 0:
            columns += 32
    weight = random_qweight(rows, columns, Scheme(bits, symmetric, group), seed)
    found, raw = blocks.pack("w", weight)
    assert found == kind and raw.shape == (rows, container.row_bytes(kind, columns))
    back = blocks.unpack("w", kind, raw)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.dequantize(), weight.dequantize())
    values = blocks.dequantize("w", kind, raw)
    if kind == "Q4_1":
        step = weight.scale.float()[:, weight.columns_to_groups()]
        assert ((values - weight.dequantize()).abs() / step).max() <= blocks.Q4_1_ERROR
    else:
        assert torch.equal(values, weight.dequantize())


def test_scales_beyond_float16_are_refused():
    weight = QuantWeight(Scheme(4), torch.zeros(1, 32, dtype=torch.uint8), torch.full((1, 1), 2.0**17))
    with pytest.raises(CannotStore, match="largest error inf"):
        blocks.pack("w", weight)


def write(path, tensors, metadata):
    with container.Writer(path) as file:
        for name, (kind, shape, data) in tensors.items():
            file.add(name, kind, shape, data)
        file.finish(metadata)


METADATA = {"general.architecture": "llama", "a.int": 7, "a.float": 0.5, "a.flag": True,
            "a.words": ["é", "", "x"], "a.ints": [-1, 2], "a.floats": [0.25, -1.0]}  # fmt: skip


def test_container_round_trip_and_the_package_reads_it(tmp_path):
    path = tmp_path / "m.gguf"
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    q8 = np.arange(34, dtype=np.uint8)
    write(
        path, {"a": ("F32", (2, 3), data), "b": ("Q8_0", (1, 32), q8), "c": ("F32", (3,), data[0])}, METADATA
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    file = container.Reader(path)
    assert file.metadata == METADATA
    assert {n: (i.kind, i.shape) for n, i in file.tensors.items()} == {
        "a": ("F32", (2, 3)), "b": ("Q8_0", (1, 32)), "c": ("F32", (3,)),
    }  # fmt: skip
    assert np.array_equal(file.raw("a").view(np.float32), data) and np.array_equal(file.raw("b")[0], q8)
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    peer = package.GGUFReader(path)
    assert {t.name: t.data.tobytes() for t in peer.tensors} == {n: file.raw(n).tobytes() for n in "abc"}
    assert {k: peer.fields[k].contents() for k in METADATA} == METADATA


def test_reads_what_the_package_wrote(tmp_path):
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    path = tmp_path / "peer.gguf"
    writer = package.GGUFWriter(path, "llama")
    writer.add_array("words", ["a", "bc"])
    writer.add_uint64("big", 1 << 40)
    data = np.arange(8, dtype=np.float16).reshape(2, 4)
    writer.add_tensor("t", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = container.Reader(path)
    assert file.metadata == {"general.architecture": "llama", "words": ["a", "bc"], "big": 1 << 40}
    assert file.tensors["t"].shape == (2, 4) and file.raw("t").tobytes() == data.tobytes()


def test_damage_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, {"a": ("F32", (64,), np.zeros(64, np.float32))}, METADATA)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(CannotRead, match="truncated: a ends at byte"):
        container.Reader(path)
    path.write_bytes(whole[:60])
    with pytest.raises(CannotRead, match="header is damaged or truncated"):
        container.Reader(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(CannotRead, match="no GGUF file"):
        container.Reader(path)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match="takes 8"), container.Writer(path) as file:
        file.add("a", "F32", (2,), b"1234")
    with pytest.raises(ValueError, match="twice"), container.Writer(path) as file:
        file.add("a", "F32", (1,), b"1234")
        file.add("a", "F32", (1,), b"1234")
    assert list(tmp_path.iterdir()) == []
