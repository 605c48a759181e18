"""A report as one HTML page: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from quantkit.report.plots import figures
from quantkit.report.table import Mark, build
from quantkit.report.text import legend
from quantkit.report.variants import Report

CLASSES = {Mark.BETTER: "better", Mark.WORSE: "worse", Mark.SAME: "same"}

CSS = """
:root { color-scheme: light dark; --back: #fff; --ink: #1c2024; --soft: #5f6872; --line: #d8dde2;
  --panel: #f5f7f9; --good: #0a7a4b; --bad: #b3391f; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --ink: #e6e9ec; --soft: #9aa4ae;
  --line: #33393f; --panel: #1d2125; --good: #4cc38a; --bad: #ff8f73; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, figcaption, .soft { color: var(--soft); } p { margin: .4rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child td, tr:last-child th { border-bottom: 0; }
thead th { font-weight: 600; background: var(--panel); vertical-align: bottom; white-space: normal;
  min-width: 5.5rem; }
tbody th { position: sticky; left: 0; background: var(--back); font-weight: 600; }
th:first-child { text-align: left; } thead th:first-child { position: sticky; left: 0; }
.better { color: var(--good); } .worse { color: var(--bad); } .same { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: .5rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figure.wide svg { min-width: 40rem; }
figure svg { display: block; width: 100%; height: auto; } figcaption { font-size: .9rem; }
.samples { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.sample { padding: .75rem; background: var(--panel); border-radius: .5rem; overflow-wrap: anywhere; }
.sample b { display: block; font-size: .85rem; color: var(--soft); }
.text { white-space: pre-wrap; }
.prompt { font-style: italic; margin: 1rem 0 .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--panel); padding: .75rem; border-radius: .5rem; font-size: .8rem; }
"""


def page(report: Report) -> str:
    """The whole page. Raises UserError where matplotlib is missing."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # An empty icon: else a browser asks the server for one.
        '<link rel="icon" href="data:,">',
        f"<title>{escape(report.title)} – quantkit report</title><style>{CSS}</style></head><body>",
        f"<h1>{escape(report.title)}</h1>",
        _notes(report),
        _table(report),
        _plots(report),
        _samples(report),
        _provenance(report),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def write(report: Report, path: str | Path) -> Path:
    """Write the page; returns its path."""
    path = Path(path)
    path.write_text(page(report), encoding="utf-8")
    return path


def _notes(report: Report) -> str:
    names = sorted({r["windows_name"] for v in report.variants for r in v.rows if r.get("windows_name")})
    return f"<p>Measured on {escape('; '.join(names))}.</p>" if names else ""


def _table(report: Report) -> str:
    table = build(report)
    head = "".join(f'<th scope="col">{escape(c.title)}</th>' for c in table.columns)
    lines = []
    for variant, cells in zip(report.variants, table.cells):
        note = f' title="{escape(variant.note)}"' if variant.note else ""
        line = [f'<tr><th scope="row"{note}>{escape(variant.name)}</th>']
        for cell in cells:
            kind = CLASSES.get(cell.mark)
            mark = f' <span title="{escape(cell.mark.meaning)}">{cell.mark.value}</span>' if kind else ""
            line.append(f'<td class="{kind}">' if kind else "<td>")
            line.append(f"{escape(cell.text)}{mark}</td>")
        lines.append("".join(line) + "</tr>")
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">variant</th>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>\n<p>{escape(legend(table))}</p>"
    )


def _plots(report: Report) -> str:
    found = figures(report)
    if not found:
        return ""
    blocks = [
        f"<figure{' class=wide' if wide else ''}>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, svg, wide in found
    ]
    return '<h2>Plots</h2><div class="plots">' + "\n".join(blocks) + "</div>"


def _samples(report: Report) -> str:
    prompts = list(dict.fromkeys(s.prompt for v in report.variants for s in v.samples))
    if not prompts:
        return ""
    parts = ["<h2>What they write</h2>"]
    for prompt in prompts:
        parts.append(f'<div class="prompt">{escape(prompt)}</div><div class="samples">')
        for variant in report.variants:
            for sample in variant.samples:
                if sample.prompt == prompt:
                    text = f'<div class="text">{escape(sample.text)}</div>'
                    parts.append(f'<div class="sample"><b>{escape(variant.name)}</b>{text}</div>')
        parts.append("</div>")
    return "\n".join(parts)


def _provenance(report: Report) -> str:
    parts = []
    for variant in report.variants:
        if variant.provenance or variant.note:
            data = json.dumps(variant.provenance, ensure_ascii=False, indent=1) if variant.provenance else ""
            note = f"<p>{escape(variant.note)}</p>" if variant.note else ""
            pre = f"<pre>{escape(data)}</pre>" if data else ""
            parts.append(f"<details><summary>{escape(variant.name)}</summary>{note}{pre}</details>")
    return "<h2>How it was measured</h2>" + "\n".join(parts) if parts else ""
