"""Tokenizers as GGUF metadata: names of pre-tokenizers, SentencePiece files, padding, special tokens, templates."""

from __future__ import annotations

import io
import json

import pytest

from quantkit.formats import CannotStore, _gguf_vocab

QWEN = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
LLAMA3 = QWEN.replace("\\p{N}|", "\\p{N}{1,3}|")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
PLAIN = BYTES | {"use_regex": False}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def folder_with(tmp_path, pre_tokenizer=BYTES, settings=None, **changes):
    described = {
        "added_tokens": [
            {"id": 4, "content": "<end>", "special": True},
            {"id": 5, "content": "<tool>", "special": False},
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2, "abb": 3},
            "merges": [["a", "b"], "ab b"],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | changes))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return tmp_path


@pytest.mark.parametrize("pre_tokenizer, name", [
    (BYTES, "gpt-2"), (sequence(split(QWEN), PLAIN), "qwen2"), (sequence(split(LLAMA3), PLAIN), "llama-bpe"),
    (sequence({"type": "Digits", "individual_digits": True}, BYTES), "smollm"),
    (sequence(split(_gguf_vocab._TEKKEN_SPLIT), PLAIN), "tekken"),
])  # fmt: skip
def test_names_of_pre_tokenizers(pre_tokenizer, name, tmp_path):
    keys = _gguf_vocab.vocabulary(folder_with(tmp_path, pre_tokenizer), 6, {})
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize("pre_tokenizer", [
    sequence(split("\\d+"), PLAIN), sequence(split(QWEN), BYTES), sequence({"type": "Punctuation"}, BYTES), PLAIN,
])  # fmt: skip
def test_other_pre_tokenizers_are_refused(pre_tokenizer, tmp_path):
    with pytest.raises(CannotStore, match="llama-bpe, qwen2, smollm, tekken"):
        _gguf_vocab.vocabulary(folder_with(tmp_path, pre_tokenizer), 6, {})


def test_regular_expressions_are_those_of_the_peers():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert _gguf_vocab._SPLITS[PRETOKENIZE_REGEX] == "qwen2"


def test_byte_level_tokens(tmp_path):
    settings = {"bos_token": None, "eos_token": {"content": "<end>"}, "add_bos_token": True}
    keys = _gguf_vocab.vocabulary(
        folder_with(tmp_path, settings=settings), 8, {"pad_token_id": 1, "bos_token_id": [0, 1]}
    )
    assert keys == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "abb", "<end>", "<tool>", "[PAD6]", "[PAD7]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 4, 5, 5],
        "tokenizer.ggml.merges": ["a b", "ab b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def test_special_tokens_around_the_text(tmp_path):
    single = [{"SpecialToken": {"id": "<end>"}}, {"Sequence": {"id": "A"}}]
    post = {
        "type": "Sequence",
        "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": single}],
    }
    keys = _gguf_vocab.vocabulary(folder_with(tmp_path, post_processor=post), 6, {})
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, False)


def test_templates(tmp_path):
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert (
        _gguf_vocab.vocabulary(folder_with(tmp_path, settings={"chat_template": named}), 6, {})[
            "tokenizer.chat_template"
        ]
        == "D"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ file }}")
    assert _gguf_vocab.vocabulary(tmp_path, 6, {})["tokenizer.chat_template"] == "{{ file }}"


def test_sentencepiece_described_by_merges(tmp_path):
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": ["a b", "\u2581 a", "ab b"],
             "vocab": {"<unk>": 0, "<0x0A>": 1, "a": 2, "b": 3, "\u2581": 4, "ab": 5, "\u2581a": 6, "abb": 7}}  # fmt: skip
    added = [
        {"id": 0, "content": "<unk>", "special": True},
        {"id": 8, "content": "\u2581\u2581", "special": False},
    ]
    folder = folder_with(
        tmp_path, {"type": "Metaspace", "prepend_scheme": "first"}, model=model, added_tokens=added
    )
    keys = _gguf_vocab.vocabulary(folder, 9, {})
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.pre"] == "default"
    assert keys["tokenizer.ggml.token_type"] == [2, 6, 1, 1, 1, 1, 1, 1, 4]
    assert keys["tokenizer.ggml.tokens"][8] == "  "  # llama.cpp looks user tokens up in the plain text
    scores = keys["tokenizer.ggml.scores"]
    assert scores[5] > scores[6] > scores[7] > scores[1]  # the order of the merges
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    never = folder_with(
        tmp_path, {"type": "Metaspace", "prepend_scheme": "never"}, model=model, added_tokens=added
    )
    assert _gguf_vocab.vocabulary(never, 9, {})["tokenizer.ggml.add_space_prefix"] is False


def test_sentencepiece_file(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece trains the model that is read")
    text = io.BytesIO(b"".join(b"the cat sat on mat number %d and slept\n" % i for i in range(60)))
    lines = iter(text.getvalue().decode().splitlines())
    with open(tmp_path / "tokenizer.model", "wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=file, vocab_size=330, model_type="bpe", byte_fallback=True,
            user_defined_symbols=["<tool>"], hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    peer = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    n = peer.get_piece_size()
    keys = _gguf_vocab.vocabulary(tmp_path, n + 2, {"bos_token_id": 1})
    assert keys["tokenizer.ggml.tokens"][:n] == [peer.id_to_piece(i) for i in range(n)]
    assert keys["tokenizer.ggml.scores"][:n] == [peer.get_score(i) for i in range(n)]
    types = keys["tokenizer.ggml.token_type"]
    assert [t == 3 for t in types[:n]] == [peer.is_control(i) for i in range(n)]
    assert [t == 6 for t in types[:n]] == [peer.is_byte(i) for i in range(n)]
    assert types[0] == 2 and types[peer.piece_to_id("<tool>")] == 4 and types[n:] == [5, 5]
    assert keys["tokenizer.ggml.add_space_prefix"] is True and keys["tokenizer.ggml.bos_token_id"] == 1


def test_what_cannot_be_stored(tmp_path):
    with pytest.raises(CannotStore, match=r"has no tokenizer\.json"):
        _gguf_vocab.vocabulary(tmp_path, 6, {})
    with pytest.raises(CannotStore, match=r"'<end>' \(id 4\) has none"):
        _gguf_vocab.vocabulary(folder_with(tmp_path), 4, {})
    with pytest.raises(CannotStore, match="of type Unigram"):
        _gguf_vocab.vocabulary(folder_with(tmp_path, model={"type": "Unigram", "vocab": {}}), 6, {})
