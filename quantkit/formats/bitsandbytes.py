"""bitsandbytes 4-bit (NF4, FP4), read only: a codebook of 16 values, so it comes back as floats.

Per module (verified against bitsandbytes 0.50.2, see tests/formats)::

    weight                                uint8 [out*in/2, 1]     row-major, the HIGH nibble first
    weight.absmax                         fp32  [out*in/block]    or uint8 when quantized itself
    weight.quant_map                      fp32  [16]              the codebook
    weight.quant_state.bitsandbytes__nf4  uint8                   JSON: quant_type, blocksize, dtype, shape
    weight.nested_absmax, .nested_quant_map                       of a quantized absmax (double quantization)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.formats._common import CannotRead, need
from quantkit.scheme import Scheme

NAME = "bitsandbytes"
DESCRIPTION = "bitsandbytes NF4 and FP4 checkpoints, read only"

marker = ".weight.absmax"
_STATE = ".weight.quant_state.bitsandbytes__"
suffixes = (
    ".weight",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    _STATE + "nf4",
    _STATE + "fp4",
)


def why_not(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Nothing is written in this format."""
    return "NF4 and FP4 are no integer grids, so quantkit reads this format and does not write it"


def matches(quantization_config: Mapping[str, Any]) -> bool:
    method = quantization_config.get("quant_method")
    return method == NAME and bool(quantization_config.get("load_in_4bit"))


def dequantize(module: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """The weight ``[out, in]`` in the dtype that it had before quantization.

    tensors: by full name. Raises CannotRead when they are incomplete or of sizes that do not fit together.
    """
    state = _state(module, tensors)
    packed = need(tensors, f"{module}.weight").flatten()
    codebook = need(tensors, f"{module}.weight.quant_map").float()
    rows, columns = state["shape"]
    if packed.dtype != torch.uint8 or packed.numel() * 2 != rows * columns or codebook.numel() != 16:
        raise CannotRead(
            f"{module}: {packed.numel()} {packed.dtype} values and a codebook of {codebook.numel()} "
            f"do not make a 4-bit weight of {rows}x{columns}; the file is damaged"
        )
    codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()
    absmax = _absmax(module, tensors, state)
    block = state["blocksize"]
    if absmax.numel() != -(-codes.numel() // block):
        raise CannotRead(
            f"{module}: {absmax.numel()} scales for {codes.numel()} weights in blocks of {block}"
        )
    scale = absmax.repeat_interleave(block)[: codes.numel()]
    values = codebook[codes.long()] * scale
    return values.reshape(rows, columns).to(getattr(torch, state["dtype"]))


def _state(module: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    name = next((n for n in tensors if n.startswith(module + _STATE)), None)
    if name is None:
        raise CannotRead(f"{module}: no tensor {module}{_STATE}nf4 (or fp4) that describes the quantization")
    try:
        return json.loads(bytes(tensors[name].tolist()))
    except ValueError as error:
        raise CannotRead(f"{name} is no JSON: {error}") from None


def _absmax(module: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    absmax = need(tensors, f"{module}.weight.absmax")
    if absmax.dtype != torch.uint8:
        return absmax.float()
    codebook = need(tensors, f"{module}.weight.nested_quant_map").float()
    outer = need(tensors, f"{module}.weight.nested_absmax").float()
    scale = outer.repeat_interleave(state["nested_blocksize"])[: absmax.numel()]
    return codebook[absmax.long()] * scale + state["nested_offset"]
