"""`quantkit compare`: folders measured on the same windows, rows of files beside them, three files written."""

import csv
import json
import shutil
import sys

import pytest

from quantkit import comparison
from quantkit.cli import main
from quantkit.errors import UserError
from quantkit.measure import measure_folder

FAST = ["--windows", "3", "--seq-len", "64"]


def run(*args: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


@pytest.fixture(scope="module")
def folders(twin_folder, calib_file, tmp_path_factory):
    """The original and two quantized copies, 4 and 8 bits."""
    original, root = twin_folder("llama"), tmp_path_factory.mktemp("compare")
    for bits in ("4", "8"):
        with pytest.raises(SystemExit) as stop:
            main(["quantize", str(original), "--bits", bits, "--group-size", "32", "--calib", str(calib_file),
                  "--samples", "6", "--seq-len", "48", "-o", str(root / f"w{bits}")])  # fmt: skip
        assert not stop.value.code
    return original, root / "w4", root / "w8"


def rows_file(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_whole_command(folders, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the eval extra is not installed")
    original, w4, w8 = folders
    page = tmp_path / "new" / "report.html"
    code, text, err = run("compare", w4, w8, "--against", original, *FAST, "-o", page, capsys=capsys)
    assert code == 0 and "Warning" not in err, err
    names = [line.strip("│ ").split()[0] for line in text.splitlines() if line.startswith("│")]
    assert names == [original.name, "w4", "w8"]
    html = page.read_text()
    assert html.count("<svg") >= 4
    assert "relative output error" in html and comparison.PROMPT in html and "recipe balanced" in html
    assert "<script" not in html and str(tmp_path) not in html and str(w4.parent) not in html
    assert page.with_suffix(".md").read_text().count("\n| w") == 2
    table = list(csv.DictReader(page.with_suffix(".csv").open()))
    kl = {r["variant"]: float(r["value"]) for r in table if r["metric"] == "kl"}
    assert set(kl) == {"w4", "w8"} and kl["w4"] > 10 * kl["w8"] > 0
    size = {r["variant"]: float(r["value"]) for r in table if r["metric"] == "file_bytes"}
    assert size["w4"] == sum(f.stat().st_size for f in w4.glob("*.safetensors")) < size["w8"]


def test_values_are_those_of_eval_and_of_the_manifest(folders):
    original, w4, _ = folders
    report = comparison.compare([str(w4)], str(original), windows=2, seq_len=64, samples=False)
    chosen = comparison._windows(
        comparison._folders([str(w4)], str(original)), "heldout", 2, 64, False
    )  # fmt: skip
    expected = measure_folder(w4, chosen, original)
    mine = report.variants[1]
    assert [r for r in mine.rows if not r["metric"].startswith(("weights_", "file_", "cache_"))] == expected
    modules = json.loads((w4 / "quantkit.json").read_text())["modules"]
    assert mine.layer_errors == {m["module"]: m["error"] for m in modules} and len(modules) == 21
    assert report.variants[0].layer_errors == {} and not mine.samples


def test_sample_is_the_greedy_text_of_transformers(folders):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    original = folders[0]
    tokenizer = AutoTokenizer.from_pretrained(original)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    ids = tokenizer("The quick brown", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert comparison.greedy(original, "The quick brown", 12) == tokenizer.decode(
        out, skip_special_tokens=True
    )


def test_rows_of_eval_join_without_measuring(folders, tmp_path, capsys):
    original, w4, w8 = folders
    file = tmp_path / "rows.jsonl"
    for folder in (w4, w8):
        code, _, err = run(
            "eval", folder, "--against", original, *FAST, "--memory", "--json", file, capsys=capsys
        )  # fmt: skip
        assert code == 0, err
    report = comparison.compare([], against="w8", rows=[file])
    assert [v.name for v in report.variants] == ["w8", "w4"] and report.title == "w8"
    assert report.variants[0].provenance["versions"]["torch"] and "commit" in report.variants[0].provenance
    assert not any("command" in r or "model" in r for r in report.variants[0].rows)
    # Measured here and in the file: the same rows are not there twice, and further ones are added.
    speed = {"model": "w4", "metric": "decode_rate", "value": 12.5, "stderr": 0.5, "unit": "tok/s"}
    more = rows_file(tmp_path / "speed.jsonl", speed)
    both = comparison.compare(
        [str(w4)], str(original), windows=3, seq_len=64, samples=False, rows=[file, more]
    )  # fmt: skip
    assert [v.name for v in both.variants] == [original.name, "w4", "w8"]
    assert both.variants[1].value("decode_rate") == 12.5
    metrics = [r["metric"] for r in both.variants[1].rows]
    assert metrics.count("perplexity") == 1 and metrics.count("file_bytes") == 1


def test_of_repeated_rows_the_last_one_counts(tmp_path):
    row = {"model": "a", "metric": "perplexity", "value": 9.0, "corpus": "heldout", "date": "1"}
    file = rows_file(
        tmp_path / "r.jsonl", row, {**row, "value": 8.0, "date": "2"}, {**row, "corpus": "other"}
    )
    (variant,) = comparison.from_rows([file])
    assert [(r["corpus"], r["value"]) for r in variant.rows] == [("heldout", 8.0), ("other", 9.0)]


def test_different_windows_are_told(tmp_path):
    row = {"metric": "perplexity", "value": 9.0, "corpus": "heldout", "seq_len": 64}
    file = rows_file(
        tmp_path / "r.jsonl", {**row, "model": "a", "data_sha256": "1"}, {**row, "model": "b", "data_sha256": "2"}
    )  # fmt: skip
    told = []
    comparison.compare([], rows=[file], tell=told.append)
    assert told == ["a and b were measured on different windows of heldout: differences are less sure"]


def test_names_tell_folders_apart(folders, tmp_path):
    for run_name in ("one", "two"):
        shutil.copytree(folders[1], tmp_path / run_name / "out")
    given = [str(tmp_path / name / "out") for name in ("one", "two")]
    assert [f.name for f in comparison._folders(given, str(folders[2]))] == ["w8", "one/out", "two/out"]
    # The original among the models is one variant.
    assert len(comparison._folders([given[0], str(folders[2])], str(folders[2]))) == 2
    with pytest.raises(UserError, match="is given twice"):
        comparison._folders([given[0], given[0]], None)


def test_without_matplotlib_there_are_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = rows_file(tmp_path / "r.jsonl", {"model": "a", "metric": "perplexity", "value": 9.0})
    out = tmp_path / "report.html"
    code, text, err = run("compare", "--rows", file, "-o", out, capsys=capsys)
    assert code == 0 and "report.html was not written: plots need matplotlib" in err
    assert not out.exists() and "9.0" in text and "9.0" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "there is nothing to compare"),
        (["nowhere"], "neither a folder"),
        (["MODEL", "-o", "OUT.pdf"], "a name that ends in .html"),
        (["MODEL", "MODEL"], "is given twice"),
        (["MODEL", "--seq-len", "512"], "longer than the context of"),
        (["MODEL", "OTHER", *FAST], "they are no variants of one model"),
        (["--rows", "BAD"], "line 1 is no JSON"),
        (["--rows", "TEXT"], "the value of metric 'kl' is 'low', which is no number"),
        (["--rows", "EMPTY"], "holds no rows"),
    ],
)
def test_mistakes_are_one_sentence(args, words, twin_folder, tmp_path, capsys):
    names = {
        "MODEL": twin_folder("llama"),
        "OTHER": twin_folder("llama", vocab_size=448) if "OTHER" in args else None,
        "BAD": tmp_path / "bad.jsonl",
        "TEXT": rows_file(tmp_path / "text.jsonl", {"metric": "kl", "value": "low"}),
        "EMPTY": rows_file(tmp_path / "empty.jsonl"),
    }
    (tmp_path / "bad.jsonl").write_text("no json\n")
    capsys.readouterr()
    args = [*(names.get(a, a) for a in args)]
    if "-o" not in args:
        args += ["-o", tmp_path / "report.html"]
    code, _, err = run("compare", *args, capsys=capsys)
    assert code == 2 and words in " ".join(err.split()) and "Traceback" not in err
    assert not (tmp_path / "report.html").exists()
