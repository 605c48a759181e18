import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from quantkit.errors import UserError
from quantkit.evals import corpus, provenance, row
from tests.calib.conftest import byte_tokenizer


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(105)))
    return str(path)


def test_windows_cut_the_text_end_to_end(text, tokenizer):
    found = corpus.windows(text, tokenizer, seq_len=10)
    assert found.ids.shape == (10, 10) and found.available == 10
    assert tokenizer.decode(found.ids.flatten()) == Path(text).read_text()[:100]
    assert found.name == "story.txt, 10 tokens, no BOS, all 10 windows"


def test_first_and_spread(text, tokenizer):
    every = corpus.windows(text, tokenizer, seq_len=10).ids
    first = corpus.windows(text, tokenizer, seq_len=10, count=3)
    spread = corpus.windows(text, tokenizer, seq_len=10, count=3, spread=True)
    assert torch.equal(first.ids, every[:3]) and torch.equal(spread.ids, every[[0, 3, 6]])
    assert first.name.endswith("first 3 of 10 windows") and spread.name.endswith("spread 3 of 10 windows")
    assert first.sha256 != spread.sha256
    assert first.about["data_sha256"] == first.sha256


def test_bos(text, tokenizer):
    found = corpus.windows(text, tokenizer, seq_len=10, bos="yes")
    assert (found.ids[:, 0] == tokenizer.bos_token_id).all() and ", BOS, all 11" in found.name
    assert tokenizer.decode(found.ids[:, 1:].flatten()) == Path(text).read_text()[:99]
    adds = byte_tokenizer(bos=True)
    assert (corpus.windows(text, adds, seq_len=10).ids[:, 0] == adds.bos_token_id).all()
    assert (corpus.windows(text, adds, seq_len=10, bos="no").ids != adds.bos_token_id).all()


def test_heldout_is_there_and_big_enough(tokenizer):
    found = corpus.windows("heldout", tokenizer, seq_len=512)
    assert found.available >= 40  # bytes here; about 7,000 tokens of SmolLM2
    whole = tokenizer.decode(found.ids.flatten())
    assert "<|im_start|>user" in whole and "<|endoftext|>" in whole
    plain = corpus.windows("heldout", byte_tokenizer(template=None), seq_len=512)
    assert "user: " in byte_tokenizer().decode(plain.ids.flatten())


def test_wikitext_from_the_environment(tmp_path, tokenizer, monkeypatch):
    raw = b" = Title = \n \n Some text . \n" * 30
    (tmp_path / "wiki.test.raw").write_bytes(raw)
    monkeypatch.setenv("QUANTKIT_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"not the canonical wiki\.test\.raw"):
        corpus.windows("wikitext2-test", tokenizer, 16)
    assert not corpus.has_wikitext()
    digest = hashlib.sha256(raw).hexdigest()
    monkeypatch.setitem(corpus.WIKITEXT, "wikitext2-test", ("wiki.test.raw", digest))
    found = corpus.windows("wikitext2-test", tokenizer, 16, count=2)
    assert corpus.has_wikitext() and found.name.startswith("wikitext2-test, 16 tokens, no BOS, first 2 of")


def test_wikitext_missing(tokenizer, monkeypatch):
    monkeypatch.setitem(corpus.WIKITEXT, "wikitext2-test", ("no-such-file.raw", ""))
    with pytest.raises(UserError, match="QUANTKIT_DATA"):
        corpus.windows("wikitext2-test", tokenizer, 16)


def test_bad_corpora(tmp_path, text, tokenizer):
    with pytest.raises(UserError, match="neither a file nor one of heldout"):
        corpus.windows("nothing", tokenizer, 16)
    with pytest.raises(UserError, match="has 105 tokens, one window needs 200"):
        corpus.windows(text, tokenizer, 200)
    with pytest.raises(UserError, match="at least 1 window"):
        corpus.windows(text, tokenizer, 16, count=0)
    with pytest.raises(UserError, match="BOS mode"):
        corpus.windows(text, tokenizer, 16, bos="maybe")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "ok"}\n{"text"\n')
    with pytest.raises(UserError, match="line 2: not valid JSON"):
        corpus.windows(str(bad), tokenizer, 2)


def test_rows_are_json():
    bad = row("perplexity", float("inf"), "", float("nan"), corpus="x")
    assert bad == {"metric": "perplexity", "value": None, "stderr": None, "unit": "", "corpus": "x"}
    assert json.loads(json.dumps(row("kl", torch.tensor(0.5), "nats"), allow_nan=False))["value"] == 0.5


def test_provenance(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/quantkit", "eval", "/abs/model dir", "--bits", "4"])
    found = provenance(seed=3, data_sha256="abc", model="m")
    assert found["command"] == "quantkit eval 'model dir' --bits 4"
    assert found["seed"] == 3 and found["data_sha256"] == "abc" and found["model"] == "m"
    assert found["cores"] >= 1 and found["hardware"]
    assert torch.__version__.startswith(found["versions"]["torch"].split("+")[0])
    assert found["date"].endswith("+00:00")
    json.dumps(found)
