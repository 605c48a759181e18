"""Tiny random models, one per architecture: the shapes of the real ones, two to four layers, a few hundred kB.

``build("llama")`` gives the model, ``save("llama", folder)`` a Hugging Face folder with a working tokenizer.
Weights are drawn from a private generator, so the same name and seed always give the same model. Norm weights
and biases are random too: a test with all-one norms cannot see a forgotten norm.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 384
TEXT = """The quick brown fox jumps over the lazy dog. A model is walked block by block, and every block is given
its own mask. Numbers: 0 1 2 3 4 5 6 7 8 9 10 42 128 576. def add(a, b): return a + b. What is the weather like
today? The weather today is fine, and tomorrow it will rain. She said that the river was deep and the water cold.
for i in range(10): print(i). In the beginning there was a small model with small weights and a large heart."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name -> (model_type, config fields that differ from the common ones)
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-ragged": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [0],
        },
    ),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "opt": ("opt", {"ffn_dim": 160, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
}
_NOT_FOR = {
    "gpt2": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "max_position_embeddings"),
}  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    """The transformers config of a twin; ``changes`` override single fields."""
    model_type, fields = TWINS[name]
    common = {key: value for key, value in _COMMON.items() if key not in _NOT_FOR.get(model_type, ())}
    made = AutoConfig.for_model(model_type, **{**common, **fields, **changes})
    made.dtype = torch.float32
    return made


@torch.no_grad()
def _fill(model: nn.Module, seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            fan_in = (
                parameter.shape[0]
                if "Conv1D" in type(model.get_submodule(name.rpartition(".")[0])).__name__
                else parameter.shape[-1]
            )
            embedding = "embed" in name or ".wte" in name or ".wpe" in name
            scale = (
                0.25 if embedding else spread * fan_in**-0.5
            )  # a tied head then gives logits of ordinary size
            parameter.copy_(noise * scale)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:  # norm weights, around 1 (gemma adds the 1 itself)
            parameter.copy_(0.2 * noise + (0.0 if model.config.model_type.startswith("gemma") else 1.0))


def build(name: str, seed: int = 0, spread: float = 1.5, **changes: Any) -> Any:
    """A tiny random float32 model in evaluation mode. ``spread`` scales the linears' weights."""
    model = AutoModelForCausalLM.from_config(config(name, **changes), attn_implementation="sdpa")
    _fill(model, seed, spread)
    model.tie_weights()
    return model.eval().requires_grad_(False)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most VOCAB tokens: any text round-trips. With a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,  # some tokenizer classes add tokens of their own when they load the folder
        special_tokens=["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([TEXT], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=256
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def save(
    name: str, folder: Path | str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write the twin as a Hugging Face folder (config, safetensors, generation config, tokenizer)."""
    folder = Path(folder)
    build(name, seed, **changes).to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def token_ids(batch: int = 2, length: int = 40, seed: int = 0) -> torch.Tensor:
    """Random int64 token ids ``[batch, length]``, special tokens left out."""
    return torch.randint(5, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
