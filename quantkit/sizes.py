"""Sizes as people write them, both ways."""

from __future__ import annotations

import re

from quantkit.errors import UserError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes of "90MB", "8 GiB", "1.5g". Raises UserError."""
    m = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", text.lower())
    if not m:
        raise UserError(f"{text!r} is not a size; write for example 90MB, 8GB or 1.5GiB")
    return int(float(m[1]) * _UNITS[m[2] or ""])


def parse_count(text: str) -> int:
    """A number of tokens: "32k" is 32768, "4096" is itself. Raises UserError."""
    m = re.fullmatch(r"\s*([0-9]+)\s*(k?)\s*", text.lower())
    if not m:
        raise UserError(f"{text!r} is not a token count; write for example 4096 or 32k")
    return int(m[1]) * (1024 if m[2] else 1)


def show_size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")
