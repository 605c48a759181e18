"""Llama and its relatives that kept its names (SmolLM2, Yi, TinyLlama, DeepSeek-LLM)."""

from quantkit.modelspec import Fold, ModelSpec

SPEC = ModelSpec(
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
    folds=(
        Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Fold("self_attn.v_proj", ("self_attn.o_proj",), kind="value"),
        Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        Fold("mlp.up_proj", ("mlp.down_proj",), kind="linear"),
    ),
    fused=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ),
    writers=("self_attn.o_proj", "mlp.down_proj"),
    gguf_arch="llama",
    gguf_names={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
)
