"""A report as a terminal table, Markdown and CSV."""

from __future__ import annotations

import csv as csv_module
import io
import json
from typing import TYPE_CHECKING

from quantkit.report.table import Cell, Mark, Table, build
from quantkit.report.variants import Report

if TYPE_CHECKING:
    from rich.table import Table as RichTable

COLORS = {Mark.BETTER: "green", Mark.WORSE: "red", Mark.SAME: "dim"}
CSV_COLUMNS = ("variant", "metric", "value", "stderr", "unit")


def terminal(report: Report) -> RichTable:
    """A rich table: print it with ``rich.print`` or a Console."""
    from rich.table import Table as RichTable
    from rich.text import Text

    table = build(report)
    out = RichTable(title=Text(report.title), caption=Text(legend(table)), title_justify="left")
    out.add_column("variant", no_wrap=True)
    for column in table.columns:
        out.add_column(Text(column.title), justify="right")
    for name, cells in zip(table.names, table.cells):
        out.add_row(Text(name), *(Text(_text(cell), style=COLORS.get(cell.mark, "")) for cell in cells))
    return out


def markdown(report: Report) -> str:
    """A GitHub table, and a line that explains the marks."""
    table = build(report)
    lines = [
        "| " + " | ".join(["variant", *(_escape(c.title) for c in table.columns)]) + " |",
        "|" + "|".join(["---", *("---:" for _ in table.columns)]) + "|",
    ]
    for name, cells in zip(table.names, table.cells):
        lines.append("| " + " | ".join([_escape(name), *(_escape(_text(cell)) for cell in cells)]) + " |")
    return "\n".join(lines) + "\n\n" + legend(table) + "\n"


def legend(table: Table) -> str:
    """What the marks mean, and against what."""
    used = {cell.mark for cells in table.cells for cell in cells}
    parts = [f"{mark.value} {mark.meaning}" for mark in (Mark.BETTER, Mark.WORSE, Mark.SAME) if mark in used]
    if not parts:
        return "± is one standard error"
    others = sorted({table.names[b] for b in table.baselines if b})
    best = f", or the best ({', '.join(others)}) where that has no value" if others else ""
    return (
        f"± is one standard error. {'; '.join(parts)}. Baseline: {table.names[0]}{best}. Measures on the "
        "same text are compared window by window, which sees smaller differences than the two ± suggest."
    )


def csv(report: Report) -> str:
    """Every row of every variant, one a line; what is not in the five columns stands in "more" as JSON."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS, "more"])
    for variant in report.variants:
        for row in variant.rows:
            more = {k: v for k, v in row.items() if k not in CSV_COLUMNS}
            known = [variant.name, row["metric"], row.get("value"), row.get("stderr"), row.get("unit", "")]
            writer.writerow([*known, json.dumps(more, ensure_ascii=False, sort_keys=True)])
    return out.getvalue()


def _text(cell: Cell) -> str:
    return f"{cell.text} {cell.mark.value}".rstrip()


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
