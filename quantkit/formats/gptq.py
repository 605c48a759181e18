"""GPTQ: the checkpoint format of AutoGPTQ and GPTQModel, read by vLLM, SGLang, TGI, transformers, llama.cpp.

Per module (verified against gptqmodel 7.7.0, see tests/formats), all with the bit stream of packing.py::

    qweight  int32 [in*bits/32, out]      along in
    qzeros   int32 [groups, out*bits/32]  along out
    scales   fp16  [groups, out]
    g_idx    int32 [in]                   group of each input column; always written, some loaders require it

Zero points come in two conventions. "gptq_v2" stores the zero point. "gptq" (v1, the default of every
loader) stores it minus one, which has no spelling for 0: there writers disagree (gptqmodel lets the borrow
run through the word, others wrap inside the lane). quantkit writes v1 while all weights are symmetric and v2
as soon as one is not; v1 with a zero point 0 is refused.

A bias stays ``<module>.bias`` in the dtype of the source; loaders cast it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
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
    names_pattern,
    need,
    order_from_index,
    refuse_ragged,
    scale_dtype_name,
    with_fused,
)
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

NAME = "gptq"
DESCRIPTION = "GPTQModel, vLLM, SGLang, TGI, transformers: 2/3/4/8-bit weights, act-order"

marker = ".qweight"
suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

V1, V2 = "gptq", "gptq_v2"
GROUPS = (16, 32, 64, 128, 256, 512, 1024)


def why_not(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Why a weight ``[rows, columns]`` of this scheme cannot be stored exactly, or None."""
    if scheme.activation:
        return "GPTQ files hold weight-only schemes; use compressed-tensors for 8-bit activations"
    if scheme.scale_dtype == "float32":
        return "scales are stored as float16; use scale_dtype bfloat16 or float16"
    if scheme.group and scheme.group not in GROUPS:
        return f"GPTQ loaders know the group sizes {GROUPS} and one per row (0), not {scheme.group}"
    for side, size in (("inputs", columns), ("outputs", rows)):
        if size % 32:
            return f"{size} {side} are not a multiple of 32, which GPTQ's words need; use compressed-tensors"
    return refuse_ragged(scheme, columns)


def layout(module: str, rows: int, columns: int, scheme: Scheme) -> Layout:
    """Name, dtype and shape of every tensor that ``pack`` writes."""
    groups = scheme.groups(columns)
    return {
        f"{module}.qweight": (torch.int32, (packing.packed_words(columns, scheme.bits), rows)),
        f"{module}.qzeros": (torch.int32, (groups, packing.packed_words(rows, scheme.bits))),
        f"{module}.scales": (torch.float16, (groups, rows)),
        f"{module}.g_idx": (torch.int32, (columns,)),
    }


def pack(module: str, qweight: QuantWeight, config: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors that replace ``<module>.weight``.

    config: decides the zero-point convention and whether a column order is announced (desc_act). Without it
    the convention is the one ``config()`` chooses for a checkpoint of this scheme alone. Raises CannotStore.
    """
    scheme, (rows, columns) = qweight.scheme, qweight.shape
    reason = why_not(scheme, rows, columns)
    if reason:
        raise CannotStore(f"{module}: {reason}")
    if is_ordered(qweight) and config is not None and not config["desc_act"]:
        raise CannotStore(
            f"{module}: groups follow an act-order, so the configuration must say desc_act: true"
        )
    version = _convention([scheme]) if config is None else config["checkpoint_format"]
    zero = qweight.zero
    if zero is None:
        zero = torch.full((rows, scheme.groups(columns)), scheme.midpoint, dtype=torch.uint8)
    if version == V1:
        if not bool(zero.all()):
            count = int((zero == 0).sum())
            raise CannotStore(
                f"{module}: {count} zero points are 0, which checkpoint_format 'gptq' cannot express "
                "(largest error one step); use checkpoint_format 'gptq_v2'"
            )
        zero = zero - 1
    return {
        f"{module}.qweight": packing.pack(qweight.codes, scheme.bits).T.contiguous(),
        f"{module}.qzeros": packing.pack(zero.T.contiguous(), scheme.bits),
        f"{module}.scales": exact_scale(module, qweight.scale, torch.float16).T.contiguous(),
        f"{module}.g_idx": qweight.columns_to_groups().to(torch.int32),
    }


def config(
    quantized: Mapping[str, Scheme],
    unquantized: Sequence[str],
    *,
    order: str | None = None,
    checkpoint_format: str | None = None,
) -> dict[str, Any]:
    """``quantization_config``: the commonest scheme as the base, the rest as ``dynamic`` patterns.

    quantized, unquantized: full module names. order: see formats/__init__. checkpoint_format: "gptq" or
    "gptq_v2" to choose the zero-point convention yourself.
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in quantized.items():
        by_scheme.setdefault(scheme.with_(scale_dtype="float16"), []).append(module)
    base = max(by_scheme, key=lambda s: len(by_scheme[s]))
    # gptqmodel, vLLM and SGLang read "dynamic"; transformers and vLLM read "modules_in_block_to_quantize".
    excluded = [m for m in unquantized if not _is_head(m)]
    dynamic: dict[str, dict[str, Any]] = {}
    if excluded:
        dynamic["-:" + names_pattern(with_fused(excluded))] = {}
    for scheme, modules in by_scheme.items():
        if scheme != base:
            dynamic["+:" + names_pattern(with_fused(modules))] = _sizes(scheme)
    out: dict[str, Any] = {
        "quant_method": NAME,
        **_sizes(base),
        "desc_act": order == "dynamic",
        "checkpoint_format": checkpoint_format or _convention(by_scheme),
        "lm_head": any(_is_head(m) for m in quantized),
        "pack_dtype": "int32",
        "true_sequential": True,
    }
    out["format"] = out["checkpoint_format"]
    if dynamic:
        out["dynamic"] = dynamic
    if excluded:
        out["modules_in_block_to_quantize"] = [[m] for m in quantized if not _is_head(m)]
    return out


def side_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """gptqmodel and optimum look for the same dictionary in a file of its own."""
    return {"quantize_config.json": (json.dumps(config, indent=2) + "\n").encode()}


def matches(quantization_config: Mapping[str, Any]) -> bool:
    method = quantization_config.get("quant_method")
    if method == "auto-round":
        return "gptq" in str(quantization_config.get("packing_format", ""))
    return method == NAME


def unpack(
    module: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shape: tuple[int, int] | None = None,
) -> QuantWeight:
    """The QuantWeight behind a module's tensors. Raises CannotRead when they contradict the configuration."""
    settings = settings_for(module, config)
    bits = settings["bits"]
    qweight, scales = need(tensors, f"{module}.qweight"), need(tensors, f"{module}.scales")
    g_idx = tensors.get(f"{module}.g_idx")
    groups, rows = scales.shape
    columns = shape[1] if shape else g_idx.numel() if g_idx is not None else qweight.shape[0] * 32 // bits
    if shape is not None and rows != shape[0]:
        raise CannotRead(f"{module}: scales serve {rows} outputs, the model needs {shape[0]}")
    if qweight.shape != (packing.packed_words(columns, bits), rows):
        found = qweight.shape[0] * 32 / columns
        raise CannotRead(
            f"{module}: qweight has shape {tuple(qweight.shape)}; {columns} inputs of {bits} bits need "
            f"{(packing.packed_words(columns, bits), rows)} (the tensor looks like {found:g} bits)"
        )
    group = checked_group(module, columns, groups, settings.get("group_size"))
    zero = read_zeros(need(tensors, f"{module}.qzeros"), bits, rows, _version(config))
    symmetric = bool(settings.get("sym", not bool((zero != 2 ** (bits - 1)).any())))
    if symmetric:
        _check_midpoint(module, zero, bits)
    scheme = make_scheme(
        module, bits=bits, symmetric=symmetric, group=group, scale_dtype=scale_dtype_name(module, scales)
    )
    return QuantWeight(
        scheme,
        packing.unpack(qweight.T.contiguous(), bits, columns),
        scales.T.contiguous(),
        None if symmetric else zero.T.contiguous(),
        None if g_idx is None else order_from_index(module, g_idx, group),
    )


def settings_for(module: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """bits, group_size and sym of one module: the base and the first ``dynamic`` pattern that matches."""
    settings = {k: config[k] for k in ("bits", "group_size", "sym") if k in config}
    settings.update({k: v for k, v in config.get("extra_config", {}).get(module, {}).items() if k in _SIZES})
    for pattern, override in (config.get("dynamic") or {}).items():
        excluded, regex = pattern.startswith("-:"), re.sub(r"^[-+]:", "", pattern)
        if re.match(regex, module):
            if excluded:
                raise CannotRead(
                    f"{module} holds quantized tensors, but quantization_config excludes it: {pattern!r}"
                )
            settings.update({k: v for k, v in override.items() if k in _SIZES})
            break
    if "bits" not in settings:
        raise CannotRead("quantization_config has no 'bits'")
    return settings


def read_zeros(qzeros: Tensor, bits: int, rows: int, version: str) -> Tensor:
    """Zero points uint8 ``[groups, out]`` from packed ``qzeros``, in the convention ``version``.

    For v1 one is added the way gptqmodel subtracted it: to the whole word, so that a borrow that crossed
    lanes is undone (``0x00000000 - 0x11111111`` wraps and reads back as eight zeros); 3-bit lanes cross words
    and are handled one by one. Where every zero point is at least 1 both ways agree.
    """
    if version == V2:
        return packing.unpack(qzeros.contiguous(), bits, rows)
    if bits == 3:
        return (packing.unpack(qzeros.contiguous(), bits, rows) + 1) & 7
    ones = sum(1 << shift for shift in range(0, 32, bits))
    wrapped = (qzeros.long() + ones) & 0xFFFFFFFF
    words = torch.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped).to(torch.int32)
    return packing.unpack(words.contiguous(), bits, rows)


_SIZES = ("bits", "group_size", "sym")


def _sizes(scheme: Scheme) -> dict[str, Any]:
    return {"bits": scheme.bits, "group_size": scheme.group or -1, "sym": scheme.symmetric}


def _convention(schemes: Sequence[Scheme] | Mapping[Scheme, Any]) -> str:
    return V1 if all(s.symmetric for s in schemes) else V2


def _version(config: Mapping[str, Any]) -> str:
    """Files without the key are v1: it was introduced together with v2."""
    version = config.get("checkpoint_format") or config.get("format") or V1
    if config.get("quant_method") == "auto-round":
        version = V2 if "v2" in str(config.get("packing_format")) else V1
    if version not in (V1, V2):
        raise CannotRead(f"checkpoint_format {version!r} is not one of {V1!r}, {V2!r}")
    return version


def _check_midpoint(module: str, zero: Tensor, bits: int) -> None:
    middle = 2 ** (bits - 1)
    if not bool((zero != middle).any()):
        return
    value, count = Counter(zero.flatten().tolist()).most_common(1)[0]
    if count == zero.numel() and value in (middle - 1, middle + 1):
        other = V1 if value == middle - 1 else V2
        raise CannotRead(
            f"{module}: a symmetric weight whose zero points all read {value} instead of {middle}: the file "
            f"was written as checkpoint_format {other!r}, correct the configuration (`quantkit repair`)"
        )
    raise CannotRead(f"{module}: sym is true, but zero points are not all {middle} (most are {value})")


def _is_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"
