"""Token by token to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Feed token ids, get text that is safe to show.

    A token may hold half a character (byte-level vocabularies) or the beginning of a stop string; such text is
    held back until the next tokens decide. ``text`` is everything given out; ``stopped`` the stop string met.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        # ids[_from:_shown] are decoded text already; decoding again from _from keeps the spaces between tokens
        self._from = self._shown = 0
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """Text that is certain now; "" while it is not. Nothing more comes after ``stopped`` is set."""
        if self.stopped is not None:
            return ""
        self._ids.append(token)
        before, after = (
            self._decode(self._ids[self._from : self._shown]),
            self._decode(self._ids[self._from :]),
        )
        if after.endswith("�") or len(after) <= len(before):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return self._release(after[len(before) :], final=False)

    def finish(self) -> str:
        """What was still held back."""
        if self.stopped is not None:
            return ""
        before, after = (
            self._decode(self._ids[self._from : self._shown]),
            self._decode(self._ids[self._from :]),
        )
        self._from, self._shown = self._shown, len(self._ids)
        return self._release(after[len(before) :], final=True)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, text: str, final: bool) -> str:
        self._held += text
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.stopped = min(found)
            out, self._held = self._held[:at], ""
        else:
            keep = 0 if final else self._undecided()
            cut = len(self._held) - keep
            out, self._held = self._held[:cut], self._held[cut:]
        self.text += out
        return out

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(
            (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])),
            default=0,
        )
