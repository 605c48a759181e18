"""A model as the measures see it: final hidden states, and a head that turns them into logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGIT_BYTES = 64 << 20  # one float32 block of logits; a few of them are alive at a time
VOCAB_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    hidden_states: token ids int64 ``[n, T]`` -> final hidden states, after the last norm, ``[n, T, D]``.
    head: ``[positions, D]`` -> logits ``[positions, V]``, any float dtype.
    dtype: in which the hidden states were computed, for the report.
    """

    hidden_states: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    dtype: str = "float32"

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[positions, V]`` of ``hidden [positions, D]``."""
        return self.head(hidden).float()


def chunk_rows(vocab: int) -> int:
    """Positions whose float32 logits fill LOGIT_BYTES."""
    return max(1, LOGIT_BYTES // (4 * vocab))


def side_of(model: Any) -> Side:
    """A transformers causal language model as a Side.

    The head runs in float32 even where its weights have 16 bits, so that rounding of logits does not drown
    small divergences; hidden states have the model's own precision. Scaling or capping of logits (Gemma 2,
    Granite, Cohere) is applied as the config says. Raises ValueError if the parts do not reproduce the
    model's own logits.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    body = model.base_model
    device = next(model.parameters()).device

    def hidden_states(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return body(input_ids=ids.to(device), use_cache=False).last_hidden_state

    def logits(hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return _adjust(_linear(head, hidden.to(device)), config)

    side = Side(hidden_states, logits, str(next(model.parameters()).dtype).removeprefix("torch."))
    probe = torch.arange(4)[None] % config.vocab_size
    with torch.no_grad():
        want = model(input_ids=probe.to(device), use_cache=False).logits[0].float()
    got = side.logits(hidden_states(probe)[0])
    error = float((got - want).abs().max())
    if not error <= 0.02 * float(want.abs().max()) + 1e-4:  # 16-bit logits are rounded to 1 part in 256
        raise ValueError(
            f"{type(model).__name__}: hidden states and head do not give its logits (they differ by "
            f"{error:.3g}); pass a Side with its own hidden_states and head"
        )
    return side


def _linear(head: nn.Module, hidden: Tensor) -> Tensor:
    """``head(hidden)`` in float32; the weights of a 16-bit nn.Linear are widened a few rows at a time."""
    if type(head) is not nn.Linear or head.weight.dtype == torch.float32:
        dtype = next((p.dtype for p in head.parameters()), hidden.dtype)
        return head(hidden.to(dtype)).float()
    hidden, bias = hidden.float(), head.bias
    out = hidden.new_empty(*hidden.shape[:-1], head.weight.shape[0])
    for start in range(0, len(head.weight), VOCAB_ROWS):
        rows = slice(start, start + VOCAB_ROWS)
        out[..., rows] = F.linear(
            hidden, head.weight[rows].float(), None if bias is None else bias[rows].float()
        )
    return out


def _adjust(logits: Tensor, config: Any) -> Tensor:
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return torch.tanh(logits / cap) * cap if cap else logits


def rounded(side: Side, dtype: torch.dtype = torch.bfloat16) -> Side:
    """The same model with its final hidden states rounded to ``dtype``: the least a 16-bit run changes."""
    return Side(
        lambda ids: side.hidden_states(ids).to(dtype).float(), side.head, str(dtype).removeprefix("torch.")
    )


class Recorded:
    """Final hidden states of one model, kept in a memory-mapped float32 file ``[n, T, D]``.

    Lets a reference be measured first and freed before the other model is loaded; only its head is needed
    again. Use as a context manager to have the file removed.
    """

    def __init__(self, side: Side, ids: Tensor, path: Path, batch: int | None = 1) -> None:
        """Runs ``side`` over ids ``[n, T]``, ``batch`` windows a call (None: all in one call)."""
        self.path = path
        self.dtype = side.dtype
        self._index = {_key(window): i for i, window in enumerate(ids)}
        self._states: Tensor | None = None
        at = 0
        for part in ids.split(batch or len(ids)):
            states = side.hidden_states(part)
            if self._states is None:
                shape = (len(ids), *states.shape[1:])
                size = shape[0] * shape[1] * shape[2]
                flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
                self._states = flat.view(shape)
            self._states[at : at + len(part)] = states
            at += len(part)

    def side(self, head: Callable[[Tensor], Tensor]) -> Side:
        """The recorded model as a Side; ``hidden_states`` accepts the recorded windows in any order."""
        return Side(self._look_up, head, self.dtype)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self._states is None:
            raise ValueError("the recorded hidden states were closed")
        try:
            where = [self._index[_key(window)] for window in ids]
        except KeyError:
            raise ValueError("a window was asked for whose hidden states were not recorded") from None
        return self._states[where]

    def close(self) -> None:
        self._states = None
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _key(window: Tensor) -> bytes:
    return window.cpu().numpy().astype("<i8").tobytes()
