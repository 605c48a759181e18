"""Shared fixtures. Tiny models run faster on one thread, and tests must not depend on the number of cores."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest
import torch
import twins

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def twin_folder(tmp_path_factory):
    """twin_folder("llama", dtype=torch.bfloat16) -> a saved tiny model, made once a session."""
    made = {}

    def get(name: str, dtype: torch.dtype = torch.bfloat16, **changes) -> Path:
        key = (name, dtype, tuple(sorted(changes.items())))
        if key not in made:
            made[key] = twins.save(name, tmp_path_factory.mktemp(name), dtype=dtype, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def calib_file(tmp_path_factory):
    """Some paragraphs, enough for a few dozen short windows of the tiny tokenizer."""
    path = tmp_path_factory.mktemp("calib") / "text.jsonl"
    rows = [{"text": f"Paragraph {i}: {twins.TEXT} The number {i} times {i} is {i * i}."} for i in range(12)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path
