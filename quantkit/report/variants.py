"""What a report is made of: variants of one model, each with its rows, layer errors and text samples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import UserError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A continuation: ``text`` is what the variant wrote after ``prompt``."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Variant:
    """name: short, for axes. rows: as the evals give them. layer_errors: module -> relative output error.

    note: one line about how it was made. provenance: see :func:`quantkit.evals.provenance`.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    layer_errors: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    note: str = ""
    provenance: Row = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        """The value of the first row of a metric, None where there is none or it is not finite."""
        return next((r["value"] for r in self.rows if r["metric"] == metric), None)

    @property
    def bytes(self) -> float | None:
        """Size of the files, or else of the weights in memory."""
        size = self.value("file_bytes")
        return self.value("weights_total") if size is None else size


@dataclass(frozen=True, slots=True)
class Report:
    """title: the model's name. variants: the first one is the reference (the original)."""

    title: str
    variants: list[Variant]

    def __post_init__(self) -> None:
        names = [v.name for v in self.variants]
        if not names:
            raise UserError("there is nothing to report: give at least one variant")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"two variants are called {twice[0]!r}; give each its own name")

    @property
    def reference(self) -> Variant:
        return self.variants[0]


def save(report: Report, path: str | Path) -> None:
    """Write a report's data as JSON."""
    Path(path).write_text(json.dumps(asdict(report), ensure_ascii=False, indent=1, allow_nan=False), "utf-8")


def load(path: str | Path) -> Report:
    """Read what :func:`save` wrote. Raises UserError for a file that is no report."""
    try:
        value = json.loads(Path(path).read_text("utf-8"))
        variants = [
            Variant(**{**v, "samples": [Sample(**s) for s in v.get("samples", [])]})
            for v in value["variants"]
        ]
        return Report(value["title"], variants)
    except OSError as error:
        raise UserError(f"cannot read report {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no quantkit report: {error}") from error
