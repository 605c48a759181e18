"""Reports: variants of a model side by side, as a terminal table, Markdown, CSV, or one page of HTML."""

from __future__ import annotations

from quantkit.report.table import Mark, Table, build, significance
from quantkit.report.text import csv, markdown, terminal
from quantkit.report.variants import Report, Sample, Variant, load, save

__all__ = [
    "Mark",
    "Report",
    "Sample",
    "Table",
    "Variant",
    "build",
    "csv",
    "load",
    "markdown",
    "save",
    "significance",
    "terminal",
]
