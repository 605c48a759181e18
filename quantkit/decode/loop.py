"""The token loop: prompts in, text out piece by piece, and a clock that keeps the first and every later wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from quantkit.decode.native_step import NativeDecoder
from quantkit.decode.sampling import Sampler
from quantkit.decode.stream import TextStream
from quantkit.errors import UserError

OnText = Callable[[int, str], None]  # (row of the batch, piece of text)


class Engine(Protocol):
    """A model with a cache. ``capacity``: longest sequence, None when only memory limits it.

    ``max_batch``: prompts at once, None for any number.
    """

    capacity: int | None
    max_batch: int | None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Forget what was before and read the prompts; float32 logits ``[batch, vocab]`` behind each."""

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each sequence; float32 logits ``[batch, vocab]``."""


class NativeEngine:
    """One sequence on quantkit's native step.

    reuse: keep the cache of the common beginning of this prompt and the sequence before it (a chat grows by one
    turn at a time); then only what is new is read.
    """

    max_batch: int | None = 1

    def __init__(self, decoder: NativeDecoder, reuse: bool = False) -> None:
        self.decoder = decoder
        self.capacity: int | None = decoder.capacity
        self.reuse = reuse
        self._ids: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        (ids,) = prompts
        same = 0
        if self.reuse:
            limit = min(len(self._ids), len(ids) - 1, self.decoder.length)  # one token must be left to run
            while same < limit and self._ids[same] == ids[same]:
                same += 1
        self.decoder.crop(same) if same else self.decoder.reset()
        self._ids = list(ids)
        return self.decoder.prefill(list(ids)[same:]).numpy()[None]

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        (token,) = tokens
        self._ids.append(token)
        return self.decoder.step(token).numpy()[None]


class TransformersEngine:
    """Any transformers causal model. ``make_cache(padding)`` for another cache than its default.

    Prompts of different lengths are padded on the left; padding is masked and takes no positions.
    """

    max_batch: int | None = None

    def __init__(self, model: Any, make_cache: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.model = model
        self.capacity = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.make_cache = make_cache
        self._cache: Any = None
        self._mask = torch.empty(0, 0)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.as_tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        self._mask = mask.to(self._device)
        self._cache = self.make_cache((mask == 0).sum(1)) if self.make_cache else None
        return self._forward(ids, (mask.cumsum(1) - 1).clamp_min(0))

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        position = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        return self._forward(torch.as_tensor(tokens)[:, None], position)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
        device = self._device
        # a mask of ones only keeps fast attention from being used
        mask = None if bool(self._mask.all()) else self._mask
        extra = {"position_ids": positions.to(device)} if mask is not None else {}
        out = self.model(
            input_ids=ids.to(device), attention_mask=mask, past_key_values=self._cache, use_cache=True,
            logits_to_keep=1, **extra,
        )  # fmt: skip
        self._cache = out.past_key_values
        return out.logits[:, -1].float().cpu().numpy()


@dataclass(slots=True)
class Clock:
    """Seconds. ttft: prompt to first token; itl: between each pair of later tokens, of the whole batch."""

    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """Steps a second after the first token; None when there was none."""
        return len(self.itl) / sum(self.itl) if self.itl else None


@dataclass(slots=True)
class Generation:
    """ids: new tokens, the one that ended the text included. text: without it, and without the stop string.

    finish: "stop token", "stop string", "length" (of the request) or "context" (of the model).
    """

    ids: list[int]
    text: str
    finish: str
    prompt_tokens: int


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokenizer: Any,
    max_new_tokens: int = 256,
    sampler: Callable[[int], Sampler] = lambda row: Sampler(),
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    on_text: OnText | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[list[Generation], Clock]:
    """Continue each prompt (token ids) by up to ``max_new_tokens``.

    sampler: row -> its Sampler; a generator per row keeps a row's text independent of its neighbours.
    on_text: receives text as it becomes certain. The clock is read right after a token is known, before its
    text is made. Raises UserError for an empty prompt, or when prompt and engine do not fit each other.
    """
    check(engine, prompts, max_new_tokens)
    samplers = [sampler(row) for row in range(len(prompts))]
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    finish = ["" for _ in prompts]
    longest = max(map(len, prompts))
    clock = Clock()
    last = now()
    logits = engine.prefill(prompts)
    for count in range(1, max_new_tokens + 1):
        tokens = [
            samplers[row](logits[row]) if not finish[row] else made[row][-1] for row in range(len(prompts))
        ]
        moment = now()
        if count == 1:
            clock.ttft = moment - last
        else:
            clock.itl.append(moment - last)
        last = moment
        for row, token in enumerate(tokens):
            if finish[row]:
                continue
            made[row].append(token)
            piece = "" if token in stop_ids else streams[row].feed(token)
            finish[row] = _finished(token in stop_ids, streams[row], count == max_new_tokens)
            if not finish[row] and engine.capacity is not None and longest + count >= engine.capacity:
                finish[row] = "context"
            if finish[row]:
                piece += streams[row].finish()
            if on_text and piece:
                on_text(row, piece)
        if all(finish):
            break
        logits = engine.step(tokens)
    results = [
        Generation(ids, stream.text, why, len(prompt))
        for ids, stream, why, prompt in zip(made, streams, finish, prompts)
    ]
    return results, clock


def _finished(stop_token: bool, stream: TextStream, last: bool) -> str:
    if stop_token:
        return "stop token"
    if stream.stopped is not None:
        return "stop string"
    return "length" if last else ""


def check(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises UserError for what :func:`generate` cannot do."""
    if max_new_tokens < 1:
        raise UserError(f"{max_new_tokens} new tokens is nothing to do; ask for at least 1")
    if not prompts or not all(len(p) for p in prompts):
        raise UserError("a prompt has no tokens; give at least one word")
    if engine.max_batch is not None and len(prompts) > engine.max_batch:
        raise UserError(
            f"the native step decodes {engine.max_batch} sequence at a time, not {len(prompts)}; "
            "give --engine transformers for a batch"
        )
    longest = max(map(len, prompts))
    if engine.capacity is not None and longest >= engine.capacity:
        raise UserError(
            f"the prompt has {longest} tokens and the context {engine.capacity}; shorten the prompt or raise --context"
        )
