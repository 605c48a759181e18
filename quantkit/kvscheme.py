"""KVScheme: how keys and values of a KV cache are stored, and what a token then costs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from quantkit.scheme import SchemeError

KV_BITS = (2, 4, 8, 16)
KEY_LAYOUTS = ("channel", "token", "hadamard")
VALUE_LAYOUTS = ("token", "hadamard")
META = ("float16", "bfloat16", "compact")


@dataclass(frozen=True, slots=True)
class Side:
    """The grid of keys or of values alone: ``x = code * scale + low``, codes ``0 .. 2**bits - 1``.

    bits: 2, 4, 8, or 16 for "not quantized".
    layout: what shares a scale. ``"channel"``: one channel of one head over the tokens of a page (KIVI,
        arXiv 2402.02750). ``"token"``: one token of one head. ``"hadamard"``: the same after multiplying the
        head by an orthonormal Hadamard matrix (QuaRot, arXiv 2404.00456).
    symmetric: ``low = -scale * 2**(bits-1)`` is implied, not stored.
    meta: how scale and low are stored.

        =========  ===========================================  =======================
        meta       scale                                        low (asymmetric)
        =========  ===========================================  =======================
        float16    16 bits                                      16 bits
        bfloat16   16 bits                                      16 bits
        compact    8 bits: range = base * 2**(-code/16), one    channel: float16;
                   bfloat16 base per page and head              token: 8 bits, -range * code/255
        =========  ===========================================  =======================
    search: try narrower ranges than [min, max] and keep the one with the smallest squared error.
    """

    bits: int
    layout: str
    symmetric: bool = False
    meta: str = "compact"
    search: bool = False

    def __post_init__(self) -> None:
        if self.bits not in KV_BITS:
            raise SchemeError(f"{self.bits}-bit cache entries are not supported; choose one of {KV_BITS}")
        if self.layout not in KEY_LAYOUTS:
            raise SchemeError(f"cache layout {self.layout!r} must be one of {KEY_LAYOUTS}")
        if self.meta not in META:
            raise SchemeError(f"cache scales {self.meta!r} must be one of {META}")

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def rotated(self) -> bool:
        return self.layout == "hadamard" and self.bits < 16

    def meta_bits(self) -> int:
        """Bits of scale and low that one group carries (the per-page base of "compact" not counted)."""
        if self.meta != "compact":
            return 16 if self.symmetric else 32
        return 8 if self.symmetric else (24 if self.layout == "channel" else 16)

    def page_bits(self, tokens: int, head_dim: int) -> int:
        """Bits of one page of one head: codes, scales, lows, base."""
        if self.bits == 16:
            return 16 * tokens * head_dim
        groups = head_dim if self.layout == "channel" else tokens
        base = 16 if self.meta == "compact" else 0
        return self.bits * tokens * head_dim + groups * self.meta_bits() + base


@dataclass(frozen=True, slots=True)
class KVScheme:
    """The format of a KV cache.

    k_bits, v_bits: 2, 4, 8 or 16 (16: not quantized).
    k_layout: "channel", "token" or "hadamard"; v_layout: "token" or "hadamard" (see :class:`Side`).
    k_symmetric, v_symmetric, and meta, search for both: as in :class:`Side`.
    page: tokens in a page. A page is quantized once, when it is full, and never again.
    window: at least this many of the newest tokens stay unquantized, besides the unfilled page.
    sinks: first tokens of each sequence that stay unquantized (StreamingLLM, arXiv 2309.17453).
    window_dtype: dtype of window and sinks; "auto" is the dtype of the states that arrive.
    full_window: sliding-window layers whose window is at most this long stay unquantized.
    overrides: ``((layer, k_bits, v_bits), ...)`` for layers that differ.

    >>> KVScheme.parse("int4").bytes_per_token(kv_heads=8, head_dim=128)
    1080.5
    """

    k_bits: int = 8
    v_bits: int = 8
    k_layout: str = "channel"
    v_layout: str = "token"
    k_symmetric: bool = False
    v_symmetric: bool = False
    meta: str = "compact"
    search: bool = False
    page: int = 64
    window: int = 0
    sinks: int = 4
    window_dtype: str = "bfloat16"
    full_window: int = 1024
    overrides: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        self.keys_at(None), self.values_at(None)
        for layer, k, v in self.overrides:
            if k not in KV_BITS or v not in KV_BITS:
                raise SchemeError(f"override of layer {layer}: {k}/{v} bits must be among {KV_BITS}")
        if self.v_layout not in VALUE_LAYOUTS:
            raise SchemeError(f"value layout {self.v_layout!r} must be one of {VALUE_LAYOUTS}")
        if self.page < 8 or self.page % 8:
            raise SchemeError(f"pages of {self.page} tokens: must be a positive multiple of 8")
        if not 0 <= self.sinks < self.page:
            raise SchemeError(f"{self.sinks} sink tokens do not fit in a page of {self.page}")
        if self.window < 0 or self.window % 8:
            raise SchemeError(f"window {self.window} must be a multiple of 8")
        if self.window_dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise SchemeError(
                f"window dtype {self.window_dtype!r}: choose auto, bfloat16, float16 or float32"
            )

    def keys_at(self, layer: int | None) -> Side:
        """Grid of the keys of a layer (None: where no override applies)."""
        return Side(self._bits(layer)[0], self.k_layout, self.k_symmetric, self.meta, self.search)

    def values_at(self, layer: int | None) -> Side:
        return Side(self._bits(layer)[1], self.v_layout, self.v_symmetric, self.meta, self.search)

    def _bits(self, layer: int | None) -> tuple[int, int]:
        for index, k, v in self.overrides:
            if index == layer:
                return k, v
        return self.k_bits, self.v_bits

    def quantizes(self, layer: int | None = None) -> bool:
        return min(self._bits(layer)) < 16

    def page_bytes(
        self, kv_heads: int, k_dim: int, v_dim: int | None = None, layer: int | None = None
    ) -> float:
        """Bytes of one full page of one layer."""
        keys, values = self.keys_at(layer), self.values_at(layer)
        bits = keys.page_bits(self.page, k_dim) + values.page_bits(self.page, v_dim or k_dim)
        return kv_heads * bits / 8

    def bytes_per_token(
        self, kv_heads: int, head_dim: int, context: int | None = None, layer: int | None = None
    ) -> float:
        """Bytes of one token in one layer; with ``context``, sinks and the unquantized window included.

        Without ``context`` this is the cost in a full page, the limit for long contexts.
        """
        packed = self.page_bytes(kv_heads, head_dim, layer=layer) / self.page
        if context is None or not self.quantizes(layer):
            return packed
        full = max(0, context - self.window) // self.page
        width = 4 if self.window_dtype == "float32" else 2
        loose = context - full * self.page + (min(self.sinks, context) if full else 0)
        return (full * self.page * packed + loose * 2 * kv_heads * head_dim * width) / context

    def with_(self, **changes) -> KVScheme:
        return replace(self, **changes)

    @staticmethod
    def parse(text: str) -> KVScheme:
        """A preset by name (:data:`PRESETS`), optionally with changes: ``"int4,window=64,sinks=0"``.

        Raises SchemeError for an unknown name or field.
        """
        name, *changes = [part.strip() for part in text.split(",")]
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(PRESETS)}"
            raise SchemeError(f"unknown cache format {name!r}: {hint}")
        fields = {f: type(getattr(PRESETS[name], f)) for f in KVScheme.__slots__ if f != "overrides"}
        values: dict = {}
        for change in changes:
            key, _, value = change.partition("=")
            if key not in fields:
                raise SchemeError(f"unknown field {key!r} of a cache format; known are {', '.join(fields)}")
            values[key] = value.lower() in ("1", "true", "yes") if fields[key] is bool else fields[key](value)
        return replace(PRESETS[name], **values)

    def __str__(self) -> str:
        k, v = ("sym" if symmetric else "asym" for symmetric in (self.k_symmetric, self.v_symmetric))
        name = f"K{self.k_bits} {self.k_layout} {k} / V{self.v_bits} {self.v_layout} {v}"
        extra = f", {len(self.overrides)} layers differ" if self.overrides else ""
        return (
            f"{name}, page {self.page}, window {self.window}, sinks {self.sinks}, {self.meta} scales{extra}"
        )


# Measured best per byte (results/kv.jsonl): rotated values are as good symmetric as asymmetric, and the eight
# bits per token saved pay for a window of 32 tokens, which more than halves the divergence.
_ROTATED_V: dict[str, Any] = {"v_layout": "hadamard", "v_symmetric": True, "search": True, "window": 32}
_TOKEN: dict[str, Any] = {"k_layout": "token", "v_layout": "token", "meta": "float16", "sinks": 0}
PRESETS: dict[str, KVScheme] = {
    "none": KVScheme(16, 16),
    "int8": KVScheme(8, 8, window=32),
    "int4": KVScheme(4, 4, **_ROTATED_V),
    "int2": KVScheme(2, 2, **_ROTATED_V | {"window": 96}),
    "k8v4": KVScheme(8, 4, **_ROTATED_V),
    "k4v2": KVScheme(4, 2, **_ROTATED_V | {"window": 96}),
    "int8-token": KVScheme(8, 8, k_symmetric=True, v_symmetric=True, **_TOKEN),
    "int4-token": KVScheme(4, 4, **_TOKEN),
    "int4-hadamard": KVScheme(4, 4, k_layout="hadamard", v_layout="hadamard", search=True),
}
