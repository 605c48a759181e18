"""Tiny random models, built in code: nothing is downloaded.

In float64: rounding noise of 1e-16 practically never moves a key across the border between two codes, so that
equality of two ways of feeding can be asked for exactly.
"""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

VOCAB = 97


@pytest.fixture(scope="session")
def llama():
    """Two layers, 4 query heads on 2 kv heads, head size 16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, pad_token_id=0, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="session")
def gemma():
    """Three layers: sliding window 40, sliding, full."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=40, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], max_position_embeddings=2048,
        initializer_range=0.2, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).double().eval()


@pytest.fixture
def ids():
    return torch.randint(1, VOCAB, (1, 200), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def feed(model, ids, cache, chunk):
    """Logits of ``ids`` fed in chunks."""
    return torch.cat(
        [model(ids[:, i : i + chunk], cache=cache).logits for i in range(0, ids.shape[1], chunk)], 1
    )


def difference(a, b):
    return float((a.float() - b.float()).abs().max())
