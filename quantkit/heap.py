"""Giving freed memory back to the system: glibc keeps it otherwise, and the peak of one stage adds to the next's."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def _trim():
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc: macOS, musl, Windows
        return None


def give_back() -> None:
    """Return unused heap pages to the system, where the C library can."""
    trim = _trim()
    if trim is not None:
        trim(0)
