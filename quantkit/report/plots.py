"""Plots of a report as SVG text: no fixed background or ink, so that a page decides on light or dark."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any

from quantkit.errors import UserError
from quantkit.report.variants import Report, Row, Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours for the colour-blind, without black and yellow: they are legible on white and on
# near-black alike. Marker shapes repeat the distinction.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C")
MARKERS = "osD^vPX"
INK = "#123456"  # a colour that nothing else uses; becomes currentColor in the SVG
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
BLOCK = re.compile(r"(?:^|\.)(\d+)\.(.+)$")


def color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def available() -> None:
    """Raises UserError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            "plots need matplotlib: pip install 'quantkit[eval]' (tables, Markdown and CSV work without it)"
        ) from error


@contextmanager
def _axes(name: str, width: float = 4.6, height: float = 3.5) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Axes to draw on, and a function that gives the SVG text."""
    available()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The salt makes element ids repeatable, and different between the figures of a page.
    settings: Any = {**STYLE, "svg.hashsalt": f"quantkit {name}"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()

        def finish() -> str:
            out = io.StringIO()
            metadata = {"Date": None, "Creator": None, "Type": None, "Format": None}
            figure.savefig(out, format="svg", transparent=True, metadata=metadata)
            return _inline(out.getvalue(), name)

        yield axes, finish


def _inline(svg: str, name: str) -> str:
    """The <svg> element alone, scalable, in the page's own ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"', rf'<svg role="img" aria-label="{name}" \1', svg, count=1
    ).replace(" height=", " data-height=", 1)


def pareto(report: Report, metric: str, label: str, better: str, factor: float = 1.0) -> str | None:
    """A metric against bytes, the best trade-offs joined by a line. None with fewer than two points.

    better: "low" or "high" values. A logarithmic axis is used when all values are positive and span a decade.
    """
    points = []
    for i, variant in enumerate(report.variants):
        found = next((r for r in variant.rows if r["metric"] == metric and r.get("value") is not None), None)
        if found and variant.bytes:
            points.append(
                (variant.bytes / 1e6, found["value"] * factor, (found.get("stderr") or 0) * factor, i)
            )
    if len(points) < 2:
        return None
    with _axes(f"{metric} against size") as (axes, finish):
        for x, y, error, i in points:
            style: dict[str, Any] = {
                "fmt": MARKERS[i % len(MARKERS)],
                "color": color(i),
                "ms": 8,
                "capsize": 3,
            }
            axes.errorbar(x, y, yerror_or_none(error), label=report.variants[i].name, **style)
        edge = frontier([(x, y) for x, y, _, _ in points], better)
        axes.plot(*zip(*edge), color=INK, alpha=0.35, lw=1, zorder=0)
        values = [y for _, y, _, _ in points]
        if min(values) > 0 and max(values) > 10 * min(values):
            axes.set_yscale("log")
        axes.set_xlabel("size (MB)")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        _legend(axes, len(points))
        return finish()


def yerror_or_none(error: float) -> float | None:
    """Matplotlib draws a flat cap for an error of 0, which would claim an exact value."""
    return error or None


def frontier(points: list[tuple[float, float]], better: str) -> list[tuple[float, float]]:
    """Points that no other beats in both respects, by size. better: which y is good, "low" or "high"."""
    sign = 1 if better == "low" else -1
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (p[0], sign * p[1])):
        if not kept or sign * y < sign * kept[-1][1]:
            kept.append((x, y))
    return kept


def by_block(errors: dict[str, float]) -> dict[int, float]:
    """Mean error of the modules of each decoder block: "model.layers.3.mlp.up_proj" belongs to block 3."""
    groups = defaultdict(list)
    for name, error in errors.items():
        if found := BLOCK.search(name):
            groups[int(found[1])].append(error)
    return {block: sum(values) / len(values) for block, values in sorted(groups.items())}


def by_kind(errors: dict[str, float]) -> dict[str, float]:
    """Mean error over the blocks for each module of a block, in order of appearance."""
    groups = defaultdict(list)
    for name, error in errors.items():
        found = BLOCK.search(name)
        groups[found[2] if found else name].append(error)
    return {kind: sum(values) / len(values) for kind, values in groups.items()}


def layer_bars(report: Report, group: str) -> str | None:
    """Bars of the relative output error; group: "block" or "kind". None where no variant has layer errors."""
    summarize: Callable[[dict[str, float]], dict[Any, float]] = by_block if group == "block" else by_kind
    found = [(i, v, summarize(v.layer_errors)) for i, v in enumerate(report.variants) if v.layer_errors]
    if not found:
        return None
    keys = list(dict.fromkeys(key for _, _, values in found for key in values))
    if group == "block":
        keys.sort()
    wide = min(10.0, max(4.6, 0.13 * len(keys) * len(found)))
    with _axes(f"error by {group}", width=wide) as (axes, finish):
        bar = 0.8 / len(found)
        for n, (i, variant, values) in enumerate(found):
            places = [k - 0.4 + (n + 0.5) * bar for k, key in enumerate(keys) if key in values]
            heights = [values[key] for key in keys if key in values]
            axes.bar(places, heights, bar, color=color(i), label=variant.name)
        step = max(1, len(keys) // 16) if group == "block" else 1
        names = [str(key).split(".")[-1] for key in keys]
        tilt: dict[str, Any] = {"rotation": 35, "ha": "right"} if group == "kind" else {}
        axes.set_xticks(range(0, len(keys), step), names[::step], **tilt)
        axes.set_xlabel("decoder block" if group == "block" else "linear, mean over blocks")
        axes.set_ylabel("relative output error")
        axes.margins(x=0.01)
        axes.grid(axis="x", visible=False)
        _legend(axes, len(found))
        return finish()


def latency_bars(report: Report, name: str) -> str | None:
    """Bars of the median of "ttft" or "itl" with a line up to p90, one group a prompt length."""
    table: dict[int, dict[int, tuple[float, float | None]]] = defaultdict(dict)
    for i, variant in enumerate(report.variants):
        for prompt, value in _by_prompt(variant, f"{name}_median").items():
            table[prompt][i] = (value, _by_prompt(variant, f"{name}_p90").get(prompt))
    if not table:
        return None
    prompts = sorted(table)
    shown = sorted({i for line in table.values() for i in line})
    with _axes(f"{name.upper()} by variant") as (axes, finish):
        bar = 0.8 / len(shown)
        for n, i in enumerate(shown):
            with_value = [(k, table[p][i]) for k, p in enumerate(prompts) if i in table[p]]
            places = [k - 0.4 + (n + 0.5) * bar for k, _ in with_value]
            heights = [value for _, (value, _) in with_value]
            tops = [max(0.0, (p90 or value) - value) for _, (value, p90) in with_value]
            axes.bar(places, heights, bar, color=color(i), label=report.variants[i].name)
            axes.errorbar(places, heights, [[0.0] * len(tops), tops], fmt="none", ecolor=INK, capsize=2, lw=1)
        axes.set_xticks(range(len(prompts)), [f"{p} tokens" for p in prompts])
        axes.set_xlabel("prompt")
        axes.set_ylabel("ms to the first token" if name == "ttft" else "ms between tokens")
        axes.grid(axis="x", visible=False)
        _legend(axes, len(shown))
        return finish()


def _by_prompt(variant: Variant, metric: str) -> dict[int, float]:
    rows = [r for r in variant.rows if r["metric"] == metric and r.get("value") is not None]
    return {r.get("prompt_tokens", 0): r["value"] for r in rows if r.get("batch", 1) == 1}


def cache_lines(report: Report) -> str | None:
    """Lines of the cache's bytes against context (rows "cache_bytes"). Equal curves are drawn once."""
    curves: dict[tuple[tuple[int, float], ...], list[int]] = defaultdict(list)
    for i, variant in enumerate(report.variants):
        rows: list[Row] = [
            r for r in variant.rows if r["metric"] == "cache_bytes" and r.get("value") is not None
        ]
        if rows:
            curves[tuple(sorted((r["context"], r["value"]) for r in rows))].append(i)
    if not curves:
        return None
    with _axes("KV cache against context") as (axes, finish):
        for curve, owners in curves.items():
            label = fill(", ".join(report.variants[i].name for i in owners), 30)
            style: dict[str, Any] = {"marker": MARKERS[owners[0] % len(MARKERS)], "color": color(owners[0])}
            axes.plot([c for c, _ in curve], [b / 1e6 for _, b in curve], label=label, **style)
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("KV cache of one sequence (MB)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _legend(axes, len(curves))
        return finish()


def _legend(axes: Axes, entries: int) -> None:
    """Above the plot, where it hides no data however many variants there are."""
    columns = 1 if entries == 1 else 2
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=9, borderaxespad=0.2)


def figures(report: Report) -> list[tuple[str, str, bool]]:
    """(caption, svg, wide) for every plot that the report's rows allow."""
    wanted: list[tuple[str, str | None, bool]] = [
        ("Divergence from the original against size", pareto(report, "kl", "KL (nats/token)", "low"), False),
        ("Perplexity against size", pareto(report, "perplexity", "perplexity", "low"), False),
        ("Decoding speed against size", pareto(report, "decode_rate", "tokens/s", "high"), False),
        ("Time to the first token: median, line to p90", latency_bars(report, "ttft"), False),
        ("Time between tokens: median, line to p90", latency_bars(report, "itl"), False),
        ("KV cache as the context grows", cache_lines(report), False),
        ("Error by linear", layer_bars(report, "kind"), False),
        ("Error by decoder block", layer_bars(report, "block"), True),
    ]
    return [(caption, svg, wide) for caption, svg, wide in wanted if svg is not None]
