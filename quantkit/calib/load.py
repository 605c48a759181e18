"""load_calibration: the one entry point, from a source's name to windows and their audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calib.audit import Audit, hash_ids, histogram
from quantkit.calib.passages import mixed_order, prepare, specials_of, tokenize
from quantkit.calib.selfsample import Sampler
from quantkit.calib.sources import TENSOR_SUFFIXES, read_rows
from quantkit.calib.tensors import read_ids, windows_of
from quantkit.calib.windows import pack
from quantkit.errors import UserError

CHAT_MODES = ("auto", "template", "plain")


@dataclass(frozen=True, slots=True)
class CalibOptions:
    """chat: how chat rows are written. "template" (the tokenizer's own; an error without one), "plain"
        ('role: content' lines), or "auto": the template, and for the bundled text plain lines where the
        tokenizer has none (a base model).
    vocab_size: upper bound for token ids of tensor files and of the sampler; 0 means len(tokenizer).
    """

    chat: str = "auto"
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """ids: int64 [windows, seq_len]. Every window is full: no padding, no attention mask needed."""

    ids: Tensor
    audit: Audit

    def batches(self, size: int) -> Iterator[Tensor]:
        """int64 [<= size, seq_len] each."""
        yield from self.ids.split(size)

    def __len__(self) -> int:
        return self.ids.shape[0]


def load_calibration(
    source: str,
    tokenizer: Any,
    samples: int,
    seq_len: int,
    seed: int,
    model: Sampler | None = None,
    options: CalibOptions | None = None,
) -> Calibration:
    """Windows of token ids for calibration. Deterministic in (source's content, tokenizer, numbers).

    source: "default" (bundled), "self" (``model`` is then a sampler, see :func:`sampler_for`), a .txt, .jsonl
        or .parquet file, a folder of such, token ids (.safetensors, .npy),
        or "hub:NAME[@CONFIG][:split[:column]]".
    Raises UserError with a remedy; nothing is repeated or padded to reach ``samples``.
    """
    options = options or CalibOptions()
    if samples < 1 or seq_len < 2:
        raise UserError(
            f"calibration needs at least 1 sample of 2 tokens, not --samples {samples} --seq-len {seq_len}"
        )
    if options.chat not in CHAT_MODES:
        raise UserError(f"chat mode {options.chat!r} is not one of {', '.join(CHAT_MODES)}")
    vocab_size = options.vocab_size or len(tokenizer)
    if source == "self":
        return _from_model(model, samples, seq_len, seed, vocab_size)
    path = Path(source).expanduser()
    if path.suffix.lower() in TENSOR_SUFFIXES and path.is_file():
        return _from_tensor(path, samples, seq_len, seed, vocab_size)
    return _from_rows(source, tokenizer, samples, seq_len, seed, options)


def _from_rows(
    source: str, tokenizer: Any, samples: int, seq_len: int, seed: int, options: CalibOptions
) -> Calibration:
    # A hub row is rarely shorter than a quarter of a window; fewer windows are reported, never hidden.
    read = read_rows(source, limit=max(1000, 4 * samples))
    chat = options.chat
    if chat == "auto" and source != "default":
        chat = "template"
    ready = prepare(read.rows, tokenizer, chat, source, seq_len)
    if not ready.passages:
        why = "; ".join(f"{n} rows {reason}" for reason, n in ready.dropped.items()) or "no rows"
        raise UserError(f"calibration source {source!r} holds no text ({why}); give a source that has some")
    specials = specials_of(tokenizer)
    order = mixed_order(ready.passages, read.rows, seed)
    packed = pack(tokenize(order, tokenizer), specials, samples, seq_len)
    if not len(packed.ids):
        raise UserError(
            f"calibration source {source!r}: found {packed.found} tokens, one window needs {seq_len}: "
            "give more text or a smaller --seq-len"
        )
    inside = packed.row_of.flatten()
    tokens_by_row = Counter(inside[inside >= 0].tolist())
    kinds: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    for row, tokens in tokens_by_row.items():
        kinds[read.rows[row].kind] += tokens
        languages[read.rows[row].lang] += tokens
    audit = Audit(
        source=source,
        files=read.files,
        rows_in=len(read.rows),
        rows_used=len(tokens_by_row),
        rows_left_over=len(read.rows) - len(tokens_by_row) - sum(ready.dropped.values()),
        dropped=dict(sorted(ready.dropped.items())),
        duplicates=ready.duplicates,
        cut_rows=ready.cut_rows,
        windows_asked=samples,
        windows=len(packed.ids),
        seq_len=seq_len,
        tokens=packed.ids.numel(),
        tokens_left_over=packed.left_over,
        lengths=histogram([tokens for _, tokens in packed.lengths]),
        bos=specials.about_bos,
        separator=specials.about_separator,
        template=ready.template,
        chat_rows=ready.chat_rows,
        kinds=dict(sorted(kinds.items())),
        languages=dict(sorted(languages.items())),
        seed=seed,
        sha256=hash_ids(packed.ids),
        skipped_files=read.skipped_files,
        notes=[read.note] if read.note else [],
    )
    return Calibration(packed.ids, audit)


def _from_tensor(path: Path, samples: int, seq_len: int, seed: int, vocab_size: int) -> Calibration:
    ids = read_ids(path, vocab_size)
    windows, available = windows_of(ids, samples, seq_len, seed, str(path))
    note = f"token ids of shape {list(ids.shape)}"
    return Calibration(
        windows, _given(str(path), [path.name], windows, available, samples, seed, ids.numel(), note)
    )


def _from_model(model: Sampler | None, samples: int, seq_len: int, seed: int, vocab_size: int) -> Calibration:
    if model is None:
        raise UserError(
            "calibration source 'self' needs the model to sample from; here only text can be used"
        )
    ids = model(samples, seq_len, seed)
    if ids.shape != (samples, seq_len) or ids.dtype != torch.long:
        raise ValueError(
            f"the sampler gave {ids.dtype} {list(ids.shape)} instead of int64 {[samples, seq_len]}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"the sampler gave token ids outside 0 … {vocab_size - 1}")
    return Calibration(
        ids, _given("self", [], ids, samples, samples, seed, ids.numel(), "sampled from the model")
    )


def _given(
    source: str, files: list[str], ids: Tensor, available: int, samples: int, seed: int, found: int, note: str
) -> Audit:
    """The audit of windows that did not come from text: rows are windows, nothing was tokenized here."""
    return Audit(
        source=source,
        files=files,
        rows_in=available,
        rows_used=len(ids),
        rows_left_over=available - len(ids),
        dropped={},
        duplicates=0,
        cut_rows=0,
        windows_asked=samples,
        windows=len(ids),
        seq_len=ids.shape[1],
        tokens=ids.numel(),
        tokens_left_over=found - ids.numel(),
        lengths={},
        bos="as given",
        separator="as given",
        template="none applied",
        chat_rows=0,
        kinds={},
        languages={},
        seed=seed,
        sha256=hash_ids(ids),
        notes=[note],
    )
