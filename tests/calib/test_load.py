import io
import json
import random
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from quantkit.calib import CalibOptions, load_calibration, sampler_for
from quantkit.calib.audit import hash_ids, histogram
from quantkit.calib.passages import cut
from quantkit.errors import UserError
from tests.calib.conftest import byte_tokenizer


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def words(seed, count):
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefg", k=5)) for _ in range(count))


def test_windows_are_the_stream_of_passages_with_separators(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcde"}, {"text": "fgh"}])
    data = load_calibration(source, tokenizer, samples=9, seq_len=5, seed=0)
    text = tokenizer.decode(data.ids.flatten())
    assert text in ("abcde<|endoftext|>fgh<|endoftext|>", "fgh<|endoftext|>abcde<|endoftext|>")
    assert data.ids.dtype == torch.int64 and data.ids.shape == (2, 5)
    audit = data.audit
    assert (audit.windows, audit.windows_asked, audit.tokens, audit.tokens_left_over) == (2, 9, 10, 0)
    assert audit.short and "9 were asked for" in dict(audit.lines())["windows"]
    assert audit.lengths == {"1-15": 2} and audit.bos.startswith("none") and "endoftext" in audit.separator


def test_bos_stands_at_the_head_of_every_window_once(tmp_path):
    tokenizer = byte_tokenizer(bos=True)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": words(i, 30)} for i in range(4)])
    data = load_calibration(source, tokenizer, samples=50, seq_len=32, seed=1)
    bos = tokenizer.bos_token_id
    assert (data.ids[:, 0] == bos).all()
    assert not ((data.ids[:, 1:] == bos) & (data.ids[:, :-1] == bos)).any(), "two BOS tokens in a row"
    # BOS aside, nothing of the stream is lost or doubled up to the last window.
    stream = [t for t in data.ids.flatten().tolist() if t != bos]
    texts = {words(i, 30) for i in range(4)}
    whole = tokenizer.decode(stream)
    assert sum(text in whole for text in texts) >= 3
    assert len(whole) + data.audit.tokens_left_over == sum(map(len, texts))  # the last passage may be cut
    assert "every window begins" in data.audit.bos


def test_audit_counts_rows(tmp_path, tokenizer):
    rows = [{"text": "one two three"}, {"text": "  "}, {"text": "one two three "}, {"text": "four"}]
    data = load_calibration(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 2, 5, 0)
    audit = data.audit
    assert audit.rows_in == 4 and audit.duplicates == 1
    assert audit.dropped == {"empty": 1, "exact duplicate": 1}
    assert audit.rows_used + audit.rows_left_over + sum(audit.dropped.values()) == audit.rows_in
    assert json.loads(json.dumps(audit.as_dict()))["sha256"] == hash_ids(data.ids)


def test_same_seed_same_ids_other_seed_other_order(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": words(i, 20)} for i in range(20)])
    one, two, other = (load_calibration(source, tokenizer, 8, 64, seed) for seed in (3, 3, 4))
    assert torch.equal(one.ids, two.ids) and one.audit == two.audit
    assert not torch.equal(one.ids, other.ids) and one.audit.sha256 != other.audit.sha256


def test_private_generator(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": words(i, 20)} for i in range(5)])
    random.seed(5), torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()
    load_calibration(source, tokenizer, 2, 64, 0)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_every_kind_appears_in_few_windows(tmp_path, tokenizer):
    rows = [
        {"text": words(f"{k}{i}", 12), "kind": k, "lang": "en"}
        for k, n in (("big", 60), ("small", 6))
        for i in range(n)
    ]
    data = load_calibration(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 12, 128, 0)
    kinds = data.audit.kinds
    assert set(kinds) == {"big", "small"}
    assert 0.04 < kinds["small"] / sum(kinds.values()) < 0.2, kinds
    assert data.audit.rows_left_over > 0 and data.audit.languages == {"en": sum(kinds.values())}


def test_chat_template_is_the_tokenizers(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    want = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    data = load_calibration(source, tokenizer, 1, 20, 0)
    assert data.ids[0].tolist() == want[:20]
    assert data.audit.chat_rows == 1 and data.audit.template.startswith("the tokenizer's own")


def test_template_writes_the_only_bos(tmp_path):
    tokenizer = byte_tokenizer(bos=True, template="<s>{{ messages[0]['content'] }}")
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "abcdef"}]}])
    data = load_calibration(source, tokenizer, 1, 7, 0)
    assert tokenizer.decode(data.ids[0]) == "<s>abcdef"


def test_no_chat_template(tmp_path):
    tokenizer = byte_tokenizer(template=None)
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}])
    with pytest.raises(UserError, match=r"a\.jsonl line 1 is a chat, but .* no chat template"):
        load_calibration(source, tokenizer, 1, 5, 0)
    data = load_calibration(source, tokenizer, 1, 11, 0, options=CalibOptions(chat="plain"))
    assert tokenizer.decode(data.ids[0]) == "user: hello"
    default = load_calibration("default", tokenizer, 4, 64, 0)
    assert "no template" in default.audit.template


def test_refusal_of_the_template_is_a_dropped_row(tmp_path):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok"
    rows = [{"messages": [{"role": "system", "content": "x"}]}, {"text": words(1, 10)}]
    data = load_calibration(
        write_jsonl(tmp_path / "a.jsonl", rows), byte_tokenizer(template=template), 1, 20, 0
    )
    assert data.audit.dropped == {"chat template refused it: no system role": 1}


def test_text_parquet_and_folder(tmp_path, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "mix"
    folder.mkdir()
    (folder / "book.txt").write_text(words(1, 40))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    write_jsonl(folder / "rows.jsonl", [{"text": words(2, 40)}])
    chat = [[{"role": "user", "content": words(3, 40)}], None]
    pq.write_table(
        pa.table({"text": [None, words(4, 40)], "messages": chat, "n": [1, 2]}), folder / "t.parquet"
    )
    data = load_calibration(str(folder), tokenizer, 100, 64, 0)
    assert data.audit.files == ["book.txt", "rows.jsonl", "t.parquet"]
    assert data.audit.skipped_files == ["picture.png"]
    assert set(data.audit.kinds) == {"book", "rows", "t"} and data.audit.rows_in == 4
    assert data.audit.chat_rows == 1
    single = load_calibration(str(folder / "t.parquet"), tokenizer, 100, 64, 0)
    assert single.audit.rows_in == 2


def test_long_text_is_cut_and_spread(tmp_path, tokenizer):
    paragraphs = [f"{i:05d} " + words(i, 60) for i in range(300)]
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(paragraphs))
    data = load_calibration(str(path), tokenizer, 100, 512, 0)
    starts = {int(n) for n in re.findall(r"\b(\d{5}) ", tokenizer.decode(data.ids.flatten()))}
    assert data.audit.cut_rows == 1 and data.audit.rows_in == 1
    assert min(starts) < 100 < 200 < max(starts), "windows came from one end of the file only"


@pytest.mark.parametrize("text", ["x" * 1000, "ab cd " * 300, "line\n" * 300, "a\n\n" * 400, "é" * 777])
def test_cut_keeps_everything_but_white_space(text):
    pieces = cut(text, 100)
    assert all(0 < len(piece) <= 100 for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_token_files(tmp_path, tokenizer):
    ids = torch.arange(40).view(4, 10)
    save_file({"input_ids": ids.int(), "mask": torch.ones(3)}, str(tmp_path / "a.safetensors"))
    data = load_calibration(str(tmp_path / "a.safetensors"), tokenizer, 2, 8, 0)
    assert data.ids.shape == (2, 8) and all(row.tolist() in ids[:, :8].tolist() for row in data.ids)
    assert (data.audit.rows_in, data.audit.rows_used, data.audit.tokens_left_over) == (4, 2, 24)
    np.save(tmp_path / "b.npy", np.arange(25, dtype=np.uint16))
    data = load_calibration(str(tmp_path / "b.npy"), tokenizer, 9, 8, 0)
    assert torch.equal(data.ids, torch.arange(24).view(3, 8)) and data.audit.short


def test_self(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer) + 8, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    sampler = sampler_for(model, tokenizer, batch=2)
    one = load_calibration("self", tokenizer, 5, 12, 7, model=sampler)
    two = load_calibration("self", tokenizer, 5, 12, 7, model=sampler)
    other = load_calibration("self", tokenizer, 5, 12, 8, model=sampler)
    assert torch.equal(one.ids, two.ids) and not torch.equal(one.ids, other.ids)
    assert (one.ids[:, 0] == tokenizer.get_vocab()["<|endoftext|>"]).all()
    assert int(one.ids.max()) < len(tokenizer)
    # The draws follow the model: replay the second token of the first batch from its own logits.
    generator = torch.Generator().manual_seed(7)
    logits = model(one.ids[:2, :1]).logits[:, -1].float()
    chances = logits.softmax(-1)
    chances[:, len(tokenizer) :] = 0
    assert torch.equal(torch.multinomial(chances, 1, generator=generator)[:, 0], one.ids[:2, 1])
    with pytest.raises(UserError, match="needs the model"):
        load_calibration("self", tokenizer, 5, 12, 7)


def bad_sources():
    yield "missing.txt", None, "does not exist"
    yield (
        "short.txt",
        b"x" * 310,
        "found 311 tokens, one window needs 512: give more text or a smaller --seq-len",
    )
    yield "empty.txt", b" \n ", r"holds no text \(1 rows empty\)"
    yield "none.jsonl", b"", "holds no text"
    yield "bad.jsonl", b'{"text": "a"}\n{"text": \n', r"bad\.jsonl, line 2: not valid JSON"
    yield "list.jsonl", b"[1, 2]\n", "line 1: expected an object"
    yield (
        "keys.jsonl",
        b'{"text": "a"}\n{"content": "a"}\n',
        r"line 2: neither 'text' nor 'messages' \(keys: 'content'\)",
    )
    yield "number.jsonl", b'{"text": 5}\n', "'text' must be a string, found int"
    yield "chat.jsonl", b'{"messages": "hi"}\n', "line 1: 'messages' must be a list"
    yield "latin.txt", b"caf\xe9", r"not UTF-8 text \(byte 3\)"
    yield "ids.pt", b"x", "pickle"
    yield "a.docx", b"x", "ending '.docx' is not known"
    yield "a.parquet", b"not parquet", "not a readable parquet file"
    yield "a.safetensors", b"short", "not a readable safetensors file"
    yield "a.npy", b"short", "not a readable .npy"


@pytest.mark.parametrize(
    "name, content, message", bad_sources(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_bad_source(tmp_path, tokenizer, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_calibration(str(tmp_path / name), tokenizer, 4, 512, 0)


@pytest.mark.parametrize(
    "array, message",
    [
        (np.array([[1, 2, 9999]]), "1 token ids lie outside"),
        (np.array([-1, 2, 3]), "outside"),
        (np.array([1.0, 2.0]), "must be integers"),
        (np.zeros((2, 2, 2), int), "must be"),
        (np.array([1, 2, 3]), "found 3 tokens, one window needs 8"),
        (np.array(["a"]), "token ids must be integers"),
    ],
)
def test_bad_token_ids(tmp_path, tokenizer, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=message):
        load_calibration(str(tmp_path / "a.npy"), tokenizer, 4, 8, 0)


def test_a_pickled_npy_is_not_opened(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"not a readable \.npy"):
        load_calibration(str(tmp_path / "a.npy"), tokenizer, 4, 8, 0)


def test_empty_folder_and_parquet_without_text(tmp_path, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(UserError, match="holds no"):
        load_calibration(str(tmp_path), tokenizer, 4, 8, 0)
    pq.write_table(pa.table({"story": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"neither a 'text' nor a 'messages' column \(it has story"):
        load_calibration(str(tmp_path / "t.parquet"), tokenizer, 4, 8, 0)


def test_hub(tmp_path, tokenizer, monkeypatch):
    """`datasets` also opens a local folder by name, so the real library is run here without a network."""
    (tmp_path / "set").mkdir()
    rows = [{"story": words(i, 20), "n": i} for i in range(10)]
    write_jsonl(tmp_path / "set" / "train.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    data = load_calibration("hub:./set:train:story", tokenizer, 4, 64, 0)
    assert data.audit.rows_in == 10 and len(data) == 4
    with pytest.raises(UserError, match="no column 'text'; it has story, n"):
        load_calibration("hub:./set:train:text", tokenizer, 4, 64, 0)
    with pytest.raises(UserError, match="cannot load data set"):
        load_calibration("hub:./set:nosuchsplit:story", tokenizer, 4, 64, 0)
    with pytest.raises(UserError, match="is not hub:NAME"):
        load_calibration("hub:", tokenizer, 4, 64, 0)


def test_hub_offline_says_what_is_missing(tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot load data set 'nobody/nothing'.*--calib FILE"):
        load_calibration("hub:nobody/nothing", tokenizer, 4, 64, 0)


def test_arguments(tokenizer):
    with pytest.raises(UserError, match="at least 1 sample"):
        load_calibration("default", tokenizer, 0, 64, 0)
    with pytest.raises(UserError, match="chat mode"):
        load_calibration("default", tokenizer, 1, 64, 0, options=CalibOptions(chat="no"))


def test_table_shows_what_matters(tokenizer):
    data = load_calibration("default", tokenizer, 4, 64, 0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(data.audit.table())
    text = console.export_text()
    for piece in ("rows used", "BOS", "chat template", data.audit.sha256[:16], "4 × 64 tokens"):
        assert piece in text, piece


def test_batches(tokenizer):
    data = load_calibration("default", tokenizer, 5, 64, 0)
    parts = list(data.batches(2))
    assert [len(p) for p in parts] == [2, 2, 1] and torch.equal(torch.cat(parts), data.ids)


def test_histogram_covers_everything():
    lengths = [0, 1, 15, 16, 4095, 4096, 99999]
    assert histogram(lengths) == {"1-15": 3, "16-31": 1, "2048-4095": 1, "4096+": 2}
