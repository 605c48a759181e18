"""Gemma 3 (text): norms multiply by 1 + weight, and each sublayer's output is normed before it is added."""

from dataclasses import replace

from quantkit.models.llama import SPEC as LLAMA
from quantkit.modelspec import Fold

SPEC = replace(
    LLAMA,
    folds=(
        Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Fold("self_attn.v_proj", ("self_attn.o_proj",), kind="value"),
        Fold("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        Fold("mlp.up_proj", ("mlp.down_proj",), kind="linear"),
    ),
    norm_offset=1.0,
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    gguf_arch="gemma3",
    gguf_names={
        **LLAMA.gguf_names,
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
