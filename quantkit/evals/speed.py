"""Speed: time to the first token (TTFT) and every inter-token latency (ITL), through a two-call interface.

A *stepper* has ``prefill(ids) -> token`` and ``step(token) -> token``; both return when the next token is
known, so that a wall clock around them times everything: model, cache, sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quantkit.evals._rows import Row, row


class Stepper(Protocol):
    """A decoding session that can be started over by another prefill."""

    def prefill(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, prompt] -> the next token [batch, 1]; forgets what was before."""

    def step(self, token: Tensor) -> Tensor:
        """token [batch, 1] -> the token after it [batch, 1]."""


class ModelStepper:
    """Greedy decoding with a transformers model; ``make_cache`` for another cache than its default."""

    def __init__(self, model: Any, make_cache: Callable[[], Any] | None = None) -> None:
        self.model = model
        self.make_cache = make_cache
        self.cache: Any = None

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        self.cache = self.make_cache() if self.make_cache else None
        return self._next(ids)

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        return self._next(token)

    def _next(self, ids: Tensor) -> Tensor:
        # The logits of earlier prompt positions are not needed: on a large vocabulary they would cost
        # more than the rest of the prefill.
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits[:, -1].argmax(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. ttft: one per repetition. itl: every step of every repetition, in order."""

    ttft: list[float]
    itl: list[float]
    prompt: int
    batch: int

    def rows(self, **more: Any) -> list[Row]:
        """Median and percentiles of TTFT and ITL in ms, tokens per second; every latency is kept as data.

        The decode rate is batch over the *mean* ITL: that is what a user waits for in total.
        """
        about = {"prompt_tokens": self.prompt, "batch": self.batch, **more}
        rows = []
        for name, seconds in (("ttft", self.ttft), ("itl", self.itl)):
            ms = 1000 * np.asarray(seconds)
            samples = [round(float(x), 4) for x in ms]
            rows.append(row(f"{name}_median", float(np.median(ms)), "ms", samples_ms=samples, **about))
            for p in (50, 90, 99):
                rows.append(row(f"{name}_p{p}", float(np.percentile(ms, p)), "ms", **about))
        rate = self.batch / (sum(self.itl) / len(self.itl))
        rows.append(row("decode_rate", rate, "tokens/s", **about))
        rows.append(
            row("prefill_rate", self.batch * self.prompt / float(np.median(self.ttft)), "tokens/s", **about)
        )
        return rows


def measure(
    stepper: Stepper,
    ids: Tensor,
    new_tokens: int = 64,
    repeats: int = 3,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] | None = None,
) -> Timing:
    """Times ``repeats`` generations of ``new_tokens`` tokens after the prompt ``ids [batch, prompt]``.

    warmup: whole generations before, not counted (compilation, page faults, caches). synchronize: called
    before each reading of the clock; None waits for the accelerator when ids are on one.
    """
    if new_tokens < 2:
        raise ValueError("an inter-token latency needs at least 2 new tokens")
    if synchronize is None:
        synchronize = torch.cuda.synchronize if ids.is_cuda else _nothing
    ttft: list[float] = []
    itl: list[float] = []
    for turn in range(warmup + repeats):
        synchronize()
        last = clock()
        token = stepper.prefill(ids)
        synchronize()
        now = clock()
        first, steps = now - last, []
        for _ in range(new_tokens - 1):
            last = now
            token = stepper.step(token)
            synchronize()
            now = clock()
            steps.append(now - last)
        if turn >= warmup:
            ttft.append(first)
            itl += steps
    return Timing(ttft, itl, ids.shape[1], ids.shape[0])


def _nothing() -> None:
    """A CPU has nothing to wait for."""


def random_prompt(vocab: int, tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    """int64 [batch, tokens] from a private generator: dense models take equally long for any content."""
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def sweep(
    stepper: Stepper, vocab: int, prompts: Sequence[int], new_tokens: int = 32, repeats: int = 3
) -> list[Row]:
    """Rows for several prompt lengths."""
    rows: list[Row] = []
    for tokens in prompts:
        rows += measure(stepper, random_prompt(vocab, tokens), new_tokens, repeats).rows()
    return rows
