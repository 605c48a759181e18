"""The bundled text: enough of it, all different, and described truly by its README.

Token counts need the demo model's tokenizer: set QUANTKIT_MODELS to a folder with smollm2-135m in it.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from quantkit.calib import default_folder, load_calibration

FOLDER = default_folder()
FILES = sorted(FOLDER.glob("*.jsonl"))
ROWS = [
    (path.name, json.loads(line)) for path in FILES for line in path.read_text("utf-8").split("\n") if line
]


@pytest.fixture(scope="module")
def smollm():
    folder = Path(os.environ.get("QUANTKIT_MODELS", "")) / "smollm2-135m"
    if not os.environ.get("QUANTKIT_MODELS") or not (folder / "tokenizer.json").is_file():
        pytest.skip("needs the tokenizer of the demo model: QUANTKIT_MODELS=folder that holds smollm2-135m")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def words_of(row):
    return row["text"] if "text" in row else "\n".join(m["content"] for m in row["messages"])


def sentences(text):
    parts = re.split(r"(?<=[.!?。！？])\s+|\n+", text)
    # Prose and speech only: short lines, table rules, import lines and refrains may well recur.
    return [p.strip() for p in parts if len(p.strip()) >= 40 and re.match(r"\w", p.strip())]


def test_rows_are_well_formed():
    ids = Counter(row["id"] for _, row in ROWS)
    assert len(ROWS) >= 80
    assert [i for i, n in ids.items() if n > 1] == []
    for _, row in ROWS:
        assert ("text" in row) != ("messages" in row), row["id"]
        assert row["kind"] and row["lang"] and words_of(row).strip(), row["id"]
        for message in row.get("messages", []):
            assert message["role"] in ("system", "user", "assistant"), row["id"]
        assert "\ufffd" not in words_of(row), row["id"]


def test_no_sentence_twice():
    count = Counter(s for _, row in ROWS if row["kind"] != "code" for s in sentences(words_of(row)))
    assert sum(count.values()) > 800, "the splitter found too little to be a check"
    assert [s for s, n in count.items() if n > 1] == []


def test_variety():
    kinds = Counter(row["kind"] for _, row in ROWS)
    languages = {row["lang"] for _, row in ROWS}
    assert kinds["prose"] >= 15 and kinds["dialogue"] >= 15 and kinds["code"] >= 15, kinds
    assert kinds["mathematics"] + kinds["math"] >= 6 and kinds["table"] >= 5, kinds
    assert {"en", "zh", "de", "fr", "es", "ja", "ru", "ar"} <= languages


def test_held_out_text_is_disjoint():
    """`quantkit demo` evaluates on evals/heldout.jsonl: nothing of it may be calibrated on."""
    path = Path(__file__).resolve().parents[2] / "quantkit" / "evals" / "heldout.jsonl"
    held = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    assert not {words_of(row) for _, row in ROWS} & {words_of(row) for row in held}
    calibrated = {s for _, row in ROWS for s in sentences(words_of(row))}
    # A line of code may be an idiom of its language, so only sentences are compared.
    fresh = [s for row in held if row["kind"] != "code" for s in sentences(words_of(row))]
    assert len(fresh) > 100 and not calibrated & set(fresh)


def test_tokens(smollm):
    audit = load_calibration("default", smollm, samples=1000, seq_len=256, seed=0).audit
    assert audit.tokens >= 25_000 and not audit.dropped and audit.rows_in == len(ROWS)


def readme_rows():
    for line in (FOLDER / "README.md").read_text("utf-8").splitlines():
        cells = [cell.strip(" `*") for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1].isdigit():
            yield cells[0], int(cells[1]), int(cells[2].replace(",", ""))


def test_readme_counts_passages():
    stated = {name: passages for name, passages, _ in readme_rows()}
    found = Counter(name for name, _ in ROWS)
    assert stated == {**found, "all": len(ROWS)}


def test_readme_counts_tokens(smollm):
    found = Counter()
    for name, row in ROWS:
        text = words_of(row) if "text" in row else smollm.apply_chat_template(row["messages"], tokenize=False)
        found[name] += len(smollm(text, add_special_tokens=False)["input_ids"])
    found["all"] = found.total()
    assert {name: tokens for name, _, tokens in readme_rows()} == dict(found)
