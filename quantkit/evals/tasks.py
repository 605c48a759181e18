"""Tasks of lm-eval, the real library, on a model that is already in memory.

``evaluate(model, tokenizer, ["arc_easy"], limit=100)`` gives what ``lm_eval --model hf`` gives, for any
model that quantkit can load. Task files of one's own (YAML) are found through ``include_path``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import UserError
from quantkit.evals._rows import Row, row
from quantkit.plugins import suggest


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    limit: int | float | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    data_root: str | Path | None = None,
    batch_size: int = 4,
    seed: int = 1234,
    apply_chat_template: bool = False,
) -> list[Row]:
    """One row per task and metric, with lm-eval's own standard error.

    model: a transformers causal model, quantized or not. limit: documents per task (below 1: a share).
    include_path: folder of task YAML files. data_root: folder that relative data paths in those files start
    from (lm-eval takes them from the working directory, which is changed while it runs).
    Raises UserError when lm-eval is not installed or a task is not known.
    """
    lm_eval = _library()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    include = str(Path(include_path).resolve()) if include_path else None
    if include and not Path(include).is_dir():
        raise UserError(f"task folder {include_path} does not exist")
    manager = None
    if include:
        # Indexing the thousands of tasks that lm-eval ships takes a quarter of a minute; skip it if we can.
        manager = TaskManager(include_path=include, include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)
        _check_known(tasks, manager.all_tasks)
    device = str(next(model.parameters()).device)
    with _inside(data_root):
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=device),
            tasks=list(tasks),
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            apply_chat_template=apply_chat_template,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return rows_of(found)


def rows_of(found: Any) -> list[Row]:
    """Rows from lm-eval's result: keys like "acc_norm,none" with "acc_norm_stderr,none" beside them."""
    rows = []
    for task, values in sorted(found["results"].items()):
        shots = found["n-shot"].get(task)
        counts = found["n-samples"].get(task, {})
        version = found["versions"].get(task)
        for key, value in values.items():
            metric, _, filtering = key.partition(",")
            if not filtering or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{filtering}")
            rows.append(
                row(
                    f"{task}/{metric}",
                    value,
                    "fraction" if re.match(r"acc|exact_match|pass", metric) else "",
                    error if isinstance(error, (int, float)) else None,
                    task=task,
                    filter=filtering,
                    num_fewshot=shots,
                    samples=counts.get("effective"),
                    samples_of=counts.get("original"),
                    task_version=version,
                    higher_is_better=found["higher_is_better"].get(task, {}).get(metric),
                )
            )
    return rows


def _library() -> Any:
    try:
        import lm_eval
    except ImportError as error:
        raise UserError(
            "lm-eval is not installed, and tasks need it: pip install 'quantkit[eval]' (perplexity and "
            "divergence work without it)"
        ) from error
    return lm_eval


def _check_known(tasks: Sequence[str], known: Sequence[str]) -> None:
    for task in tasks:
        if task not in known:
            near = suggest(task, list(known))
            # Several thousand names are no help; lm-eval's own command lists them.
            near = near if near.startswith("did you mean") else "`lm-eval ls tasks` lists all of them"
            raise UserError(f"unknown task {task!r}: {near}")


@contextmanager
def _inside(folder: str | Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    if not Path(folder).is_dir():
        raise UserError(f"data folder {folder} does not exist")
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
