"""eval --memory, --kv and --tasks on a tiny model."""

import json

import pytest
from click.testing import CliRunner

from quantkit.cli import cli, main
from quantkit.evals.memory import from_folder
from quantkit.kvscheme import KVScheme


def test_memory_and_cache_rows(twin_folder, tmp_path):
    folder, out = twin_folder("llama"), tmp_path / "rows.jsonl"
    args = [
        "eval",
        str(folder),
        "--windows",
        "2",
        "--seq-len",
        "200",
        "--memory",
        "--kv",
        "int4",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0, done.output
    rows = {r["metric"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert rows["weights_total"]["value"] == from_folder(folder).total
    assert (
        rows["cache_bytes_per_token"]["value"] == 3 * 2 * 2 * 16 * 2
    )  # layers, K and V, heads, width, bytes
    assert rows["kv_kl"]["value"] > 0 and 0 < rows["kv_top1_agreement"]["value"] <= 1
    scheme = KVScheme.parse("int4")  # scored from where the first page is packed
    assert rows["kv_kl"]["tokens"] == 2 * (199 - scheme.page - scheme.window)
    assert rows["kv_bytes_per_token"]["value"] < rows["cache_bytes_per_token"]["value"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["--kv", "imt4", "--seq-len", "200"], "did you mean"),
        (["--kv", "int4", "--seq-len", "48"], "never fill a page of 64"),
    ],
)
def test_mistakes(args, words, twin_folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(twin_folder("llama")), "--windows", "1", *args])
    assert stop.value.code == 2 and words in " ".join(capsys.readouterr().err.split())


def test_tasks(twin_folder, tmp_path):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps({"q": f"{i} is", "a": i % 2}) + "\n" for i in range(6))
    )
    (tmp_path / "toy.yaml").write_text(
        "task: toy\ndataset_path: json\ndataset_kwargs: {data_files: {test: docs.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\ndoc_to_choice: [even, odd]\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\nmetadata: {version: 1.0}\n"
    )
    out = tmp_path / "rows.jsonl"
    args = [
        "eval",
        str(twin_folder("llama")),
        "--windows",
        "1",
        "--seq-len",
        "32",
        "--tasks",
        "toy",
        "--limit",
        "4",
    ]
    args += ["--include-path", str(tmp_path), "--data-root", str(tmp_path), "--json", str(out)]
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0, done.output
    rows = {r["metric"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert rows["toy/acc"]["samples"] == 4 and rows["toy/acc"]["value"] in (0, 0.25, 0.5, 0.75, 1)
