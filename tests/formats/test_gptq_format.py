"""GPTQ files: hand-computed words, the peer's own files in both conventions, and exact round trips."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings

from quantkit.formats import CannotRead, CannotStore
from quantkit.formats import gptq as fmt
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from tests import golden
from tests.formats.cases import golden_qweight, qweights, random_qweight

W4 = Scheme(4, True, 32)


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def config_of(q: QuantWeight, version: str | None = None, **changes) -> dict:
    order = None if q.order is None else "dynamic"
    return fmt.config({"m": q.scheme}, [], order=order, checkpoint_format=version) | changes


def test_words_by_hand():
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[1, :8] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    q = QuantWeight(Scheme(4, True), codes, torch.full((32, 1), 0.5))
    out = fmt.pack("m", q)
    assert out["m.qweight"].shape == (4, 32)
    assert out["m.qweight"][:, 1].tolist() == [signed(0x87654321), 0, 0, 0]  # word k//8 of column 1
    assert out["m.qzeros"].tolist() == [[0x77777777] * 4]  # v1 stores 8 - 1
    assert out["m.g_idx"].tolist() == [0] * 32
    assert out["m.scales"].dtype == torch.float16
    v2 = fmt.pack("m", q, config_of(q, "gptq_v2"))
    assert v2["m.qzeros"].tolist() == [[signed(0x88888888)] * 4]


def test_borrow_of_v1_by_hand():
    # zero points 0,1,0,...: gptqmodel computes 0x00000010 - 0x11111111 on the whole word
    word = torch.tensor([[signed((0x00000010 - 0x11111111) & 0xFFFFFFFF)]], dtype=torch.int32)
    assert fmt.read_zeros(word, 4, 8, "gptq").tolist() == [[0, 1, 0, 0, 0, 0, 0, 0]]
    assert fmt.read_zeros(torch.tensor([[0x77777777]], dtype=torch.int32), 4, 8, "gptq").tolist() == [[8] * 8]


@pytest.mark.parametrize("name", golden.names("gptq_b"))
def test_equals_the_peer_both_ways(name):
    tensors, meta = golden.load(name)
    symmetric = meta["sym"] == "True"
    q = golden_qweight(tensors, meta, symmetric)
    config = config_of(q, "gptq_v2", desc_act=meta["desc_act"] == "True")
    out = fmt.pack("m", q, config)
    peer = {
        "m.qweight": tensors["qweight"],
        "m.scales": tensors["scales_packed"],
        "m.g_idx": tensors["g_idx"],
    }
    peer_v2, peer_v1 = ({**peer, "m.qzeros": tensors[f"qzeros_{v}"]} for v in ("v2", "v1"))
    for key, value in peer_v2.items():
        assert out[key].dtype == value.dtype and torch.equal(out[key], value), key
    assert fmt.unpack("m", peer_v2, config).same_as(q) is None
    old = {k: v for k, v in config.items() if k not in ("checkpoint_format", "format")}  # means v1
    assert fmt.unpack("m", peer_v1, old).same_as(q) is None
    if bool(tensors["zeros"].all()):
        v1 = fmt.pack("m", q, config | {"checkpoint_format": "gptq"})
        assert torch.equal(v1["m.qzeros"], tensors["qzeros_v1"])
    else:
        with pytest.raises(CannotStore, match="zero points are 0"):
            fmt.pack("m", q, config | {"checkpoint_format": "gptq"})


@settings(max_examples=60, deadline=None)
@given(qweights(unit=32, groups=(16, 32, 64)))
def test_round_trip(q):
    if fmt.why_not(q.scheme, *q.shape):  # group 16 may give 16 columns
        with pytest.raises(CannotStore):
            fmt.pack("m", q)
        return
    config = config_of(q)
    packed = fmt.pack("m", q, config)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in packed.items()} == fmt.layout("m", *q.shape, q.scheme)
    back = fmt.unpack("m", packed, config)
    assert back.same_as(q) is None
    assert back.scheme == q.scheme.with_(scale_dtype="float16")
    assert (
        fmt.unpack("m", fmt.pack("m", q), config, q.shape).same_as(q) is None
    )  # pack alone chooses the same


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_v1_takes_zero_points_from_one_up(bits):
    q = random_qweight(64, 96, Scheme(bits, False, 32))
    q = QuantWeight(q.scheme, q.codes, q.scale, q.zero.clamp(min=1))
    config = config_of(q, "gptq")
    assert fmt.unpack("m", fmt.pack("m", q, config), config).same_as(q) is None


def test_act_order_is_announced_or_refused():
    q = random_qweight(32, 128, W4, order=True)
    config = config_of(q)
    assert config["desc_act"] is True
    out = fmt.pack("m", q, config)
    assert not torch.equal(out["m.g_idx"].sort().values, out["m.g_idx"])
    assert fmt.unpack("m", out, config).same_as(q) is None
    with pytest.raises(CannotStore, match="desc_act"):
        fmt.pack("m", q, config | {"desc_act": False})
    broken = out | {"m.g_idx": torch.where(out["m.g_idx"] == 3, 2, out["m.g_idx"])}
    with pytest.raises(CannotRead, match="g_idx"):
        fmt.unpack("m", broken, config)


@pytest.mark.parametrize("scheme, rows, columns, words", [
    (W4, 32, 48, "48 inputs"), (W4, 40, 64, "40 outputs"), (Scheme(4, True, 128), 32, 576, "use group 64"),
    (Scheme(4, True, 24), 32, 96, "not 24"), (Scheme(8, activation="int8"), 32, 32, "compressed-tensors"),
    (W4.with_(scale_dtype="float32"), 32, 32, "float16"),
])  # fmt: skip
def test_refuses(scheme, rows, columns, words):
    assert words in fmt.why_not(scheme, rows, columns)
    with pytest.raises(CannotStore, match=r"^m: "):
        fmt.pack("m", random_qweight(rows, columns, scheme))


def test_refuses_scales_that_float16_would_round():
    q = QuantWeight(
        W4, torch.zeros(32, 32, dtype=torch.uint8), torch.full((32, 1), 2.0**-20 * 1.5, dtype=torch.bfloat16)
    )
    fmt.pack("m", q)  # 1.5 * 2**-20 is a subnormal of float16, and exact
    q = QuantWeight(W4, q.codes, q.scale / 256)
    with pytest.raises(CannotStore, match="largest error"):
        fmt.pack("m", q)


def test_config_of_a_mixed_model_reads_back():
    eight = Scheme(8, True)
    names = {f"model.layers.{i}.self_attn.{p}_proj": W4 for i in range(12) for p in "qkv"}
    names |= {f"model.layers.{i}.mlp.up_proj": eight for i in (0, 11)}
    config = fmt.config(names, ["model.layers.1.mlp.gate", "lm_head"])
    assert (config["bits"], config["group_size"], config["sym"], config["lm_head"]) == (4, 32, True, False)
    for name, scheme in names.items():
        assert fmt.settings_for(name, config) == {
            "bits": scheme.bits,
            "group_size": scheme.group or -1,
            "sym": True,
        }
    with pytest.raises(CannotRead, match="excludes"):
        fmt.settings_for("model.layers.1.mlp.gate", config)
    assert (
        fmt.settings_for("model.layers.1.mlp.up_proj", config)["bits"] == 4
    )  # only layers 0 and 11 are eight
    assert ["model.layers.11.mlp.up_proj"] in config["modules_in_block_to_quantize"]
    assert json.loads(fmt.side_files(config)["quantize_config.json"]) == config


def test_exclusions_reach_fused_modules():
    config = fmt.config(
        {"model.layers.0.mlp.down_proj": W4}, [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    )
    (pattern,) = config["dynamic"]
    assert re.match(pattern[2:], "model.layers.0.self_attn.qkv_proj")
    assert not re.match(pattern[2:], "model.layers.0.self_attn.o_proj")
    assert fmt.config({"model.layers.0.mlp.down_proj": W4}, ["lm_head"]).keys().isdisjoint(["dynamic"])


def test_asymmetric_checkpoints_are_v2_and_symmetric_ones_v1():
    assert fmt.config({"a": W4}, [])["checkpoint_format"] == "gptq"
    mixed = fmt.config({"a": W4, "b": Scheme(4, False, 32)}, [])
    assert mixed["checkpoint_format"] == mixed["format"] == "gptq_v2"
    for name, scheme in (("a", W4), ("b", Scheme(4, False, 32))):
        q = random_qweight(32, 64, scheme)
        assert fmt.unpack(name, fmt.pack(name, q, mixed), mixed).same_as(q) is None


def test_wrong_convention_is_named():
    q = random_qweight(32, 64, W4)
    v1, v2 = config_of(q, "gptq"), config_of(q, "gptq_v2")
    with pytest.raises(CannotRead, match="written as checkpoint_format 'gptq'"):
        fmt.unpack("m", fmt.pack("m", q, v1), v2)
    with pytest.raises(CannotRead, match="written as checkpoint_format 'gptq_v2'"):
        fmt.unpack("m", fmt.pack("m", q, v2), v1)
    one_off = fmt.pack("m", q, v1)
    one_off["m.qzeros"] = one_off["m.qzeros"].clone()
    one_off["m.qzeros"][0, 0] = 0
    with pytest.raises(CannotRead, match="not all 8"):
        fmt.unpack("m", one_off, v1)


def test_contradictions_are_named():
    q = random_qweight(32, 64, W4)
    config = config_of(q)
    packed = fmt.pack("m", q, config)
    with pytest.raises(CannotRead, match="looks like 4 bits"):
        fmt.unpack("m", packed, config | {"bits": 8})
    with pytest.raises(CannotRead, match=r"one scale per row.*2 groups of 64 columns, that is group size 32"):
        fmt.unpack("m", packed, config | {"group_size": -1})
    with pytest.raises(CannotRead, match=r"m.qzeros is missing"):
        fmt.unpack("m", {k: v for k, v in packed.items() if "zeros" not in k}, config)
    with pytest.raises(CannotRead, match="checkpoint_format 'marlin'"):
        fmt.unpack("m", packed, config | {"checkpoint_format": "marlin"})


def test_auto_round_packs_as_gptq():
    config = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
    }
    q = random_qweight(32, 64, W4)
    assert fmt.matches(config) and not fmt.matches(config | {"packing_format": "auto_round:auto_awq"})
    packed = {k: v for k, v in fmt.pack("m", q, config_of(q, "gptq")).items() if "g_idx" not in k}
    assert fmt.unpack("m", packed, config).same_as(q) is None
