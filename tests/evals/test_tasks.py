"""Our wrapper against lm-eval's own command-line path (its HF back end loads the folder itself)."""

import json

import pytest

from quantkit.errors import UserError
from quantkit.evals import tasks
from tests.evals.conftest import tiny

TASK = """
task: toy_choice
dataset_path: json
dataset_kwargs:
  data_files: {test: toy.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}} ="
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 3.0}
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory, tokenizer):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.yaml").write_text(TASK)
    docs = [
        {"question": f"{a} + {b}", "choices": [str(a + b), str(a * b + 7), "none"], "label": (a + b) % 3}
        for a in range(2, 6)
        for b in range(2, 5)
    ]
    (folder / "toy.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
    model = tiny(0, max_position_embeddings=128)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder, model


def test_equal_to_lm_evals_own_back_end(toy, tokenizer, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder, model = toy
    mine = tasks.evaluate(
        model, tokenizer, ["toy_choice"], limit=10, include_path=folder, data_root=folder, batch_size=2
    )
    monkeypatch.chdir(folder)
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "model"), "dtype": "float32"},
        tasks=["toy_choice"],
        limit=10,
        device="cpu",
        batch_size=2,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=1000,
        log_samples=False,
    )
    found = theirs["results"]["toy_choice"]
    rows = {r["metric"]: r for r in mine}
    assert set(rows) == {"toy_choice/acc", "toy_choice/acc_norm"}
    for metric in ("acc", "acc_norm"):
        row = rows[f"toy_choice/{metric}"]
        assert row["value"] == found[f"{metric},none"]
        assert row["stderr"] == pytest.approx(found[f"{metric}_stderr,none"])
        assert (row["samples"], row["samples_of"], row["task_version"]) == (10, 12, 3.0)
        assert row["unit"] == "fraction" and row["higher_is_better"] is True


def test_another_model_gives_another_answer(toy, tokenizer):
    """The wrapped object itself is measured, not a copy that lm-eval loads."""
    folder, model = toy
    options = {"include_path": folder, "data_root": folder, "batch_size": 4}
    before = tasks.evaluate(model, tokenizer, ["toy_choice"], **options)
    other = tiny(5, max_position_embeddings=128)
    after = tasks.evaluate(other, tokenizer, ["toy_choice"], **options)
    assert [r["value"] for r in before] != [r["value"] for r in after]


def test_errors(toy, tokenizer):
    folder, model = toy
    with pytest.raises(UserError, match=r"task folder .* does not exist"):
        tasks.evaluate(model, tokenizer, ["toy_choice"], include_path=folder / "no")
    with pytest.raises(UserError, match=r"data folder .* does not exist"):
        tasks.evaluate(model, tokenizer, ["toy_choice"], include_path=folder, data_root=folder / "no")


@pytest.mark.slow  # indexes all of lm-eval's tasks
def test_unknown_task(toy, tokenizer):
    folder, model = toy
    with pytest.raises(UserError, match="unknown task 'toy_choise': did you mean 'toy_choice'"):
        tasks.evaluate(model, tokenizer, ["toy_choise"], include_path=folder)
    with pytest.raises(UserError, match="unknown task 'qqqqqqqqqq': `lm-eval ls tasks` lists"):
        tasks.evaluate(model, tokenizer, ["qqqqqqqqqq"])


def test_without_the_library(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'quantkit\[eval\]'"):
        tasks.evaluate(None, None, ["x"])
