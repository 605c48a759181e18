"""Qwen3: llama's block with an RMSNorm on every query and key head."""

from dataclasses import replace

from quantkit.models.llama import SPEC as LLAMA

SPEC = replace(
    LLAMA,
    gguf_arch="qwen3",
    gguf_names={**LLAMA.gguf_names, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
)
