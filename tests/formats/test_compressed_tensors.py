"""compressed-tensors: hand-computed words, the peer's own files, and exact round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from quantkit.formats import CannotRead, CannotStore, modules_of
from quantkit.formats import compressed_tensors as fmt
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from tests import golden
from tests.formats.cases import golden_qweight, qweights, random_qweight

W4 = Scheme(4, True, 8)
W8A8 = Scheme(8, True, 0, activation="int8")


def round_trip(q: QuantWeight, **changes) -> QuantWeight:
    config = fmt.config({"m": q.scheme}, []) | changes
    return fmt.unpack("m", fmt.pack("m", q, config), config)


def test_words_by_hand():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [15, 0, 0, 0, 0, 0, 0, 15]], dtype=torch.uint8)
    zero = torch.tensor([[3], [10]], dtype=torch.uint8)
    q = QuantWeight(Scheme(4, False, 8), codes, torch.ones(2, 1, dtype=torch.bfloat16), zero)
    out = fmt.pack("m", q)
    assert out["m.weight_packed"].tolist() == [[0x87654321 - (1 << 32)], [0xF000000F - (1 << 32)]]
    assert out["m.weight_zero_point"].tolist() == [[0xA3]]  # along the outputs: 3 | 10 << 4
    assert out["m.weight_shape"].tolist() == [2, 8]


def test_three_bits_cross_words_and_five_codes_leave_the_rest_zero():
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 10] = 7  # bits 30, 31 of the first word and bit 0 of the second
    q = QuantWeight(Scheme(3), codes, torch.ones(1, 1, dtype=torch.bfloat16))
    assert fmt.pack("m", q)["m.weight_packed"].tolist() == [[0xC0000000 - (1 << 32), 1]]


def test_w8a8_by_hand():
    q = QuantWeight(
        W8A8, torch.tensor([[0, 128, 255, 127]], dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16)
    )
    out = fmt.pack("m", q)
    assert out["m.weight"].dtype == torch.int8 and out["m.weight"].tolist() == [[-128, 0, 127, -1]]
    assert set(out) == {"m.weight", "m.weight_scale"}


@pytest.mark.parametrize("name", golden.names("ct_pack"))
def test_packed_equals_the_peer(name):
    tensors, meta = golden.load(name)
    symmetric = meta["symmetric"] == "True"
    q = golden_qweight(tensors, meta, symmetric)
    out = fmt.pack("m", q)
    assert ("m.weight_zero_point" in out) != symmetric
    for key in ("weight_packed", "weight_shape", *(() if symmetric else ("weight_zero_point",))):
        peer = tensors[f"ct.{key}"]
        assert out[f"m.{key}"].dtype == peer.dtype and torch.equal(out[f"m.{key}"], peer), key
    assert torch.equal(out["m.weight_scale"], tensors["ct.weight_scale_f16"])


@pytest.mark.parametrize("name", golden.names("ct_pack") + golden.names("ct_int8") + golden.names("ct_naive"))
def test_reads_the_peer(name):
    tensors, meta = golden.load(name)
    symmetric = meta["symmetric"] == "True"
    want = golden_qweight(tensors, meta, symmetric)
    stored = {f"m.{k[3:].removesuffix('_f16')}": v for k, v in tensors.items() if k.startswith("ct.")}
    weights = fmt.config({"m": want.scheme}, [])["config_groups"]["group_0"]["weights"]
    config = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": meta["format"]}}
    }
    assert fmt.unpack("m", stored, config).same_as(want) is None


def test_writes_the_peers_int8():
    tensors, _ = golden.load("ct_int8_sym_channel")
    q = QuantWeight(Scheme(8, True, 0, "float16", "int8"), tensors["codes"], tensors["scales"])
    out = fmt.pack("m", q)
    assert torch.equal(out["m.weight"], tensors["ct.weight"])
    assert torch.equal(out["m.weight_scale"], tensors["ct.weight_scale_f16"])


@settings(max_examples=60, deadline=None)
@given(qweights(unit=1))
def test_round_trip_of_any_shape(q):
    if fmt.why_not(q.scheme, *q.shape):
        pytest.fail(f"{q.scheme} of {q.shape} is refused")
    packed = fmt.pack("m", q)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in packed.items()} == fmt.layout("m", *q.shape, q.scheme)
    back = round_trip(q)
    assert back.same_as(q) is None and back.scheme == q.scheme


def test_round_trip_w8a8():
    q = random_qweight(7, 33, W8A8)
    back = round_trip(q)
    assert back.same_as(q) is None and back.scheme == W8A8
    assert {n: (t.dtype, tuple(t.shape)) for n, t in fmt.pack("m", q).items()} == fmt.layout("m", 7, 33, W8A8)


@pytest.mark.parametrize("scheme, columns, words", [
    (Scheme(4, True, 128), 576, "use group 64"),
    (Scheme(4, True, 64), 100, "one scale per row"),
    (Scheme(4, True, 64, "float32"), 64, "float32"),
])  # fmt: skip
def test_refuses(scheme, columns, words):
    assert words in fmt.why_not(scheme, 32, columns)
    with pytest.raises(CannotStore, match=r"^m: "):
        fmt.pack("m", random_qweight(32, columns, scheme))


def test_refuses_dynamic_groups():
    q = random_qweight(4, 32, W4, order=True)
    with pytest.raises(CannotStore, match="static groups"):
        fmt.pack("m", q)
    with pytest.raises(CannotStore, match="static groups"):
        fmt.config({"m": W4}, [], order="dynamic")
    assert (
        fmt.config({"m": W4}, [], order="static")["config_groups"]["group_0"]["weights"]["actorder"]
        == "static"
    )


def test_ten_codes_a_word_of_older_releases():
    q = random_qweight(20, 64, Scheme(3, False, 32))

    def padded(codes):  # ten codes in a 32-bit word, two bits unused
        out = torch.zeros(codes.shape[0], -(-codes.shape[1] // 10), dtype=torch.int32)
        for i in range(codes.shape[1]):
            out[:, i // 10] |= codes[:, i].int() << (3 * (i % 10))
        return out

    stored = fmt.pack("m", q)
    old = stored | {
        "m.weight_packed": padded(q.codes),
        "m.weight_zero_point": padded(q.zero.T).T.contiguous(),
    }
    assert old["m.weight_packed"].shape != stored["m.weight_packed"].shape
    assert fmt.unpack("m", old, fmt.config({"m": q.scheme}, [])).same_as(q) is None


def test_group_order_of_older_releases():
    q = random_qweight(4, 64, Scheme(4, True, 16), order=True)
    plain = QuantWeight(q.scheme, q.codes, q.scale)
    stored = fmt.pack("m", plain) | {"m.weight_g_idx": q.columns_to_groups().int()}
    assert fmt.unpack("m", stored, fmt.config({"m": q.scheme}, [])).same_as(q) is None


def test_config_of_one_scheme():
    config = fmt.config({"a.q_proj": W4, "a.k_proj": W4}, ["a.gate"])
    assert config["format"] == "pack-quantized" and config["ignore"] == ["a.gate", "lm_head"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, "dynamic": False,
    }  # fmt: skip
    head = fmt.config({"a.q_proj": W4, "lm_head": W4}, [])
    assert head["ignore"] == [] and head["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head$"]


def test_config_of_several_schemes_names_each_module():
    eight = Scheme(8, False)
    config = fmt.config({"a.q": W4, "a.up": W8A8, "a.k": W4, "a.o": eight, "lm_head": eight}, ["a.r"])
    assert config["format"] == "mixed-precision"
    assert [g["targets"] for g in config["config_groups"].values()] == [
        ["a.q", "a.k"],
        ["a.up"],
        ["a.o", "re:.*lm_head$"],
    ]
    assert [g["format"] for g in config["config_groups"].values()] == [
        "pack-quantized",
        "int-quantized",
        "pack-quantized",
    ]
    for name, scheme in (("a.k", W4), ("a.up", W8A8), ("lm_head", eight)):
        q = random_qweight(16, 24, scheme)
        back = fmt.unpack(name, fmt.pack(name, q, config), config)
        assert back.same_as(q) is None and back.scheme == scheme
    with pytest.raises(CannotRead, match="no config group"):
        fmt.group_for("a.other", config)


def test_modules_are_found_among_tensor_names():
    names = [
        "a.weight_packed",
        "a.weight_scale",
        "a.weight_shape",
        "b.weight",
        "b.weight_scale",
        "b.bias",
        "n.weight",
    ]
    assert modules_of(fmt, names) == {
        "a": ["a.weight_packed", "a.weight_scale", "a.weight_shape"],
        "b": ["b.weight", "b.weight_scale"],
    }


def test_contradictions_are_named():
    q = random_qweight(8, 64, Scheme(4, True, 32))
    stored, config = fmt.pack("m", q), fmt.config({"m": q.scheme}, [])
    weights = config["config_groups"]["group_0"]["weights"]
    with pytest.raises(CannotRead, match=r"group size 16 .* hold 2 groups .* group size 32"):
        fmt.unpack(
            "m",
            stored,
            config
            | {"config_groups": {"g": {"targets": ["Linear"], "weights": weights | {"group_size": 16}}}},
        )
    with pytest.raises(CannotRead, match="would be 4-bit"):
        fmt.unpack(
            "m",
            stored,
            config | {"config_groups": {"g": {"targets": ["Linear"], "weights": weights | {"num_bits": 8}}}},
        )
    with pytest.raises(CannotRead, match=r"m.weight_shape is missing"):
        fmt.unpack("m", {k: v for k, v in stored.items() if "shape" not in k}, config)
    with pytest.raises(CannotRead, match="weight_zero_point is missing"):
        fmt.unpack(
            "m",
            stored,
            config
            | {"config_groups": {"g": {"targets": ["Linear"], "weights": weights | {"symmetric": False}}}},
        )
    with pytest.raises(CannotRead, match="says that the weight is symmetric"):
        fmt.unpack("m", stored | {"m.weight_zero_point": torch.ones(1, 2, dtype=torch.int32)}, config)
    with pytest.raises(CannotRead, match=r"the model needs \(8, 32\)"):
        fmt.unpack("m", stored, config, (8, 32))
    static = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {"num_bits": 8, "dynamic": False},
    }
    with pytest.raises(CannotRead, match="dynamic=False"):
        fmt.unpack("m", stored, {"config_groups": {"g": static}})
