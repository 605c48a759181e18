"""Measures. Each file gives rows: ``{"metric", "value", "stderr", "unit", …}``, JSON-ready.

perplexity, divergence: over named windows of text, from final hidden states and a head (:class:`Side`).
tasks: lm-eval's own tasks. memory: bytes by tensor class. speed: TTFT and every inter-token latency.
A standard error is clustered by window: tokens of one window are not independent of each other.
"""

from __future__ import annotations

from quantkit.evals._rows import provenance, row
from quantkit.evals._sides import Recorded, Side, rounded, side_of
from quantkit.evals._stats import Estimate, clustered, paired_difference

__all__ = [
    "Estimate",
    "Recorded",
    "Side",
    "clustered",
    "paired_difference",
    "provenance",
    "rounded",
    "row",
    "side_of",
]
