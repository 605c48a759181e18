"""The calibration audit: what went in, what was used, and what was changed on the way."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table

EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts are exact. ``as_dict`` is JSON-ready; ``sha256`` covers shape and token ids of the windows.

    rows_in: rows read. dropped: reason -> rows. duplicates: rows dropped as exact copies (also in dropped).
    rows_used: rows with at least one token in a window; rows_left_over: sound rows that were not needed.
    windows_asked / windows: samples wanted and made. tokens: windows x seq_len.
    tokens_left_over: tokenized but in no window. lengths: histogram of tokens per passage, "a-b" -> passages.
    kinds, languages: tokens of the windows by the label of their row ("" where none is given).
    """

    source: str
    files: list[str]
    rows_in: int
    rows_used: int
    rows_left_over: int
    dropped: dict[str, int]
    duplicates: int
    cut_rows: int
    windows_asked: int
    windows: int
    seq_len: int
    tokens: int
    tokens_left_over: int
    lengths: dict[str, int]
    bos: str
    separator: str
    template: str
    chat_rows: int
    kinds: dict[str, int]
    languages: dict[str, int]
    seed: int
    sha256: str
    skipped_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def short(self) -> bool:
        """True when the source gave fewer windows than were asked for."""
        return self.windows < self.windows_asked

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs for a terminal or a model card."""
        used = f"{self.rows_used} of {self.rows_in}"
        if self.rows_left_over:
            used += f" ({self.rows_left_over} not needed)"
        windows = f"{self.windows} × {self.seq_len} tokens = {self.tokens:,}"
        if self.short:
            windows += f"; {self.windows_asked} were asked for, the text gives no more"
        rows = [
            ("source", f"{self.source} ({', '.join(self.files)})" if self.files else self.source),
            ("rows used", used),
            ("dropped", ", ".join(f"{n} {why}" for why, n in self.dropped.items()) or "none"),
            ("windows", windows),
            ("left over", f"{self.tokens_left_over:,} tokens"),
            ("passage lengths", ", ".join(f"{k}: {n}" for k, n in self.lengths.items()) or "not known"),
            ("BOS", self.bos),
            ("separator", self.separator),
            ("chat template", self.template),
            ("kinds", _shares(self.kinds)),
            ("languages", _shares(self.languages)),
            ("seed", str(self.seed)),
            ("sha256 of ids", self.sha256),
        ]
        if self.cut_rows:
            rows.insert(3, ("long rows", f"{self.cut_rows} cut into passages"))
        if self.skipped_files:
            rows.append(("files passed over", ", ".join(self.skipped_files)))
        rows += [("note", note) for note in self.notes]
        return [(label, value) for label, value in rows if value]

    def table(self) -> Table:
        """A rich table for the terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Calibration data", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in self.lines():
            # Text, not str: square brackets of a file name or template are no markup.
            table.add_row(
                Text(label), Text(value, style="yellow" if label == "windows" and self.short else "")
            )
        return table


def hash_ids(ids: Tensor) -> str:
    """sha256 over shape and little-endian int64 values."""
    array = np.ascontiguousarray(ids.cpu().numpy().astype("<i8"))
    return hashlib.sha256(repr(tuple(array.shape)).encode() + array.tobytes()).hexdigest()


def histogram(lengths: list[int]) -> dict[str, int]:
    """Counts by powers of two, empty bins left out: {"1-15": 3, "16-31": 9, …, "4096+": 1}."""
    edges = (0, *EDGES)
    counts: dict[str, int] = {}
    for low, high in zip(edges, (*EDGES, None), strict=True):
        n = sum(low <= length and (high is None or length < high) for length in lengths)
        if n:
            counts[f"{low}+" if high is None else f"{max(low, 1)}-{high - 1}"] = n
    return counts


def _shares(tokens: dict[str, int]) -> str:
    known = {name: n for name, n in tokens.items() if name}
    total = sum(tokens.values())
    ordered = sorted(known.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in ordered)
