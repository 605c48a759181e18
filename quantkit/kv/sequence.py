"""Sequence: one sequence of one layer = sinks + packed pages + the unquantized tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv.pages import decode
from quantkit.kv.pool import PagePool


@dataclass(frozen=True, slots=True)
class Page:
    """A page in a sequence. slot: where in the pool; skip: filler at the front (sinks, kept elsewhere);
    count: tokens in use, filler included (fewer than the page holds after a crop)."""

    slot: int
    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """What attention reads at one step; tokens in the order sinks, pages, tail. Tensors ``[heads, tokens,
    dim]``.

    Valid until the next update of its layer: the pool may reuse the slots afterwards.
    """

    pool: PagePool
    pages: tuple[Page, ...]
    sinks: tuple[Tensor, Tensor] | None
    tail: tuple[Tensor, Tensor]

    @property
    def length(self) -> int:
        sinks = self.sinks[0].shape[-2] if self.sinks else 0
        return sinks + sum(page.count - page.skip for page in self.pages) + self.tail[0].shape[-2]

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values ``[heads, tokens, dim]``."""
        packed = self.pool.read([page.slot for page in self.pages]) if self.pages else None
        out = []
        for which, side in enumerate((self.pool.keys, self.pool.values)):
            parts = [self.sinks[which].to(dtype)] if self.sinks else []
            if packed is not None:
                x = decode(packed[which], side, dtype)
                size = x.shape[2]
                if all(page.count == size for page in self.pages):
                    whole = x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])
                    parts.append(
                        whole[:, self.pages[0].skip :]
                    )  # only the first page of a sequence has filler
                else:
                    parts += [x[i, :, page.skip : page.count] for i, page in enumerate(self.pages)]
            parts.append(self.tail[which].to(dtype))
            out.append(torch.cat(parts, dim=-2))
        return out[0], out[1]


class Sequence:
    """Grows by :meth:`append`, quantizes by :meth:`pack`, shares by :meth:`fork`, shrinks by :meth:`crop`.

    The tail is never changed in place, so a fork shares it as it shares the pages: by reference.

    pool: where pages go; page: tokens a page holds; window: newest tokens that stay unquantized;
    sinks: first tokens that do; dtype: of sinks and tail (None: as they arrive).
    """

    def __init__(self, pool: PagePool, page: int, window: int, sinks: int, dtype: torch.dtype | None) -> None:
        self.pool = pool
        self.page = page
        self.window = window
        self.sink_count = sinks
        self.dtype = dtype
        self.length = 0  # tokens appended, those that a sliding window dropped included
        self.pages: list[Page] = []
        self.sinks: tuple[Tensor, Tensor] | None = None
        self.tail: tuple[Tensor, Tensor] | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens ``[heads, tokens, dim]``, unquantized as yet."""
        keys, values = (t.to(self.dtype) if self.dtype else t for t in (keys, values))
        if self.tail is None:
            self.tail = keys.clone(), values.clone()  # a clone: a slice would keep the whole batch alive
        else:
            self.tail = torch.cat([self.tail[0], keys], -2), torch.cat([self.tail[1], values], -2)
        self.length += keys.shape[-2]

    def pack(self) -> None:
        """Quantize every page that is full and lies behind the window."""
        if self.tail is None:
            return
        first = not self.pages and self.sinks is None and self.length == self.tail[0].shape[-2]
        count = (self.tail[0].shape[-2] - self.window) // self.page
        if count <= 0:
            return
        skip = self.sink_count if first else 0
        states, rest, sinks = [], [], []
        for t in self.tail:
            heads, _, dim = t.shape
            pages = t[:, : count * self.page].reshape(heads, count, self.page, dim).transpose(0, 1)
            if skip:
                # sinks are often the largest keys of all: a filler that equals a neighbour leaves the
                # scales alone
                sinks.append(t[:, :skip].clone())
                pages = pages.clone()
                pages[0, :, :skip] = pages[0, :, skip : skip + 1]
            states.append(pages)
            rest.append(t[:, count * self.page :].clone())
        slots = self.pool.add(states[0], states[1])
        self.pages += [Page(slot, skip if i == 0 else 0, self.page) for i, slot in enumerate(slots)]
        self.tail = rest[0], rest[1]
        if skip:
            self.sinks = sinks[0], sinks[1]

    def view(self) -> View:
        if self.tail is None:
            raise RuntimeError("an empty sequence has nothing to attend to")
        return View(self.pool, tuple(self.pages), self.sinks, self.tail)

    @property
    def held(self) -> int:
        """Tokens that can still be read."""
        return self.view().length if self.tail is not None else 0

    def drop_before(self, position: int) -> None:
        """Release pages all of whose tokens lie before ``position`` (a sliding window has passed them)."""
        start = self.length - self.held
        dead = 0
        for page in self.pages:
            start += page.count - page.skip
            if start > position:
                break
            dead += 1
        if dead:
            if self.sinks is not None:
                raise RuntimeError("a sliding window and sinks exclude each other")
            self.pool.release([page.slot for page in self.pages[:dead]])
            self.pages = self.pages[dead:]

    def crop(self, remove: int) -> None:
        """Forget the newest ``remove`` tokens. A page that is cut keeps its codes and is used in part.

        Raises ValueError when fewer tokens are held.
        """
        if remove > self.held:
            raise ValueError(f"cannot remove {remove} tokens: only {self.held} are held")
        if remove == 0:
            return
        assert self.tail is not None
        self.length -= remove
        loose = self.tail[0].shape[-2]
        keep = max(0, loose - remove)
        self.tail = self.tail[0][:, :keep].clone(), self.tail[1][:, :keep].clone()
        remove -= loose - keep
        while remove and self.pages:
            page = self.pages.pop()
            stay = max(page.skip, page.count - remove)
            remove -= page.count - stay
            if stay > page.skip:
                self.pages.append(Page(page.slot, page.skip, stay))
            else:
                self.pool.release([page.slot])
        if not self.pages and self.sinks is not None:
            # back to a sequence without pages, whose sinks are the front of its tail
            count = self.sinks[0].shape[-2] - remove
            self.tail = self.sinks[0][:, :count].clone(), self.sinks[1][:, :count].clone()
            self.sinks = None

    def fork(self) -> Sequence:
        """Another sequence with the same content; pages, sinks and tail are shared."""
        twin = Sequence(self.pool, self.page, self.window, self.sink_count, self.dtype)
        self.pool.retain([page.slot for page in self.pages])
        twin.length, twin.pages, twin.sinks, twin.tail = self.length, list(self.pages), self.sinks, self.tail
        return twin

    def release(self) -> None:
        """Give all pages back; the sequence is empty afterwards."""
        self.pool.release([page.slot for page in self.pages])
        self.length, self.pages, self.sinks, self.tail = 0, [], None, None

    def __del__(self) -> None:
        if getattr(self, "pages", None):
            self.release()
