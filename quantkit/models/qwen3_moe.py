"""Qwen3-MoE: qwen3's attention, routed experts as in mixtral; single layers may be dense."""

from dataclasses import replace

from quantkit.models.mixtral import SPEC as MIXTRAL
from quantkit.models.qwen3 import SPEC as QWEN3
from quantkit.modelspec import Fold

SPEC = replace(
    QWEN3,
    folds=(
        *QWEN3.folds[:2],
        Fold(
            "post_attention_layernorm",
            ("mlp.gate_proj", "mlp.up_proj", "mlp.gate", "mlp.experts.gate_up_proj"),
        ),
        QWEN3.folds[3],
        MIXTRAL.folds[3],
    ),
    unquantized=MIXTRAL.unquantized,
    writers=(*QWEN3.writers, "mlp.experts.down_proj"),
    checkpoint={
        "mlp.experts.gate_up_proj": (
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
        ),
        "mlp.experts.down_proj": ("mlp.experts.{expert}.down_proj.weight",),
    },
    gguf_arch="qwen3moe",
    gguf_names={**QWEN3.gguf_names, "mlp.gate": "ffn_gate_inp"},
)
