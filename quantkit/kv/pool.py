"""PagePool: the packed pages of one layer, counted by reference so that sequences can share a prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kv.pages import Fields, encode
from quantkit.kvscheme import Side

GROWTH = (
    32  # the pool grows by this fraction of itself, at least by one page: free slots count as memory held
)


class PagePool:
    """Storage for pages of one geometry. A page is a slot number; its content never changes while it is held.

    Every holder of a page counts once: :meth:`add` returns pages held once, :meth:`retain` and
    :meth:`release`
    add and drop holders, and a page without holders is reused. Not thread-safe.

    keys, values: the two grids.
    """

    def __init__(self, keys: Side, values: Side) -> None:
        self.keys = keys
        self.values = values
        self.holders: list[int] = []
        self._free: list[int] = []
        self._store: dict[str, Tensor] = {}  # "k.codes" -> [capacity, ...]

    @property
    def capacity(self) -> int:
        return len(self.holders)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.capacity - len(self._free)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page: codes, scales, lows; 0 before the first page."""
        return sum(t[0].numel() * t.element_size() for t in self._store.values()) if self.capacity else 0

    def tensors(self) -> dict[str, Tensor]:
        """The storage itself, by field, for counting bytes and for kernels: each ``[capacity, ...]``."""
        return self._store

    def add(self, keys: Tensor, values: Tensor) -> list[int]:
        """Quantize pages ``[pages, heads, tokens, head_dim]`` and store them, each held once."""
        fields = {f"k.{n}": t for n, t in encode(keys, self.keys).items()}
        fields |= {f"v.{n}": t for n, t in encode(values, self.values).items()}
        return self.insert(fields)

    def insert(self, fields: Fields) -> list[int]:
        """Store pages that are already packed, as :meth:`read` gives them (used by ``load``)."""
        count = next(iter(fields.values())).shape[0]
        if count > len(self._free):
            self._grow(count - len(self._free), fields)
        slots = [self._free.pop() for _ in range(count)]
        index = torch.tensor(slots)
        for name, value in fields.items():
            store = self._store[name]
            if store.shape[1:] != value.shape[1:] or store.dtype != value.dtype:
                raise ValueError(
                    f"page field {name}: {tuple(value.shape[1:])} {value.dtype} does not fit the pool's "
                    f"{tuple(store.shape[1:])} {store.dtype}"
                )
            store[index.to(store.device)] = value
        for slot in slots:
            self.holders[slot] = 1
        return slots

    def _grow(self, shortfall: int, like: Fields) -> None:
        extra = max(shortfall, self.capacity // GROWTH)
        for name, value in like.items():
            old = self._store.get(name)
            fresh = value.new_empty((self.capacity + extra, *value.shape[1:]))
            if old is not None:
                fresh[: self.capacity] = old
            self._store[name] = fresh
        # popped from the end: low slots first, so that pages of one sequence tend to lie in order
        self._free = list(range(self.capacity + extra - 1, self.capacity - 1, -1)) + self._free
        self.holders += [0] * extra

    def retain(self, slots: list[int]) -> None:
        self._check(slots)
        for slot in slots:
            self.holders[slot] += 1

    def release(self, slots: list[int]) -> None:
        self._check(slots)
        for slot in slots:
            self.holders[slot] -= 1
            if not self.holders[slot]:
                self._free.append(slot)

    def _check(self, slots: list[int]) -> None:
        for slot in slots:
            if not self.holders[slot]:
                raise RuntimeError(
                    f"page {slot} is not held by anybody; a sequence used it after releasing it"
                )

    def read(self, slots: list[int]) -> tuple[Fields, Fields]:
        """Packed (key fields, value fields) of these pages, copied in that order; nothing is dequantized."""
        parts: tuple[Fields, Fields] = ({}, {})
        for name, store in self._store.items():
            index = torch.tensor(slots, dtype=torch.long, device=store.device)
            parts[name[0] == "v"][name[2:]] = store.index_select(0, index)
        return parts
