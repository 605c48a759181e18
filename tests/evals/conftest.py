import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.calib.conftest import byte_tokenizer

torch.set_num_threads(1)  # see tests/calib/conftest.py


def tiny(seed=0, vocab=260, kind="llama", **more):
    """A two-layer model with sharp random predictions, so that divergences are far from zero."""
    config = AutoConfig.for_model(
        kind, vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.3, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def model():
    return tiny(0)


@pytest.fixture(scope="session")
def other():
    """The same model with slightly rounded weights: a stand-in for a quantized one."""
    changed = tiny(0)
    for name, p in changed.named_parameters():
        if name.endswith("proj.weight"):
            p.copy_((p / 0.1).round() * 0.1)
    return changed


@pytest.fixture(scope="session")
def ids():
    return torch.randint(260, (5, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()
