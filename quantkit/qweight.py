"""QuantWeight: the neutral value between solvers, file formats and kernels, and the rounding formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.scheme import Scheme

# Scales are kept where both float16 and bfloat16 are exact to their stored precision: below 2**-17 a
# bfloat16 value is no longer a float16 number; 65280 is the largest bfloat16 below float16's overflow.
MIN_SCALE = 2.0**-17
MAX_SCALE = 65280.0


def round_scale(scale: Tensor, scheme: Scheme) -> Tensor:
    """Round to the stored dtype, keeping sign and staying inside [MIN_SCALE, MAX_SCALE]; float32 out.

    Scales are rounded *before* codes are chosen, so that what is saved is what was optimized.
    """
    sign = torch.where(scale < 0, -1.0, 1.0)
    magnitude = scale.float().abs().clamp(MIN_SCALE, MAX_SCALE)
    return sign * magnitude.to(getattr(torch, scheme.scale_dtype)).float().clamp(MIN_SCALE, MAX_SCALE)


def to_codes(weight: Tensor, scale: Tensor, zero: Tensor | float, max_code: int) -> Tensor:
    """Nearest codes (float tensor, integers ``0 .. max_code``); scale and zero broadcast against weight."""
    return torch.clamp(torch.round(weight / scale) + zero, 0, max_code)


def group_index(columns: int, group: int, order: Tensor | None = None) -> Tensor:
    """int64 ``[columns]``: which scale serves each column. With ``order``, position p holds column order[p]."""
    index = torch.zeros(columns, dtype=torch.long) if group == 0 else torch.arange(columns) // group
    if order is None:
        return index
    by_column = torch.empty_like(index)
    by_column[order] = index
    return by_column


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """A quantized linear weight, free of any file format and any kernel layout.

    scheme: the number format.
    codes: uint8 ``[out, in]``, unsigned ``0 .. 2**bits - 1``.
    scale: ``[out, groups]`` in ``scheme.scale_dtype``; may be negative when symmetric.
    zero: uint8 ``[out, groups]``, or None when symmetric (then ``2**(bits-1)``).
    order: int64 ``[in]`` or None. Act-order with dynamic groups: position p holds column ``order[p]`` and
        belongs to group ``p // group``. None means that groups are runs of neighbouring columns.
    """

    scheme: Scheme
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        want = (rows, self.scheme.groups(columns))
        if self.codes.dtype != torch.uint8:
            raise ValueError(f"codes must be uint8, not {self.codes.dtype}")
        if tuple(self.scale.shape) != want:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}; {self.scheme} of {rows}x{columns} needs {want}"
            )
        if self.scheme.symmetric != (self.zero is None):
            raise ValueError("a symmetric weight has no zero tensor; an asymmetric one needs it")
        if self.zero is not None and tuple(self.zero.shape) != want:
            raise ValueError(f"zero has shape {tuple(self.zero.shape)}, expected {want}")
        if self.order is not None and tuple(self.order.shape) != (columns,):
            raise ValueError(f"order has shape {tuple(self.order.shape)}, expected ({columns},)")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return tuple(self.codes.shape)  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed codes, scales and zero points."""
        rows, columns = self.shape
        return round(rows * columns * self.scheme.bits_per_weight(columns) / 8)

    def columns_to_groups(self) -> Tensor:
        return group_index(self.shape[1], self.scheme.group, self.order)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(codes - zero) * scale`` as ``[out, in]``, computed in float32."""
        index = self.columns_to_groups()
        scale = self.scale.float()
        zero = float(self.scheme.midpoint) if self.zero is None else self.zero.float()[:, index]
        return ((self.codes.float() - zero) * scale[:, index]).to(dtype)

    @staticmethod
    def from_float(
        weight: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, order: Tensor | None = None
    ):
        """Round ``weight [out, in]`` to the nearest codes of a grid given per group.

        scale ``[out, groups]`` must already be rounded (:func:`round_scale`); zero holds integers.
        """
        index = group_index(weight.shape[1], scheme.group, order)
        z = float(scheme.midpoint) if zero is None else zero.float()[:, index]
        codes = to_codes(weight.float(), scale.float()[:, index], z, scheme.max_code).to(torch.uint8)
        dtype = getattr(torch, scheme.scale_dtype)
        return QuantWeight(
            scheme, codes, scale.to(dtype), None if zero is None else zero.to(torch.uint8), order
        )

    def same_as(self, other: QuantWeight) -> str | None:
        """None when both hold exactly the same weights, else a sentence naming the first difference."""
        if self.shape != other.shape:
            return f"shape {other.shape} instead of {self.shape}"
        for field in ("codes", "scale", "zero"):
            a, b = getattr(self, field), getattr(other, field)
            if (a is None) != (b is None):
                return f"{field} is {'absent' if b is None else 'present'}"
            if a is not None and not torch.equal(a.float(), b.float()):
                count = int((a.float() != b.float()).sum())
                return f"{count} of {a.numel()} values of {field} differ"
        if not torch.equal(self.columns_to_groups(), other.columns_to_groups()):
            return "columns belong to other groups"
        return None
