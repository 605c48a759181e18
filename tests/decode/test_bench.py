"""Models in processes of their own, in turns: what is counted, and what goes wrong in one sentence."""

import json

import pytest
from click.testing import CliRunner

from quantkit.bench import Subject, Worker, bench
from quantkit.cli import cli
from quantkit.errors import UserError
from quantkit.evals.memory import cache_bytes, from_folder


def test_subjects():
    assert Subject.parse("a/b,kv=int8,engine=native") == Subject(
        "b engine=native kv=int8", "a/b", "native", "int8"
    )
    assert Subject.parse("a/b,label=x").label == "x"
    with pytest.raises(UserError, match="'kw=int8' in 'a,kw=int8' is no setting"):
        Subject.parse("a,kw=int8")


def test_rows_of_two_models(twin_folder, tmp_path):
    folder = twin_folder("llama")
    out = tmp_path / "rows.jsonl"
    args = [
        "bench",
        f"{folder},engine=transformers,label=plain",
        f"{folder},engine=transformers,kv=int8,label=kv8",
    ]
    done = CliRunner().invoke(
        cli, [*args, "--contexts", "8,64", "--new-tokens", "4", "--rounds", "2", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(r["model"], r["metric"], r.get("context")): r for r in rows}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    weights = from_folder(folder)
    read = weights.total - weights.by_class["embedding"]  # the twin's embedding is not tied
    for context in (8, 64):
        plain = found["plain", "bytes_per_token", context]["value"]
        assert plain == read + cache_bytes(config, context)
        assert read < found["kv8", "bytes_per_token", context]["value"] < plain
        share = found["plain", "bandwidth_share", context]
        itl = found["plain", "itl_median", context]
        assert len(itl["samples_ms"]) == 2 * 3
        assert share["value"] == pytest.approx(1000 / itl["value"] / share["limit"], rel=1e-6)
        assert share["limit"] == pytest.approx(share["bandwidth"] / plain)
    assert found["plain", "peak_rss", None]["value"] > 50e6
    assert rows[0]["hardware"] and "read bandwidth measured first" in done.output


def test_a_worker_says_what_is_wrong():
    with pytest.raises(UserError, match="gone: .*neither a folder"):
        Worker(Subject.parse("nowhere,label=gone"), 8)
    with pytest.raises(UserError, match="same label"):
        bench([Subject.parse("a"), Subject.parse("a")], 1e9)
