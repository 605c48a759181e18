import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from quantkit.errors import UserError
from quantkit.evals import row
from quantkit.report import Report, Variant, html, plots
from tests.report.synthetic import report

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "img", "input", "hr", "use", "path", "rect", "stop"}


@pytest.fixture(scope="module")
def page():
    pytest.importorskip("matplotlib", reason="the eval extra is not installed")
    return html.page(report())


def svgs(page):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_well_formed_and_asks_for_nothing(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "<script" not in page and "@import" not in page and not re.search(r"url\((?!#)", page)
    addresses = {a for a in re.findall(r'(?:src|href)="([^"]*)"', page) if not a.startswith(("#", "data:"))}
    assert addresses == set()
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_every_variant_and_value_is_there(page):
    for variant in report().variants:
        assert page.count(f'<th scope="row" title="{variant.note}">{variant.name}</th>') == 1
    for piece in (
        "0.0500 ± 0.0033",
        "99.91 ± 0.40",
        "first 8 of 600 windows",
        "Water finds its way",
        "quantkit eval x",
    ):
        assert piece in page, piece
    assert 'class="worse"' in page and 'class="same"' in page


def test_text_of_a_model_cannot_become_markup(page):
    assert "<b>not bold</b>" not in page and "&lt;b&gt;not bold&lt;/b&gt; &amp; so on" in page
    evil = Report("<script>1</script>", [Variant("<img src=x>", [row("kl", 1.0, "")], note='"><script>')])
    assert "<script" not in html.page(evil) and "<img" not in html.page(evil)


def test_all_plots_are_drawn(page):
    found = svgs(page)
    labels = [svg.get("aria-label") for svg in found]
    assert labels == ["kl against size", "perplexity against size", "decode_rate against size", "TTFT by variant",
                      "ITL by variant", "KV cache against context", "error by kind", "error by block"]  # fmt: skip
    for svg in found:
        words = {"".join(t.itertext()).strip() for t in svg.iter(f"{SVG}text")}
        assert any("W4 gptq" in w for w in words), (svg.get("aria-label"), words)
        assert svg.get("viewBox") and svg.get("width") is None and svg.get("height") is None


def test_ids_of_two_plots_do_not_collide(page):
    clips = [
        set(re.findall(r'<clipPath id="([^"]+)"', text))
        for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    ]
    assert all(clips) and len(set.union(*clips)) == sum(map(len, clips))


def test_ink_follows_the_page(page):
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "currentColor" in drawn and plots.INK not in drawn
    assert not re.search(r"fill: ?#(000000|ffffff)", drawn), (
        "a fixed black or white would vanish in one of the modes"
    )


def test_bars_have_the_heights_of_the_data(page):
    """One bar per block and variant, their heights in proportion to the mean errors."""
    svg = next(s for s in svgs(page) if s.get("aria-label") == "error by block")
    bars = [
        p
        for p in svg.iter(f"{SVG}path")
        if plots.color(1).lower() in (p.get("style") or "").lower() and p.get("clip-path")
    ]
    assert len(bars) == 30
    tops = []
    for bar in bars:
        ys = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", bar.get("d"))]
        tops.append(max(ys) - min(ys))
    want = list(plots.by_block(report().variants[1].layer_errors).values())
    scale = tops[0] / want[0]
    assert tops == pytest.approx([scale * w for w in want], rel=0.02)


def test_same_report_same_bytes(page):
    assert html.page(report()) == page


def test_frontier():
    points = [(1, 9), (2, 5), (3, 6), (4, 1), (2, 7)]
    assert plots.frontier(points, "low") == [(1, 9), (2, 5), (4, 1)]
    assert plots.frontier(points, "high") == [(1, 9)]


def test_layer_groups():
    errors = {
        "model.layers.0.mlp.up": 1.0,
        "model.layers.0.mlp.down": 3.0,
        "model.layers.10.mlp.up": 5.0,
        "lm_head": 7.0,
    }
    assert plots.by_block(errors) == {0: 2.0, 10: 5.0}
    assert plots.by_kind(errors) == {"mlp.up": 3.0, "mlp.down": 3.0, "lm_head": 7.0}


def test_a_report_with_little_in_it():
    page = html.page(Report("x", [Variant("only", [row("perplexity", 9.0, "", 0.1)])]))
    assert "<svg" not in page and "9.00 ± 0.10" in page
    assert "Plots" not in page and "What they write" not in page


def test_matplotlib_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'quantkit\[eval\]'"):
        html.page(report())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(page, tmp_path, width):
    """Chromium draws it without a console message, and nothing is wider than the window."""
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    # A probe that writes the page's width into its title; the page itself has no script.
    probe = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    path.write_text(page.replace("</body>", probe + "</body>"), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000"]  # fmt: skip
    dom = subprocess.run(
        [browser, *flags, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in dom.stderr
    assert dom.stdout.count("<svg") == 8
    scroll, inner = map(int, re.search(r"<title>(\d+) of (\d+)</title>", dom.stdout).groups())
    assert scroll <= inner, "the page scrolls sideways"
    subprocess.run(
        [browser, *flags, f"--screenshot={shot}", f"file://{path}"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert shot.stat().st_size > 20_000
