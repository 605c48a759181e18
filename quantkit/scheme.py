"""Number formats as values: how a weight (or a KV-cache entry) is stored, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

WEIGHT_BITS = (2, 3, 4, 8)
SCALE_BITS = {"float16": 16, "bfloat16": 16, "float32": 32}


class SchemeError(ValueError):
    """A number format that cannot exist; the message says why."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One uniform integer format for a linear layer's weight ``[out, in]``.

    ``w = (code - zero) * scale`` with unsigned codes ``0 .. 2**bits - 1``. Symmetric means that the zero
    point is the constant ``2**(bits - 1)`` and is not stored; the scale may then carry either sign, so that
    the extra code of the full range can serve the larger side.

    bits: 2, 3, 4 or 8.
    group: input columns that share one scale; 0 means the whole row (per channel). The last group of a row
        may be shorter ("ragged") when ``group`` does not divide the width.
    scale_dtype: dtype in which scales are stored. bfloat16 scales of ordinary size are exact in every format
        that stores float16, so one solve serves all exports.
    activation: ``None`` (weight only) or ``"int8"`` (dynamic, symmetric, one scale per token).
    """

    bits: int = 4
    symmetric: bool = True
    group: int = 0
    scale_dtype: str = "bfloat16"
    activation: str | None = None

    def __post_init__(self) -> None:
        if self.bits not in WEIGHT_BITS:
            raise SchemeError(f"{self.bits}-bit weights are not supported; choose one of {WEIGHT_BITS}")
        if self.group < 0 or self.group % 8:
            raise SchemeError(f"group size {self.group} must be 0 (whole row) or a positive multiple of 8")
        if self.scale_dtype not in SCALE_BITS:
            raise SchemeError(f"scale dtype {self.scale_dtype!r} must be one of {tuple(SCALE_BITS)}")
        if self.activation not in (None, "int8"):
            raise SchemeError(f"activation scheme {self.activation!r} must be None or 'int8'")
        if self.activation and (self.bits != 8 or self.group or not self.symmetric):
            raise SchemeError("int8 activations go with 8-bit symmetric per-channel weights (W8A8) only")

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def midpoint(self) -> int:
        """The implied zero point of a symmetric weight, as an unsigned code."""
        return 2 ** (self.bits - 1)

    def groups(self, columns: int) -> int:
        """Number of scales in a row of ``columns`` weights."""
        return 1 if self.group == 0 else -(-columns // self.group)

    def bits_per_weight(self, columns: int) -> float:
        """True storage cost, scales and zero points included."""
        per_group = SCALE_BITS[self.scale_dtype] + (0 if self.symmetric else self.bits)
        return self.bits + self.groups(columns) * per_group / columns

    def with_(self, **changes) -> Scheme:
        return replace(self, **changes)

    def __str__(self) -> str:
        grain = f"g{self.group}" if self.group else "channel"
        kind = "sym" if self.symmetric else "asym"
        return f"W{self.bits}A{8 if self.activation else 16} {grain} {kind}"
