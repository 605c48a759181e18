"""AWQ: the checkpoint format of AutoAWQ ("gemm"), read by vLLM, SGLang, TGI and transformers. 4 bits.

Per module (verified against autoawq 0.2.9, see tests/formats)::

    qweight  int32 [in, out/8]      packed along the OUTPUTS; nibble i of word c holds output 8c + NIBBLES[i]
    qzeros   int32 [groups, out/8]  the same order; the zero point itself, nothing subtracted
    scales   fp16  [groups, out]

AWQ's activation scaling is folded into the layer before; nothing of it is stored. ``qzeros`` is always
written (8 for a symmetric weight), which every loader accepts; "sym" in the configuration tells them apart.

Read besides: "gemv", which packs along the inputs in natural order and pads its groups.
"""

from __future__ import annotations

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
    refuse_ragged,
    scale_dtype_name,
)
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

NAME = "awq"
DESCRIPTION = "AutoAWQ's gemm layout, for vLLM, SGLang, TGI and transformers: 4-bit weights"

marker = ".qweight"
suffixes = (".qweight", ".qzeros", ".scales")

NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # output of each nibble within a word of eight, lowest bits first
OUTPUTS = [NIBBLES.index(j) for j in range(8)]  # nibble of each output


def why_not(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Why a weight ``[rows, columns]`` of this scheme cannot be stored exactly, or None."""
    if scheme.bits != 4 or scheme.activation:
        return f"AWQ files hold 4-bit weight-only schemes, not {scheme}; use compressed-tensors"
    if scheme.scale_dtype == "float32":
        return "scales are stored as float16; use scale_dtype bfloat16 or float16"
    if rows % 8:
        return f"{rows} outputs are not a multiple of 8, which AWQ's words need; use compressed-tensors"
    return refuse_ragged(scheme, columns)


def layout(module: str, rows: int, columns: int, scheme: Scheme) -> Layout:
    """Name, dtype and shape of every tensor that ``pack`` writes."""
    groups = scheme.groups(columns)
    return {
        f"{module}.qweight": (torch.int32, (columns, rows // 8)),
        f"{module}.qzeros": (torch.int32, (groups, rows // 8)),
        f"{module}.scales": (torch.float16, (groups, rows)),
    }


def pack(module: str, qweight: QuantWeight, config: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors that replace ``<module>.weight``; ``config`` does not change them. Raises CannotStore."""
    scheme, (rows, columns) = qweight.scheme, qweight.shape
    reason = why_not(scheme, rows, columns)
    if reason:
        raise CannotStore(f"{module}: {reason}")
    if is_ordered(qweight):
        raise CannotStore(f"{module}: AWQ has no g_idx for groups that follow an act-order; use gptq")
    zero = qweight.zero
    if zero is None:
        zero = torch.full((rows, scheme.groups(columns)), scheme.midpoint, dtype=torch.uint8)
    return {
        f"{module}.qweight": _pack_outputs(qweight.codes),
        f"{module}.qzeros": _pack_outputs(zero),
        f"{module}.scales": exact_scale(module, qweight.scale, torch.float16).T.contiguous(),
    }


def config(
    quantized: Mapping[str, Scheme], unquantized: Sequence[str], *, order: str | None = None
) -> dict[str, Any]:
    """``quantization_config``; all modules share one group size. order: "dynamic" is refused.

    Raises CannotStore where a file of this format cannot describe the model: several group sizes, a quantized
    head, or an unquantized name that is part of a quantized one (loaders look for substrings).
    """
    if order == "dynamic":
        raise CannotStore("AWQ has no g_idx for groups that follow an act-order; use gptq")
    groups = sorted({s.group for s in quantized.values()})
    if len(groups) > 1:
        raise CannotStore(f"AWQ files have one group size, this model has {groups}; use compressed-tensors")
    heads = [m for m in quantized if m.rpartition(".")[2] == "lm_head"]
    if heads:
        raise CannotStore(f"AWQ loaders expect a float head, {heads[0]} is not; use compressed-tensors")
    excluded = [m for m in unquantized if m.rpartition(".")[2] != "lm_head"]
    for name in excluded:
        hit = next((m for m in quantized if name in m), None)
        if hit:
            raise CannotStore(
                f"AWQ excludes modules by substring, and {name} would also exclude {hit}; use gptq"
            )
    kinds = {s.symmetric for s in quantized.values()}
    out: dict[str, Any] = {
        "quant_method": NAME,
        "bits": 4,
        "group_size": groups[0] or -1,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": excluded or None,
    }
    if len(kinds) == 1:
        out["sym"] = kinds.pop()
    return out


def side_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """None are needed."""
    return {}


def matches(quantization_config: Mapping[str, Any]) -> bool:
    method = quantization_config.get("quant_method")
    if method == "auto-round":
        return "awq" in str(quantization_config.get("packing_format", ""))
    return method == NAME


def unpack(
    module: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shape: tuple[int, int] | None = None,
) -> QuantWeight:
    """The QuantWeight behind a module's tensors. Raises CannotRead where they contradict ``config``.

    Without "sym" in the configuration (AutoAWQ writes none) a weight with all zero points 8 is symmetric.
    """
    if config.get("bits", config.get("w_bit", 4)) != 4:
        raise CannotRead(f"{module}: AWQ files hold 4 bits, the configuration says {config['bits']}")
    configured = config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", "gemm")).lower()
    qweight, qzeros = need(tensors, f"{module}.qweight"), need(tensors, f"{module}.qzeros")
    scales = need(tensors, f"{module}.scales")
    if version == "gemm":
        codes = _unpack_outputs(qweight)
        zero, scale = _unpack_outputs(qzeros), scales.T.contiguous()
    elif version == "gemv":
        columns = qweight.shape[1] * 8
        groups = 1 if not configured or configured < 0 else columns // configured
        codes = packing.unpack(qweight.contiguous(), 4, columns)
        zero, scale = packing.unpack(qzeros.contiguous(), 4, groups), scales[:, :groups].contiguous()
    else:
        raise CannotRead(f"{module}: AWQ version {version!r} is not read; 'gemm' and 'gemv' are")
    if zero.shape != scale.shape or scale.shape[0] != codes.shape[0]:
        raise CannotRead(
            f"{module}: qweight, qzeros and scales describe {codes.shape[0]}, {zero.shape[0]} and "
            f"{scale.shape[0]} outputs in {zero.shape[1]} and {scale.shape[1]} groups; the file is damaged"
        )
    if shape is not None and tuple(codes.shape) != tuple(shape):
        raise CannotRead(f"{module}: holds a weight of {tuple(codes.shape)}, the model needs {tuple(shape)}")
    group = checked_group(module, codes.shape[1], scale.shape[1], configured)
    eights = not bool((zero != 8).any())
    symmetric = bool(config.get("sym", eights))
    if symmetric and not eights:
        raise CannotRead(f"{module}: sym is true, but not all zero points are 8")
    dtype = scale_dtype_name(module, scale)
    scheme = make_scheme(module, bits=4, symmetric=symmetric, group=group, scale_dtype=dtype)
    return QuantWeight(scheme, codes, scale, None if symmetric else zero)


def _pack_outputs(values: Tensor) -> Tensor:
    """uint8 ``[out, n]`` -> int32 ``[n, out/8]`` in AWQ's nibble order."""
    along = values.T.reshape(values.shape[1], -1, 8)[:, :, NIBBLES]
    return packing.pack(along.flatten(1).contiguous(), 4)


def _unpack_outputs(words: Tensor) -> Tensor:
    """int32 ``[n, out/8]`` -> uint8 ``[out, n]``."""
    nibbles = packing.unpack(words.contiguous(), 4, words.shape[1] * 8)
    return nibbles.reshape(words.shape[0], -1, 8)[:, :, OUTPUTS].flatten(1).T.contiguous()
