"""From rows to passages of token ids: chat template, removal of duplicates, cutting, order, tokenizing."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantkit.calib.sources import Row
from quantkit.errors import UserError

MAX_CHARS = 16_384  # longer texts are cut at blank lines; about 4,000 tokens of English
CHARS_PER_TOKEN = 8  # more than any text has on average, so that a cut piece can fill a long window
BATCH = 64  # texts tokenized at once; the order of the results does not depend on it


class Passage(NamedTuple):
    """Text ready to be tokenized. ``rendered``: the chat template already wrote the special tokens."""

    row: int
    text: str
    rendered: bool


@dataclass(slots=True)
class Prepared:
    """Passages in no particular order yet, and what was dropped or changed on the way."""

    passages: list[Passage]
    dropped: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    chat_rows: int = 0
    template: str = "none needed"
    cut_rows: int = 0


@dataclass(frozen=True, slots=True)
class Specials:
    """How this tokenizer marks documents. ``bos``/``separator`` are ids or None."""

    bos: int | None
    separator: int | None
    about_bos: str
    about_separator: str


def specials_of(tokenizer: Any) -> Specials:
    """The tokenizer's own default: what it adds to a text by itself decides about BOS and separator."""
    added = list(tokenizer("a", verbose=False)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    adds_bos = bos is not None and bool(added) and added[0] == bos
    about_bos = (
        f"the tokenizer adds {tokenizer.bos_token!r}; every window begins with it"
        if adds_bos
        else "none (the tokenizer adds none)"
    )
    if adds_bos:
        return Specials(bos, None, about_bos, f"each passage begins with {tokenizer.bos_token!r}")
    if added and eos is not None and added[-1] == eos:
        return Specials(
            None, None, about_bos, f"the tokenizer ends each passage with {tokenizer.eos_token!r}"
        )
    # Pre-training of GPT-2, SmolLM and Qwen parts documents by this token, while the chat models among them
    # name another one (<|im_end|>) as their EOS.
    end = tokenizer.get_vocab().get("<|endoftext|>")
    name = "<|endoftext|>" if end is not None else tokenizer.eos_token
    end = eos if end is None else end
    if end is None:
        return Specials(None, None, about_bos, "none (the tokenizer has no end-of-text token)")
    return Specials(None, int(end), about_bos, f"{name!r} after each passage")


def prepare(rows: list[Row], tokenizer: Any, chat: str, source: str, seq_len: int) -> Prepared:
    """Render, clean and cut rows. ``chat``: "template", "plain", or "auto" (template if there is one).

    Raises UserError when chat rows need a template that the tokenizer lacks.
    """
    result = Prepared([])
    limit = max(MAX_CHARS, CHARS_PER_TOKEN * seq_len)
    seen: set[bytes] = set()
    for index, row in enumerate(rows):
        text, rendered = row.text, False
        if row.messages is not None:
            result.chat_rows += 1
            shown, rendered = _render(row, tokenizer, chat, source, result)
            if shown is None:
                continue
            text = shown
        text = text.strip()
        if not text:
            result.dropped["empty"] += 1
            continue
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if digest in seen:
            result.duplicates += 1
            result.dropped["exact duplicate"] += 1
            continue
        seen.add(digest)
        pieces = [text] if rendered or len(text) <= limit else cut(text, limit)
        result.cut_rows += len(pieces) > 1
        result.passages += [Passage(index, piece, rendered) for piece in pieces]
    return result


def _render(row: Row, tokenizer: Any, chat: str, source: str, result: Prepared) -> tuple[str | None, bool]:
    assert row.messages is not None
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat == "template" and not has_template:
        raise UserError(
            f"{source}: {row.where} is a chat, but the model's tokenizer has no chat template; give rows "
            "with 'text' instead, or choose chat='plain' to write them as 'role: content'"
        )
    if chat == "plain" or not has_template:
        why = "" if has_template else " (the tokenizer has no template)"
        result.template = f"plain 'role: content' lines{why}"
        return "\n\n".join(f"{m['role']}: {m['content']}" for m in row.messages), False
    source_text = str(tokenizer.chat_template)
    result.template = f"the tokenizer's own (sha256 {hashlib.sha256(source_text.encode()).hexdigest()[:12]})"
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(list(row.messages), tokenize=False), True
    except TemplateError as error:
        # Some templates refuse system messages or an order of roles; that is a property of the row.
        result.dropped[f"chat template refused it: {error}"] += 1
        return None, True


def cut(text: str, limit: int) -> list[str]:
    """Pieces of at most ``limit`` characters, broken at blank lines, else at line ends or spaces."""
    pieces, start = [], 0
    while len(text) - start > limit:
        end = start + limit
        floor = start + limit // 2  # no slivers: a piece is at least half as long as it may be
        places = [text.rfind(mark, floor, end) + len(mark) for mark in ("\n\n", "\n", " ")]
        stop = next((p for p, m in zip(places, ("\n\n", "\n", " "), strict=True) if p - len(m) >= floor), end)
        pieces.append(text[start:stop])
        start = stop
    pieces.append(text[start:])
    return [p for p in (re.sub(r"\A\s*\n|\s+\Z", "", p) for p in pieces) if p]


def mixed_order(passages: list[Passage], rows: list[Row], seed: int) -> list[Passage]:
    """Shuffle, with the kinds spread evenly: any prefix holds each kind in about its share.

    Passage j of n of a kind gets the key (j + u) / n, u drawn once per kind; sorting by key interleaves.
    """
    draw = random.Random(f"quantkit calibration {seed}")
    by_kind: dict[tuple[str, str], list[Passage]] = defaultdict(list)
    for passage in passages:
        row = rows[passage.row]
        by_kind[row.kind, row.lang].append(passage)
    keyed = []
    for kind in sorted(by_kind):
        group = by_kind[kind]
        draw.shuffle(group)
        offset = draw.random()
        keyed += [((j + offset) / len(group), kind, j, passage) for j, passage in enumerate(group)]
    keyed.sort(key=lambda item: item[:3])
    return [item[3] for item in keyed]


def tokenize(passages: list[Passage], tokenizer: Any) -> Iterator[tuple[Passage, list[int]]]:
    """Token ids per passage, in order and lazily, without the separator."""
    for start in range(0, len(passages), BATCH):
        batch = passages[start : start + BATCH]
        plain = [p.text for p in batch if not p.rendered]
        chats = [p.text for p in batch if p.rendered]
        options = {"verbose": False, "return_attention_mask": False}
        plain_ids = iter(tokenizer(plain, **options)["input_ids"] if plain else [])
        chat_ids = iter(tokenizer(chats, add_special_tokens=False, **options)["input_ids"] if chats else [])
        for passage in batch:
            yield passage, list(next(chat_ids if passage.rendered else plain_ids))
