"""Phi-3 and Phi-4: one fused projection for q, k, v and one for gate and up."""

from quantkit.modelspec import Fold, ModelSpec

SPEC = ModelSpec(
    groups=(("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)),
    folds=(
        Fold("input_layernorm", ("self_attn.qkv_proj",)),
        Fold("self_attn.qkv_proj", ("self_attn.o_proj",), kind="value", rows="qkv:v"),
        Fold("post_attention_layernorm", ("mlp.gate_up_proj",)),
        Fold("mlp.gate_up_proj", ("mlp.down_proj",), kind="linear", rows="gate_up:up"),
    ),
    writers=("self_attn.o_proj", "mlp.down_proj"),
    gguf_arch="phi3",
    gguf_names={
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
)
