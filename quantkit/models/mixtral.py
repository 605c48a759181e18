"""Mixtral: llama's attention with routed experts, whose weights are fused parameters [experts, out, in]."""

from dataclasses import replace

from quantkit.models.llama import SPEC as LLAMA
from quantkit.modelspec import Fold

SPEC = replace(
    LLAMA,
    groups=LLAMA.groups[:2],
    folds=(
        *LLAMA.folds[:2],
        Fold("post_attention_layernorm", ("mlp.gate", "mlp.experts.gate_up_proj")),
        Fold("mlp.experts.gate_up_proj", ("mlp.experts.down_proj",), kind="linear", rows="gate_up:up"),
    ),
    fused=LLAMA.fused[:1],
    unquantized=("mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    writers=("self_attn.o_proj", "mlp.experts.down_proj"),
    checkpoint={
        "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
        "mlp.experts.gate_up_proj": (
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        "mlp.experts.down_proj": ("block_sparse_moe.experts.{expert}.w2.weight",),
    },
    gguf_names={
        **{name: gguf for name, gguf in LLAMA.gguf_names.items() if not name.startswith("mlp.")},
        "mlp.gate": "ffn_gate_inp",
    },
)
