"""AWQ files: hand-computed words, AutoAWQ's own files, and exact round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from quantkit.formats import CannotRead, CannotStore
from quantkit.formats import awq as fmt
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from tests import golden
from tests.formats.cases import golden_qweight, qweights, random_qweight

W4 = Scheme(4, False, 32)


def test_word_by_hand():
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 2)  # output j holds j
    q = QuantWeight(Scheme(4), codes, torch.ones(8, 1))
    out = fmt.pack("m", q)
    # nibbles from the lowest: 0 2 4 6 1 3 5 7
    assert out["m.qweight"].tolist() == [[0x75316420], [0x75316420]]
    assert out["m.qzeros"].tolist() == [[0x88888888 - (1 << 32)]]


@pytest.mark.parametrize("name", golden.names("awq_gemm"))
def test_equals_the_peer(name):
    tensors, meta = golden.load(name)
    symmetric = meta["zero_point"] == "False"
    q = golden_qweight(tensors, meta, symmetric)
    out = fmt.pack("m", q)
    peer = {
        "m.qweight": tensors["qweight"],
        "m.qzeros": tensors["qzeros"],
        "m.scales": tensors["scales_packed"],
    }
    for key, value in peer.items():
        assert out[key].dtype == value.dtype and torch.equal(out[key], value), key
    config = fmt.config({"m": q.scheme}, [])
    assert fmt.unpack("m", peer, config).same_as(q) is None
    autoawq = {"quant_method": "awq", "bits": 4, "group_size": int(meta["group_size"]), "zero_point": True}
    assert fmt.unpack("m", peer, autoawq, (96, 512)).same_as(q) is None


def test_reads_gemv_and_names_what_it_does_not_read():
    tensors, meta = golden.load("awq_gemv_b4_asym_g128")
    q = golden_qweight(tensors, meta, False)
    peer = {
        "m.qweight": tensors["qweight"],
        "m.qzeros": tensors["qzeros"],
        "m.scales": tensors["scales_packed"],
    }
    config = fmt.config({"m": q.scheme}, []) | {"version": "gemv"}
    assert fmt.unpack("m", peer, config).same_as(q) is None
    with pytest.raises(CannotRead, match="'gemv_fast' is not read"):
        fmt.unpack("m", peer, config | {"version": "gemv_fast"})


@settings(max_examples=50, deadline=None)
@given(qweights(bits=(4,)))
def test_round_trip(q):
    packed = fmt.pack("m", q)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in packed.items()} == fmt.layout("m", *q.shape, q.scheme)
    back = fmt.unpack("m", packed, fmt.config({"m": q.scheme}, []), q.shape)
    assert back.same_as(q) is None
    assert back.scheme == q.scheme.with_(scale_dtype="float16")


@pytest.mark.parametrize("scheme, rows, columns, words", [
    (Scheme(8), 8, 8, "4-bit"), (Scheme(3), 8, 8, "4-bit"), (Scheme(8, activation="int8"), 8, 8, "4-bit"),
    (W4, 12, 32, "12 outputs"), (Scheme(4, True, 128), 8, 576, "use group 64"),
    (W4.with_(scale_dtype="float32"), 8, 32, "float16"),
])  # fmt: skip
def test_refuses(scheme, rows, columns, words):
    assert words in fmt.why_not(scheme, rows, columns)
    with pytest.raises(CannotStore, match=r"^m: "):
        fmt.pack("m", random_qweight(rows, columns, scheme))


def test_config_and_what_it_cannot_say():
    config = fmt.config({"l.0.mlp.up_proj": W4, "l.1.mlp.up_proj": W4}, ["l.0.mlp.gate", "lm_head"])
    assert config["modules_to_not_convert"] == ["l.0.mlp.gate"] and config["group_size"] == 32
    assert config["zero_point"] is True and config["sym"] is False
    assert fmt.config({"a": W4}, ["lm_head"])["modules_to_not_convert"] is None
    with pytest.raises(CannotStore, match="one group size"):
        fmt.config({"a": W4, "b": Scheme(4)}, [])
    with pytest.raises(CannotStore, match=r"l\.0\.mlp\.gate would also exclude l\.0\.mlp\.gate_proj"):
        fmt.config({"l.0.mlp.gate_proj": W4}, ["l.0.mlp.gate"])
    with pytest.raises(CannotStore, match="float head"):
        fmt.config({"lm_head": W4}, [])
    with pytest.raises(CannotStore, match="g_idx"):
        fmt.config({"a": W4}, [], order="dynamic")
    with pytest.raises(CannotStore, match="g_idx"):
        fmt.pack("m", random_qweight(8, 64, W4, order=True))


def test_contradictions_are_named():
    q = random_qweight(16, 64, W4)
    packed, config = fmt.pack("m", q), fmt.config({"m": q.scheme}, [])
    with pytest.raises(CannotRead, match="group size 32"):
        fmt.unpack("m", packed, config | {"group_size": 64})
    with pytest.raises(CannotRead, match="not all zero points are 8"):
        fmt.unpack("m", packed, config | {"sym": True})
    with pytest.raises(CannotRead, match="damaged"):
        fmt.unpack("m", packed | {"m.qzeros": packed["m.qzeros"][:1]}, config)
    with pytest.raises(CannotRead, match="the model needs"):
        fmt.unpack("m", packed, config, (64, 16))
