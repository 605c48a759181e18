"""Packed tensors that the peers' own code wrote: ../shared/golden beside the repository, or $QUANTKIT_SHARED/golden.

They are no part of the repository. A test that needs one skips with a reason where they are absent; hand-computed
vectors in the same test files keep the layouts tested everywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors import safe_open
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent


def folder() -> Path:
    shared = os.environ.get("QUANTKIT_SHARED")
    return (Path(shared) if shared else REPOSITORY.parent / "shared") / "golden"


def load(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of ``<name>.safetensors``; skips the test when the golden files are not there."""
    if not folder().is_dir():
        pytest.skip(f"golden files of the peers are not at {folder()} (set QUANTKIT_SHARED)")
    with safe_open(folder() / f"{name}.safetensors", "pt") as file:
        keys = list(file.keys())
        return {key: file.get_tensor(key) for key in keys}, file.metadata()


def names(prefix: str) -> list[str]:
    """Golden files of a format, for parametrize; one placeholder that skips when there are none."""
    return sorted(p.stem for p in folder().glob(f"{prefix}*.safetensors")) or [f"{prefix}*"]
