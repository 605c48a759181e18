"""The table of a report: columns from the rows that are there, cells with errors, marks of significance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from quantkit.evals._stats import paired_difference
from quantkit.report.variants import Report, Row, Variant

# Metrics that a table shows, in this order, and how: label, unit shown, factor, higher is better (None: no
# judgement). Others (quantiles, per-context rows) appear in the CSV and the plots.
SHOWN: dict[str, tuple[str, str, float, bool | None]] = {
    "file_bytes": ("files", "MB", 1e-6, False),
    "weights_total": ("weights", "MB", 1e-6, False),
    "perplexity": ("perplexity", "", 1, False),
    "kl": ("KL to original", "nats", 1, False),
    "kl_noise_floor": ("KL noise floor", "nats", 1, None),
    "top1_agreement": ("same top-1", "%", 100, True),
    "ttft_median": ("TTFT", "ms", 1, False),
    "itl_median": ("ITL", "ms", 1, False),
    "itl_p99": ("ITL p99", "ms", 1, False),
    "decode_rate": ("decode", "tok/s", 1, True),
    "peak_rss": ("peak memory", "MB", 1e-6, False),
    "cache_bytes_per_token": ("cache/token", "B", 1, False),
}
QUALIFIERS = ("corpus", "seq_len", "prompt_tokens", "context", "batch")


class Mark(Enum):
    """How a value stands to the column's baseline. The sign is what tables print."""

    BASELINE = ""
    BETTER = "▲"
    WORSE = "▼"
    SAME = "≈"
    UNKNOWN = " "

    @property
    def meaning(self) -> str:
        return {
            Mark.BETTER: "better than the baseline by more than 2 standard errors",
            Mark.WORSE: "worse than the baseline by more than 2 standard errors",
            Mark.SAME: "within 2 standard errors of the baseline",
        }.get(self, "")


@dataclass(frozen=True, slots=True)
class Column:
    metric: str
    label: str
    unit: str
    factor: float
    higher_is_better: bool | None
    where: tuple[tuple[str, object], ...] = ()

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Cell:
    """text: formatted value with its error; mark against the column's baseline; row: None if not measured."""

    text: str
    mark: Mark = Mark.UNKNOWN
    row: Row | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """cells[i][j]: variant i, column j. baselines[j]: the variant that column j is judged against."""

    columns: list[Column]
    names: list[str]
    cells: list[list[Cell]]
    baselines: list[int | None]


def build(report: Report) -> Table:
    """The table of a report.

    The baseline of a column is the reference, or where that has no value (as for the divergence from itself)
    the best variant.
    """
    columns = _columns(report)
    grid = [[_find(variant, column) for column in columns] for variant in report.variants]
    baselines = [_baseline([line[j] for line in grid], column) for j, column in enumerate(columns)]
    cells = [
        [_cell(report, i, grid[i][j], column, baselines[j], grid) for j, column in enumerate(columns)]
        for i in range(len(grid))
    ]
    return Table(columns, [v.name for v in report.variants], cells, baselines)


def _cell(
    report: Report, i: int, row: Row | None, column: Column, base: int | None, grid: list[list[Row | None]]
) -> Cell:
    if row is None:
        return Cell("–")
    text = number(row["value"], row.get("stderr"), column.factor)
    if base is None or i == base or column.higher_is_better is None:
        return Cell(text, Mark.BASELINE if i == base else Mark.UNKNOWN, row)
    other = report.variants[base]
    return Cell(text, significance(other, report.variants[i], column), row)


def _columns(report: Report) -> list[Column]:
    found: dict[tuple, Column] = {}
    for variant in report.variants:
        for row in variant.rows:
            shown = SHOWN.get(row["metric"])
            if shown is None and "task" in row:
                fraction = row.get("unit") == "fraction"
                unit, factor = ("%", 100.0) if fraction else (row.get("unit", ""), 1.0)
                shown = (row["metric"], unit, factor, row.get("higher_is_better"))
            if shown is None or row.get("value") is None:
                continue
            where = tuple((key, row[key]) for key in QUALIFIERS if key in row)
            found.setdefault((row["metric"], where), Column(row["metric"], *shown, where))
    order = list(SHOWN)
    place = {metric: i for i, metric in enumerate(order)}
    columns = sorted(found.values(), key=lambda c: place.get(c.metric, len(order)))
    return [_qualified(column, columns) for column in columns]


def _qualified(column: Column, columns: list[Column]) -> Column:
    """The label with what tells this column from others of the same metric."""
    twins = [c for c in columns if c.metric == column.metric]
    if len(twins) == 1:
        return column
    differ = [k for k in QUALIFIERS if len({dict(c.where).get(k) for c in twins}) > 1]
    words = {
        "prompt_tokens": "{} tokens",
        "batch": "batch {}",
        "context": "context {}",
        "seq_len": "{} tokens",
    }
    extra = [words.get(k, "{}").format(dict(column.where)[k]) for k in differ if k in dict(column.where)]
    label = ", ".join([column.label, *extra])
    return Column(column.metric, label, column.unit, column.factor, column.higher_is_better, column.where)


def _find(variant: Variant, column: Column) -> Row | None:
    for row in variant.rows:
        where = tuple((key, row[key]) for key in QUALIFIERS if key in row)
        if row["metric"] == column.metric and where == column.where and row.get("value") is not None:
            return row
    return None


def _baseline(rows: list[Row | None], column: Column) -> int | None:
    if rows[0] is not None:
        return 0
    present = [(row["value"], i) for i, row in enumerate(rows) if row is not None]
    if not present or column.higher_is_better is None:
        return None
    return (max if column.higher_is_better else min)(present)[1]


def significance(base: Variant, other: Variant, column: Column) -> Mark:
    """Whether ``other`` differs from ``base`` by more than 2 standard errors, and to which side.

    Window means of the same windows are compared in pairs; else the two standard errors are added in squares,
    which overstates the error when both were measured on the same text. Values without an error (bytes) are
    UNKNOWN: they are exact, and a reader sees which is smaller.
    """
    a, b = _find(base, column), _find(other, column)
    if a is None or b is None or column.higher_is_better is None:
        return Mark.UNKNOWN
    paired = _paired(base, other, column, a, b)
    if paired is not None:
        difference, error = paired
    elif a.get("stderr") is not None and b.get("stderr") is not None:
        difference, error = b["value"] - a["value"], math.hypot(a["stderr"], b["stderr"])
    else:
        return Mark.UNKNOWN
    if abs(difference) <= 2 * error:
        return Mark.SAME
    return Mark.BETTER if (difference > 0) == column.higher_is_better else Mark.WORSE


def _paired(base: Variant, other: Variant, column: Column, a: Row, b: Row) -> tuple[float, float] | None:
    if column.metric == "perplexity":  # its window means are those of the log-likelihood, which orders alike
        twin = Column("nll", "", "", 1, False, column.where)
        a, b = _find(base, twin) or a, _find(other, twin) or b
    left, right = a.get("per_window"), b.get("per_window")
    same = a.get("data_sha256") is not None and a.get("data_sha256") == b.get("data_sha256")
    if not left or not right or not same or len(left) != len(right) or len(left) < 2:
        return None
    found = paired_difference(left, right)
    return found.mean, found.stderr or 0.0


def number(value: float, error: float | None = None, factor: float = 1.0) -> str:
    """Like "12.34 ± 0.05": as many places as the error deserves, two digits of it; else four digits.

    >>> number(0.012345, 0.00067)
    '0.01235 ± 0.00067'
    >>> number(269_060_552, factor=1e-6)
    '269.1'
    """
    value *= factor
    if error is None or error == 0:
        if value == 0:
            return "0"
        places = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{places}f}" if places <= 6 else f"{value:.3g}"
    error *= factor
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}" if places <= 8 else f"{value:.3g} ± {error:.2g}"
