"""Means with standard errors that respect that tokens of one window depend on each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """mean over all tokens; stderr clustered by window (None with a single window); counts."""

    mean: float
    stderr: float | None
    tokens: int
    windows: int


def clustered(values: Tensor) -> Estimate:
    """values ``[windows, tokens]``, one number per token -> mean and its cluster-robust standard error.

    With W windows of equal length the formula (Liang and Zeger 1986, with the W/(W-1) correction) is the
    sample standard deviation of the window means over sqrt(W). Example: window means 1.0, 2.0, 3.0 have
    standard deviation 1.0, so the mean 2.0 has the standard error 1/sqrt(3) = 0.577.
    """
    means = values.double().mean(1)
    windows = len(means)
    if windows == 0 or values.shape[1] == 0:
        raise ValueError(f"no tokens to average: values have shape {list(values.shape)}")
    error = float(means.std(unbiased=True)) / math.sqrt(windows) if windows > 1 else None
    return Estimate(float(means.mean()), error, values.numel(), windows)


def paired_difference(a: list[float], b: list[float]) -> Estimate:
    """Mean and standard error of ``b - a`` for window means of the same windows.

    Most of the variation between windows is shared by two variants of a model and cancels here, so this sees
    differences that the two separate standard errors would hide.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} windows against {len(b)}: a paired difference needs the same windows")
    difference = torch.tensor(b, dtype=torch.float64) - torch.tensor(a, dtype=torch.float64)
    return clustered(difference[:, None])
