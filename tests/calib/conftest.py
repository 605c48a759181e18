"""A byte-level tokenizer made in memory: one token a byte, so that every count can be worked out by hand."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Two threads that wait for each other on a busy machine make a tiny model a hundred times slower.
torch.set_num_threads(1)

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def byte_tokenizer(bos: bool = False, template: str | None = TEMPLATE, end_of_text: bool = True):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = SPECIALS if end_of_text else SPECIALS[1:]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer():
    return byte_tokenizer()
