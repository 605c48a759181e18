"""compressed-tensors: the checkpoint format of llm-compressor, read by vLLM, SGLang and transformers.

Layouts (verified against compressed-tensors 0.20.1, see tests/formats):

pack-quantized, weight only
    ``weight_packed`` int32 ``[out, ceil(in*bits/32)]``, the bit stream of packing.py along ``in``;
    ``weight_scale [out, groups]``; ``weight_shape`` int64 ``[2]``; only for asymmetric weights
    ``weight_zero_point`` int32 ``[ceil(out*bits/32), groups]``, the same stream along ``out``.
int-quantized, 8-bit weights and dynamic 8-bit activations
    ``weight`` int8 ``[out, in]`` = code - 128; ``weight_scale [out, 1]``.

Read besides: naive-quantized (int8 codes of any width), int8 zero points, one scale per tensor,
``weight_g_idx`` of actorder "group", and 3-bit words of compressed-tensors <= 0.17 (ten codes each).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit import packing
from quantkit.formats._common import (
    CannotRead,
    CannotStore,
    Layout,
    checked_group,
    exact_scale,
    is_ordered,
    make_scheme,
    need,
    order_from_index,
    refuse_ragged,
    scale_dtype_name,
)
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

NAME = "compressed-tensors"
DESCRIPTION = "vLLM, SGLang and transformers: packed 2/3/4/8-bit weights, or 8-bit weights and activations"

marker = ".weight_scale"
suffixes = (
    ".weight",
    ".weight_packed",
    ".weight_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".input_scale",
    ".input_zero_point",
)

VERSION = "0.20.1"  # of compressed-tensors, whose layout this is (3-bit words are dense since 0.18)
HEAD = "re:.*lm_head$"  # vLLM's head class is no "Linear"; only a pattern reaches it


def why_not(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Why a weight ``[rows, columns]`` of this scheme cannot be stored exactly, or None."""
    if scheme.scale_dtype == "float32":
        return "loaders round float32 scales to the model's dtype; use scale_dtype bfloat16 or float16"
    return refuse_ragged(scheme, columns)


def layout(module: str, rows: int, columns: int, scheme: Scheme) -> Layout:
    """Name, dtype and shape of every tensor that ``pack`` writes."""
    groups = scheme.groups(columns)
    scale = (getattr(torch, scheme.scale_dtype), (rows, groups))
    if scheme.activation:
        return {f"{module}.weight": (torch.int8, (rows, columns)), f"{module}.weight_scale": scale}
    out: Layout = {
        f"{module}.weight_packed": (torch.int32, (rows, packing.packed_words(columns, scheme.bits))),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": (torch.int64, (2,)),
    }
    if not scheme.symmetric:
        words = packing.packed_words(rows, scheme.bits)
        out[f"{module}.weight_zero_point"] = (torch.int32, (words, groups))
    return out


def pack(module: str, qweight: QuantWeight, config: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors that replace ``<module>.weight``; ``config`` does not change them. Raises CannotStore."""
    scheme, (rows, columns) = qweight.scheme, qweight.shape
    reason = why_not(scheme, rows, columns)
    if reason:
        raise CannotStore(f"{module}: {reason}")
    if is_ordered(qweight):
        raise CannotStore(
            f"{module}: compressed-tensors has dropped groups that follow an act-order (weight_g_idx); "
            "solve with static groups instead"
        )
    scale = exact_scale(module, qweight.scale, getattr(torch, scheme.scale_dtype)).contiguous()
    if scheme.activation:
        signed = (qweight.codes.to(torch.int16) - scheme.midpoint).to(torch.int8)
        return {f"{module}.weight": signed, f"{module}.weight_scale": scale}
    out = {
        f"{module}.weight_packed": packing.pack(qweight.codes, scheme.bits),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if qweight.zero is not None:
        out[f"{module}.weight_zero_point"] = packing.pack(
            qweight.zero.T.contiguous(), scheme.bits
        ).T.contiguous()
    return out


def config(
    quantized: Mapping[str, Scheme], unquantized: Sequence[str], *, order: str | None = None
) -> dict[str, Any]:
    """``quantization_config``: one config group a scheme, every unquantized linear named in ``ignore``.

    quantized, unquantized: full module names. order: see formats/__init__; "static" is written as actorder.
    """
    if order == "dynamic":
        raise CannotStore(
            "compressed-tensors has dropped groups that follow an act-order; solve with static groups"
        )
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in quantized.items():
        by_scheme.setdefault(scheme.with_(scale_dtype="bfloat16"), []).append(module)
    groups = {}
    for i, (scheme, modules) in enumerate(by_scheme.items()):
        heads = [HEAD] if any(_is_head(m) for m in modules) else []
        # A single scheme is named by class; "ignore" takes the exceptions out. Several need every name.
        names = ["Linear"] if len(by_scheme) == 1 else [m for m in modules if not _is_head(m)]
        groups[f"group_{i}"] = {
            "targets": names + heads,
            "format": _format(scheme),
            "weights": _weight_args(scheme, order),
            "input_activations": _ACTIVATIONS if scheme.activation else None,
            "output_activations": None,
        }
    formats = {g["format"] for g in groups.values()}
    ignore = list(unquantized)
    if not any(_is_head(m) for m in (*quantized, *ignore)):
        ignore.append("lm_head")  # tied heads have no tensor but are a Linear all the same
    return {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": VERSION,
    }


def side_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """None are needed."""
    return {}


def matches(quantization_config: Mapping[str, Any]) -> bool:
    return quantization_config.get("quant_method") == NAME


def unpack(
    module: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shape: tuple[int, int] | None = None,
) -> QuantWeight:
    """The QuantWeight behind a module's tensors. Raises CannotRead when they contradict the configuration."""
    group = group_for(module, config)
    args = group["weights"]
    bits, symmetric = args["num_bits"], args.get("symmetric", True)
    if args.get("type", "int") != "int":
        raise CannotRead(
            f"{module}: {args['type']}-quantized weights ({group.get('format')}) are no integer grid"
        )
    scale = need(tensors, f"{module}.weight_scale")
    ten_a_word = False
    if f"{module}.weight_packed" in tensors:
        stored = tuple(need(tensors, f"{module}.weight_shape").tolist())
        if shape is not None and stored != tuple(shape):
            raise CannotRead(f"{module}: weight_shape says {stored}, the model needs {tuple(shape)}")
        rows, columns = stored
        words = tensors[f"{module}.weight_packed"]
        ten_a_word = bits == 3 and words.shape[-1] == -(-columns // 10) != packing.packed_words(columns, 3)
        codes = _unpack_words(f"{module}.weight_packed", words, bits, columns, ten_a_word)
    else:
        signed = need(tensors, f"{module}.weight")
        if signed.dtype != torch.int8:
            raise CannotRead(
                f"{module}: weight is {signed.dtype}, expected int8 codes or a weight_packed tensor"
            )
        rows, columns = signed.shape
        codes = _unsigned(f"{module}.weight", signed, bits)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(rows, 1).contiguous()  # strategy "tensor"
    scheme = make_scheme(
        module,
        bits=bits,
        symmetric=symmetric,
        group=checked_group(module, columns, scale.shape[-1], _configured_group(args)),
        scale_dtype=scale_dtype_name(module, scale),
        activation=_activation(module, group.get("input_activations")),
    )
    zero = _zero(module, tensors, scheme, rows, ten_a_word)
    g_idx = tensors.get(f"{module}.weight_g_idx")
    order = None if g_idx is None else order_from_index(module, g_idx, scheme.group)
    return QuantWeight(scheme, codes, scale, zero, order)


def group_for(module: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config group that a module belongs to: exact names and patterns before class names."""
    by_class = None
    for group in config.get("config_groups", {}).values():
        for target in group["targets"]:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return group
            if by_class is None and "." not in target and not target.startswith("re:"):
                by_class = group
    if by_class is None:
        raise CannotRead(
            f"{module} holds quantized tensors, but no config group of quantization_config targets it"
        )
    return by_class


_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _is_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"


def _format(scheme: Scheme) -> str:
    return "int-quantized" if scheme.activation else "pack-quantized"


def _weight_args(scheme: Scheme, order: str | None) -> dict[str, Any]:
    # vLLM and SGLang pin older releases of compressed-tensors, which refuse keys they do not know
    args = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    if order == "static":
        args["actorder"] = "static"
    return args


def _configured_group(args: Mapping[str, Any]) -> int | None:
    if args.get("strategy") in ("channel", "tensor"):
        return 0
    return args.get("group_size")


def _activation(module: str, args: Mapping[str, Any] | None) -> str | None:
    if args is None:
        return None
    different = [k for k, v in _ACTIVATIONS.items() if args.get(k, v) != v]
    if different:
        raise CannotRead(
            f"{module}: input_activations with {different[0]}={args[different[0]]!r}; "
            "quantkit reads dynamic symmetric 8-bit activations per token only"
        )
    return "int8"


def _unpack_words(name: str, words: Tensor, bits: int, count: int, ten_a_word: bool) -> Tensor:
    """Codes along the last axis. ten_a_word: 3-bit words of old releases, whose top two bits are unused."""
    have, dense = words.shape[-1], packing.packed_words(count, bits)
    if ten_a_word and have == -(-count // 10):
        lanes = torch.arange(10, dtype=torch.int32) * 3
        codes = (words.unsqueeze(-1) >> lanes) & 7
        return codes.flatten(-2)[..., :count].to(torch.uint8).contiguous()
    if have == dense:
        return packing.unpack(words, bits, count)
    guess = [b for b in (2, 3, 4, 8) if packing.packed_words(count, b) == have]
    hint = (
        f"; that many would be {guess[0]}-bit" if guess else "; the tensor is truncated or of another module"
    )
    raise CannotRead(f"{name}: {have} words a row, but {count} codes of {bits} bits take {dense}{hint}")


def _unsigned(name: str, signed: Tensor, bits: int) -> Tensor:
    codes = signed.to(torch.int16) + 2 ** (bits - 1)
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 2**bits):
        raise CannotRead(f"{name}: values {int(signed.min())}..{int(signed.max())} do not fit in {bits} bits")
    return codes.to(torch.uint8)


def _zero(
    module: str, tensors: Mapping[str, Tensor], scheme: Scheme, rows: int, ten_a_word: bool
) -> Tensor | None:
    name = f"{module}.weight_zero_point"
    if scheme.symmetric:
        # some writers leave zero points of 0 (signed) beside a symmetric weight; anything else is a conflict
        extra = tensors.get(name)
        if extra is not None and (extra.dtype != torch.int8 or bool(extra.any())):
            raise CannotRead(f"{name} exists, but the configuration says that the weight is symmetric")
        return None
    packed = need(tensors, name)
    if packed.dtype == torch.int8:
        zero = _unsigned(name, packed, scheme.bits)
        return zero.reshape(1, 1).expand(rows, 1).contiguous() if zero.numel() == 1 else zero
    return _unpack_words(name, packed.T.contiguous(), scheme.bits, rows, ten_a_word).T.contiguous()
