"""Evaluation windows with a name that says everything: text, length, BOS, which windows of how many."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calib.audit import hash_ids
from quantkit.calib.passages import specials_of
from quantkit.errors import UserError

# Canonical bytes of WikiText-2 raw (Merity et al. 2016, arXiv 1609.07843): numbers measured on other bytes
# do not compare.
WIKITEXT = {
    "wikitext2-test": ("wiki.test.raw", "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
    "wikitext2-valid": ("wiki.valid.raw", "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
}
NAMES = ("heldout", *WIKITEXT)
BOS_MODES = ("auto", "yes", "no")


@dataclass(frozen=True, slots=True)
class Windows:
    """ids: int64 [windows, seq_len]. name: for reports. sha256: of ids. available: windows in the text."""

    ids: Tensor
    name: str
    corpus: str
    sha256: str
    available: int

    @property
    def about(self) -> dict[str, Any]:
        """Fields that every row measured on these windows carries."""
        return {
            "corpus": self.corpus,
            "windows_name": self.name,
            "seq_len": self.ids.shape[1],
            "windows": len(self.ids),
            "data_sha256": self.sha256,
        }


def windows(
    corpus: str,
    tokenizer: Any,
    seq_len: int = 2048,
    count: int | None = None,
    spread: bool = False,
    bos: str = "auto",
) -> Windows:
    """Windows of ``seq_len`` tokens of a corpus, cut end to end, the rest left out.

    corpus: "heldout" (bundled), "wikitext2-test", "wikitext2-valid" (the raw files, see
        :func:`wikitext_folder`), or the path of a text file, or of a .jsonl file with rows of "text".
    count: how many windows (None: all): the first ones, or with ``spread`` evenly spaced over the text.
    bos: "yes" (every window begins with BOS), "no", or "auto" (as the tokenizer does by default).
    Raises UserError for a corpus that is missing or too short.
    """
    if bos not in BOS_MODES:
        raise UserError(f"BOS mode {bos!r} is not one of {', '.join(BOS_MODES)}")
    if seq_len < 2 or (count is not None and count < 1):
        raise UserError(f"evaluation needs at least 1 window of 2 tokens, not {count} of {seq_len}")
    bos_id = specials_of(tokenizer).bos if bos == "auto" else tokenizer.bos_token_id if bos == "yes" else None
    if bos == "yes" and bos_id is None:
        raise UserError("the tokenizer has no BOS token; use bos='no'")
    stream = torch.tensor(_stream(corpus, tokenizer), dtype=torch.long)
    room = seq_len - (bos_id is not None)
    available = len(stream) // room
    if available < 1:
        raise UserError(
            f"evaluation text {corpus!r} has {len(stream)} tokens, one window needs {room}: give more text "
            "or a smaller --seq-len"
        )
    wanted = available if count is None else min(count, available)
    pick = [i * available // wanted for i in range(wanted)] if spread else list(range(wanted))
    ids = stream[: available * room].view(available, room)[pick]
    if bos_id is not None:
        ids = torch.cat([torch.full((len(ids), 1), bos_id), ids], 1)
    label = corpus if corpus in NAMES else Path(corpus).name
    which = "all" if wanted == available else f"{'spread' if spread else 'first'} {wanted} of"
    name = (
        f"{label}, {seq_len} tokens, {'BOS' if bos_id is not None else 'no BOS'}, {which} {available} windows"
    )
    return Windows(ids.contiguous(), name, label, hash_ids(ids), available)


def _stream(corpus: str, tokenizer: Any) -> list[int]:
    """Token ids of a whole corpus; documents of a .jsonl file are parted by the tokenizer's separator."""
    path = corpus_path(corpus)
    plain = {"add_special_tokens": False, "verbose": False}
    if path.suffix != ".jsonl":
        return tokenizer(_read(path), **plain)["input_ids"]
    separator = specials_of(tokenizer).separator
    ids: list[int] = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            ids += tokenizer(_text_of(line, path, number, tokenizer), **plain)["input_ids"]
            ids += [] if separator is None else [separator]
    return ids


def _text_of(line: str, path: Path, number: int, tokenizer: Any) -> str:
    from quantkit.calib.sources import row_of

    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not valid JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}, line {number}: expected an object with 'text' or 'messages'")
    row = row_of(value, f"{path.name} line {number}", path.stem)
    if row.messages is None:
        return row.text
    # A base model has no template; the text must not change between a base model and its quantized copy.
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(list(row.messages), tokenize=False)
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in row.messages)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read evaluation text {path}: {error}") from error


def corpus_path(corpus: str) -> Path:
    """The file of a corpus. Raises UserError with what is missing."""
    if corpus == "heldout":
        return Path(__file__).with_name("heldout.jsonl")
    if corpus in WIKITEXT:
        name, digest = WIKITEXT[corpus]
        path = _wikitext(name, corpus)
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UserError(
                f"{path} is not the canonical {name} (sha256 {digest[:12]}…): numbers measured on it would "
                "not compare; pass it as a file path to measure on it anyway"
            )
        return path
    path = Path(corpus).expanduser()
    if not path.is_file():
        raise UserError(f"evaluation text {corpus!r} is neither a file nor one of {', '.join(NAMES)}")
    return path


def _wikitext(name: str, corpus: str) -> Path:
    places = [Path(__file__).resolve().parents[3] / "shared" / "data" / "text"]
    if os.environ.get("QUANTKIT_DATA"):
        root = Path(os.environ["QUANTKIT_DATA"])
        places = [root, root / "text", *places]
    for place in places:
        if (place / name).is_file():
            return place / name
    raise UserError(
        f"{corpus} needs the file {name} of WikiText-2 raw: put it in a folder and set QUANTKIT_DATA to that "
        "folder, or evaluate on 'heldout', which is bundled"
    )


def has_wikitext() -> bool:
    """Whether "wikitext2-test" can be used here."""
    try:
        corpus_path("wikitext2-test")
    except UserError:
        return False
    return True
