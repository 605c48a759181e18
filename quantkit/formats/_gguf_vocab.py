"""A Hugging Face tokenizer as GGUF metadata: byte-level BPE ("gpt2") or SentencePiece ("llama").

Read from the files of the model folder, not through a transformers release: ``tokenizer.json``,
``tokenizer.model`` (SentencePiece's own file, for its scores), ``tokenizer_config.json``, chat template.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.formats._common import CannotStore

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Pre-tokenizers that llama.cpp knows by name, told by their regular expression. An unknown name is fatal
# there, and a wrong one silently splits text differently.
_GPT2_SPLIT = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_LLAMA3_SPLIT = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_TEKKEN_SPLIT = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_SPLITS = {
    _GPT2_SPLIT: "gpt-2",
    _LLAMA3_SPLIT: "llama-bpe",
    _LLAMA3_SPLIT.replace("{1,3}", ""): "qwen2",
    _TEKKEN_SPLIT: "tekken",
}


def vocabulary(folder: Path, rows: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer.*`` keys for the tokenizer in ``folder``.

    rows: rows of the embedding; the list of tokens is padded to it with unused ones, since llama.cpp takes
    the vocabulary's size from the list. config: config.json, for ids that the tokenizer does not name.
    Raises CannotStore when the tokenizer is of a kind that llama.cpp would split differently.
    """
    settings = _json(folder / "tokenizer_config.json")
    described = _json(folder / "tokenizer.json")
    pieces = _sentencepiece(folder / "tokenizer.model")
    if not described and not pieces:
        raise CannotStore(
            f"{folder} has no tokenizer.json or tokenizer.model, and a GGUF file holds its tokenizer"
        )
    model = described.get("model", {})
    kind = model.get("type", "BPE")
    if described and kind != "BPE":
        raise CannotStore(
            f"{folder}/tokenizer.json is of type {kind}; BPE and SentencePiece BPE can be stored"
        )
    byte_level = described and not pieces and not model.get("byte_fallback") and _has(described, "ByteLevel")
    tokens, types = _tokens(described, pieces, rows, sentencepiece=not byte_level)
    out: dict[str, Any] = {"tokenizer.ggml.model": "gpt2" if byte_level else "llama"}
    if byte_level:
        out["tokenizer.ggml.pre"] = _pre_tokenizer(described)
        merges = model.get("merges", [])
        out["tokenizer.ggml.tokens"] = tokens
        out["tokenizer.ggml.token_type"] = types
        out["tokenizer.ggml.merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    else:
        out["tokenizer.ggml.pre"] = "default"
        out["tokenizer.ggml.tokens"] = tokens
        out["tokenizer.ggml.scores"] = _scores(tokens, pieces, model)
        out["tokenizer.ggml.token_type"] = types
        out["tokenizer.ggml.add_space_prefix"] = _adds_space(described, settings)
    out |= _special(tokens, settings, config)
    first, last = _frame(described)
    out["tokenizer.ggml.add_bos_token"] = settings.get("add_bos_token", first)
    out["tokenizer.ggml.add_eos_token"] = settings.get("add_eos_token", last)
    template = _chat_template(folder, settings)
    if template:
        out["tokenizer.chat_template"] = template
    return out


def _tokens(
    described: Mapping[str, Any], pieces: list[tuple[str, float, int]], rows: int, sentencepiece: bool
) -> tuple[list[str], list[int]]:
    """Tokens and their types in order of id, ``rows`` of each."""
    known: dict[int, tuple[str, int]] = {i: (piece, kind) for i, (piece, _, kind) in enumerate(pieces)}
    unknown = described.get("model", {}).get("unk_token")
    for token, i in described.get("model", {}).get("vocab", {}).items():
        kind = NORMAL
        if sentencepiece:
            is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            kind = BYTE if is_byte else UNKNOWN if token == unknown else NORMAL
        known.setdefault(i, (token, kind))
    for added in described.get("added_tokens", []):
        token, i = added["content"], added["id"]
        if known.get(i, ("", NORMAL))[1] == UNKNOWN:
            continue
        # llama.cpp looks user tokens up in the plain text, before spaces become SentencePiece's mark
        plain = token if added.get("special") or not sentencepiece else token.replace("\u2581", " ")
        known[i] = (plain, CONTROL if added.get("special") else USER)
    beyond = [i for i in known if i >= rows]
    if beyond:
        token = known[min(beyond)][0]
        raise CannotStore(
            f"the tokenizer has {len(known)} tokens, the embedding {rows} rows: {token!r} (id {min(beyond)}) "
            "has none; resize the model's embedding or remove the added tokens"
        )
    listed = [known.get(i, (f"[PAD{i}]", UNUSED)) for i in range(rows)]
    return [token for token, _ in listed], [kind for _, kind in listed]


def _scores(tokens: list[str], pieces: list[tuple[str, float, int]], model: Mapping[str, Any]) -> list[float]:
    """SentencePiece's scores, or without its file scores that merge in the order of the merge list.

    llama.cpp joins the neighbours whose union has the highest score; minus the rank of the merge that makes a
    token is such a score.
    """
    lowest = -1.0e4
    if pieces:
        return [pieces[i][1] if i < len(pieces) else lowest for i in range(len(tokens))]
    rank: dict[str, int] = {}
    for i, merge in enumerate(model.get("merges", [])):
        union = merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
        rank.setdefault(union, i)
    last = len(rank)
    return [-float(rank[t]) if t in rank else -float(last) if len(t) == 1 else lowest - last for t in tokens]


def _special(tokens: list[str], settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    out = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        i = ids.get(text) if text is not None else config.get(f"{name}_token_id")
        if isinstance(i, list):
            i = i[0] if i else None
        if i is not None and 0 <= i < len(tokens):
            out[f"tokenizer.ggml.{key}_token_id"] = i
    return out


def _parts(described: Mapping[str, Any], stage: str) -> Iterator[dict[str, Any]]:
    """The steps of a stage of tokenizer.json, sequences opened."""
    waiting = [described.get(stage)]
    while waiting:
        step = waiting.pop(0)
        if not step:
            continue
        inner = step.get("pretokenizers") or step.get("normalizers") or step.get("processors")
        if inner is not None and step["type"] == "Sequence":
            waiting = list(inner) + waiting
        else:
            yield step


def _has(described: Mapping[str, Any], kind: str) -> bool:
    return any(step["type"] == kind for step in _parts(described, "pre_tokenizer"))


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    """llama.cpp's name for what cuts text before the merges."""
    steps = list(_parts(described, "pre_tokenizer"))
    splits = [s["pattern"].get("Regex", s["pattern"].get("String")) for s in steps if s["type"] == "Split"]
    byte_level = next(s for s in steps if s["type"] == "ByteLevel")
    if byte_level.get("use_regex", True):
        splits.append(_GPT2_SPLIT)
    digits = [s for s in steps if s["type"] == "Digits"]
    others = {s["type"] for s in steps} - {"Split", "ByteLevel", "Digits"}
    if digits and splits == [_GPT2_SPLIT] and digits[0].get("individual_digits") and not others:
        return "smollm"
    if not digits and not others and len(splits) == 1 and splits[0] in _SPLITS:
        return _SPLITS[splits[0]]
    raise CannotStore(
        f"the pre-tokenizer of this model (splits {splits or 'none'}) is none that quantkit can name for "
        f"llama.cpp; it knows {', '.join(sorted({*_SPLITS.values(), 'smollm'}))}"
    )


def _adds_space(described: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a space is put before the text, which SentencePiece does unless told otherwise."""
    if not described:
        return bool(settings.get("add_prefix_space", True))
    if any(s["type"] == "Prepend" for s in _parts(described, "normalizer")):
        return True
    for step in _parts(described, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            return step.get("prepend_scheme", "always") != "never"
    return False


def _frame(described: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether encoding puts a special token before and after the text."""
    for step in _parts(described, "post_processor"):
        if step["type"] == "TemplateProcessing" and step.get("single"):
            return "SpecialToken" in step["single"][0], "SpecialToken" in step["single"][-1]
    return False, False


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def _sentencepiece(path: Path) -> list[tuple[str, float, int]]:
    """(piece, score, type) of a SentencePiece model file; [] when there is none.

    The file is a protobuf message whose field 1 repeats {1: piece, 2: score, 3: type}; SentencePiece and GGUF
    number the types alike.
    """
    if not path.is_file():
        return []
    pieces = []
    for field, value in _fields(path.read_bytes()):
        if field == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            kind = piece.get(3, NORMAL)
            pieces.append((piece[1].decode(), score, int(kind)))  # type: ignore[union-attr,arg-type]
    return pieces


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: int for varints, bytes for everything else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        length = {1: 8, 5: 4}.get(wire)
        if length is None:
            length = varint()
        yield key >> 3, data[at : at + length]
        at += length
