"""The token loop: sampling against counts, streaming against whole decoding, batches against single prompts."""

import numpy as np
import pytest
import torch
import twins
from click.testing import CliRunner

from quantkit.cli import cli
from quantkit.decode.loop import TransformersEngine, generate
from quantkit.decode.sampling import Sampler
from quantkit.decode.stream import TextStream
from quantkit.engine import encode, open_engine, stop_ids
from quantkit.errors import UserError


def test_greedy_and_nucleus():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert Sampler()(logits) == 0
    assert Sampler(1.0, 1.0).distribution(logits) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-6)
    assert Sampler(1.0, 0.7).distribution(logits) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert Sampler(1.0, 0.81).distribution(logits)[3] == 0 < Sampler(1.0, 0.81).distribution(logits)[2]
    assert Sampler(0.5).distribution(logits) == pytest.approx(
        np.square([0.5, 0.3, 0.15, 0.05]) / 0.365, abs=1e-6
    )


def test_sampling_follows_the_distribution_and_its_own_seed():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler, again = Sampler(1.0, seed=3), Sampler(1.0, seed=3)
    drawn = [sampler(logits) for _ in range(3000)]
    np.random.seed(0)  # the global generator has no say
    assert drawn[:50] == [again(logits) for _ in range(50)]
    assert np.bincount(drawn) / 3000 == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


@pytest.mark.parametrize(
    "setting, words", [({"temperature": -1}, "temperature -1"), ({"top_p": 0}, "top-p 0")]
)
def test_impossible_sampling(setting, words):
    with pytest.raises(UserError, match=words):
        Sampler(**setting)


def test_no_finite_logits():
    for sampler in (Sampler(), Sampler(1.0)):
        with pytest.raises(UserError, match="no finite logits"):
            sampler(np.full(4, np.nan, np.float32))


@pytest.mark.parametrize("text", ["plain words here", "naïve café – 日本語 😀 end", "a\n\n  b"])
def test_stream_gives_whole_characters_and_the_whole_text(text):
    tokenizer = twins.tokenizer()
    stream = TextStream(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [stream.feed(i) for i in ids] + [stream.finish()]
    assert "".join(pieces) == text == stream.text
    assert not any("�" in p for p in pieces)


def test_stop_string_across_tokens_is_never_shown():
    tokenizer = twins.tokenizer()
    ids = tokenizer("one STOx two STOP three", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, ["STOP", "unseen"])
    shown = ""
    for i in ids:
        shown += stream.feed(i)
        assert not shown.endswith("STO")
    assert shown + stream.finish() == "one STOx two " and stream.stopped == "STOP"
    unmet = TextStream(tokenizer, ["endless"])
    for i in tokenizer("the end", add_special_tokens=False)["input_ids"]:
        unmet.feed(i)
    unmet.finish()
    assert unmet.text == "the end"  # what was held back comes out


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_batch_gives_what_each_prompt_gives_alone(name):
    model, tokenizer = twins.build(name), twins.tokenizer()
    prompts = [encode(tokenizer, "The quick brown fox"), encode(tokenizer, "Numbers"), list(range(10, 40))]
    engine = TransformersEngine(model)
    together, clock = generate(engine, prompts, tokenizer, 12)
    assert len(clock.itl) == 11 and clock.ttft > 0
    for prompt, result in zip(prompts, together):
        (alone,), _ = generate(engine, [prompt], tokenizer, 12)
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert alone.ids == want[0, len(prompt) :].tolist() == result.ids
        assert result.finish == "length" and result.prompt_tokens == len(prompt)


class Scripted:
    """An engine that says what it is told to, on a clock of its own."""

    capacity: int | None = 20
    max_batch = 1

    def __init__(self, ids, vocab=twins.VOCAB):
        self.ids, self.vocab, self.time = list(ids), vocab, 0.0

    def _say(self, seconds):
        self.time += seconds
        return np.eye(self.vocab, dtype=np.float32)[self.ids.pop(0)][None]

    def prefill(self, prompts):
        return self._say(5)

    def step(self, tokens):
        return self._say(1)


def test_clock_and_ends():
    tokenizer = twins.tokenizer()
    script = Scripted([70, 71, 2, 72])
    (result,), clock = generate(script, [[5, 6]], tokenizer, 9, stop_ids=[2], now=lambda: script.time)
    assert (
        result.ids == [70, 71, 2]
        and result.finish == "stop token"
        and result.text == tokenizer.decode([70, 71])
    )
    assert clock.ttft == 5 and clock.itl == [1, 1] and clock.rate == 1
    (result,), _ = generate(Scripted([70] * 30), [[5] * 15], tokenizer, 30)
    assert result.finish == "context" and len(result.ids) == 5


@pytest.mark.parametrize(
    "prompts, new, words",
    [
        ([[]], 4, "no tokens"),
        ([[1], [2]], 4, "at a time, not 2"),
        ([[1] * 20], 4, "the context 20"),
        ([[1]], 0, "0 new tokens"),
    ],
)
def test_refusals(prompts, new, words):
    with pytest.raises(UserError, match=words):
        generate(Scripted([3]), prompts, twins.tokenizer(), new)


def test_open_engine_says_why_not_native(twin_folder):
    folder = twin_folder("gpt2")
    opened = open_engine(folder)
    assert opened.backend == "transformers" and "not the native step" in opened.notes[0]
    assert opened.stop_ids == (2,) == stop_ids(folder, opened.tokenizer)
    with pytest.raises(UserError, match="native step cannot run"):
        open_engine(folder, "native")
    with pytest.raises(UserError, match="did you mean 'int4'|--kv imt4"):
        open_engine(folder, kv="imt4")


def test_quantized_cache_is_used_and_changes_little(twin_folder):
    folder = twin_folder("llama", dtype=torch.float32)
    prompt = list(range(5, 105))
    plain, quantized = open_engine(folder, "transformers"), open_engine(folder, "transformers", kv="int8")
    assert plain.cache_bits == 16 and 8 < quantized.cache_bits < 10
    plain.engine.prefill([prompt]), quantized.engine.prefill([prompt])
    a, b = plain.engine.step([7]), quantized.engine.step([7])
    assert 0 < np.abs(a - b).max() < 0.1 * np.abs(a).max()
    assert type(quantized.engine._cache).__name__ == "QuantCache"


def test_commands(twin_folder):
    folder = str(twin_folder("llama"))
    done = CliRunner().invoke(
        cli, ["generate", folder, "The quick", "--max-new-tokens", "5", "--engine", "transformers"]
    )
    assert done.exit_code == 0, done.output
    assert "5 tokens, first after" in done.stderr and len(done.stdout.strip()) > 0
    done = CliRunner().invoke(cli, ["generate", folder, "The quick", "Numbers:", "--max-new-tokens", "3"])
    assert done.exit_code == 0 and "--- The quick" in done.stdout and "--- Numbers:" in done.stdout
    done = CliRunner().invoke(
        cli, ["chat", folder, "--max-new-tokens", "4", "--engine", "transformers"], input="hello\nagain\n\n"
    )
    assert done.exit_code == 0 and done.stderr.count("first after") == 2
