import csv
import io
import json
import math

import pytest
from rich.console import Console

from quantkit.errors import UserError
from quantkit.evals import row
from quantkit.report import Mark, Report, Variant, build, load, markdown, save, significance, terminal
from quantkit.report import csv as to_csv
from quantkit.report.table import Column, number
from tests.report.synthetic import report


def column(table, label):
    return next(j for j, c in enumerate(table.columns) if c.label == label)


def two(a, b, metric="kl", **more):
    left = Variant("a", [row(metric, a[0], "", a[1], **more)])
    right = Variant("b", [row(metric, b[0], "", b[1], **more)])
    return left, right


LOWER = Column("kl", "KL", "", 1, False)
HIGHER = Column("top1_agreement", "top-1", "", 1, True)


def test_significance_by_hand():
    # Errors 0.3 and 0.4 give 0.5 together: a difference of 1.0 is two of them, 1.01 is more.
    assert significance(*two((5, 0.3), (6.0, 0.4)), LOWER) is Mark.SAME
    assert significance(*two((5, 0.3), (6.01, 0.4)), LOWER) is Mark.WORSE
    assert significance(*two((5, 0.3), (3.9, 0.4)), LOWER) is Mark.BETTER
    assert significance(*two((5, 0.3), (6.01, 0.4), metric="top1_agreement"), HIGHER) is Mark.BETTER
    assert significance(*two((5, None), (6, 0.1)), LOWER) is Mark.UNKNOWN


def test_windows_in_pairs_see_what_separate_errors_hide():
    base = [1.0, 5.0, 9.0]
    more = {"data_sha256": "x"}
    a = Variant("a", [row("kl", 5.0, "", 2.3, per_window=base, **more)])
    b = Variant(
        "b",
        [row("kl", 5.1, "", 2.3, per_window=[x + 0.1 + d for x, d in zip(base, (0, 0.01, -0.01))], **more)],
    )
    assert significance(a, b, LOWER) is Mark.WORSE
    other_text = Variant("b", [{**b.rows[0], "data_sha256": "y"}])
    assert significance(a, other_text, LOWER) is Mark.SAME


def test_perplexity_is_judged_by_its_log_likelihood():
    table = build(report())
    j = column(table, "perplexity")
    marks = [line[j].mark for line in table.cells]
    assert marks[0] is Mark.BASELINE and marks[3] is Mark.WORSE
    assert "± 1.9" in table.cells[3][j].text  # the plain errors alone would not tell 22.5 from 20.0


def test_baseline_is_the_best_where_the_reference_has_no_value():
    table = build(report())
    j = column(table, "KL to original")
    assert table.cells[0][j].text == "–" and table.baselines[j] == 1
    assert table.cells[1][j].mark is Mark.BASELINE and table.cells[3][j].mark is Mark.WORSE


def test_columns_are_told_apart_and_ordered():
    labels = [c.title for c in build(report()).columns]
    assert labels.index("files (MB)") < labels.index("perplexity") < labels.index("toy/acc (%)")
    assert "TTFT, 128 tokens (ms)" in labels and "TTFT, 1024 tokens (ms)" in labels
    assert not any("nll" in label or "cache_bytes (" in label for label in labels)


def test_exact_values_get_no_mark():
    table = build(report())
    j = column(table, "files")
    assert {line[j].mark for line in table.cells[1:]} == {Mark.UNKNOWN}


@pytest.mark.parametrize(
    "value, error, factor, text",
    [
        (0.012345, 0.00067, 1, "0.01235 ± 0.00067"),
        (20.123, 1.94, 1, "20.1 ± 1.9"),
        (0.9953, 0.0041, 100, "99.53 ± 0.41"),
        (269_060_552, None, 1e-6, "269.1"),
        (23040, None, 1, "23040"),
        (0.0, None, 1, "0"),
        (1234.5, 123.0, 1, "1234 ± 123"),
        (1e-9, None, 1, "1e-09"),
        (0.5, 0.0, 1, "0.5000"),
    ],
)
def test_number(value, error, factor, text):
    assert number(value, error, factor) == text


def test_markdown_has_every_cell_and_explains_the_marks():
    text = markdown(report())
    lines = text.splitlines()
    table = build(report())
    assert len(lines) == 2 + 5 + 2 and all(line.count("|") == len(table.columns) + 2 for line in lines[:7])
    assert "▼" in text and "worse than the baseline by more than 2 standard errors" in lines[-1]
    piped = Report("x", [Variant("a|b", [row("kl", 1.0, "nats")])])
    assert "a\\|b" in markdown(piped)


def test_csv_holds_every_row():
    lines = list(csv.DictReader(io.StringIO(to_csv(report()))))
    rows = [(v.name, r) for v in report().variants for r in v.rows]
    assert len(lines) == len(rows)
    for line, (name, r) in zip(lines, rows):
        assert (line["variant"], line["metric"], float(line["value"])) == (name, r["metric"], r["value"])
        assert json.loads(line["more"]) == {
            k: v for k, v in r.items() if k not in ("metric", "value", "stderr", "unit")
        }


def test_terminal():
    console = Console(width=320, record=True, file=io.StringIO())
    console.print(terminal(report()))
    text = console.export_text()
    for piece in (
        "W4 gptq g64",
        "0.0500 ± 0.0033",
        "SmolLM2-135M-Instruct (synthetic)",
        "Baseline: original",
    ):
        assert piece in text, piece


def test_markup_in_names_is_text():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(Report("[red]t[/red]", [Variant("[bold]v", [row("kl", 1.0, "")])])))
    assert "[bold]v" in console.export_text()


def test_values_that_are_missing():
    odd = Variant("odd", [row("perplexity", math.inf, ""), row("kl", 0.5, "")])
    table = build(Report("x", [Variant("ok", [row("perplexity", 9.0, "", 0.1)]), odd]))
    assert table.cells[1][column(table, "perplexity")].text == "–"
    assert build(Report("x", [Variant("empty")])).columns == []


def test_save_and_load(tmp_path):
    save(report(), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == report()
    for content in ("{}", "[1]", "no json", '{"title": "x", "variants": [{"nome": 1}]}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match="is no quantkit report"):
            load(tmp_path / "bad.json")
    with pytest.raises(UserError, match="cannot read report"):
        load(tmp_path / "missing.json")


def test_report_refuses_nothing_and_twins():
    with pytest.raises(UserError, match="at least one variant"):
        Report("x", [])
    with pytest.raises(UserError, match="two variants are called 'a'"):
        Report("x", [Variant("a"), Variant("a")])
