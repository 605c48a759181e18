"""Qwen2 and Qwen2.5: llama's block with biases on q, k and v."""

from dataclasses import replace

from quantkit.models.llama import SPEC as LLAMA

SPEC = replace(LLAMA, gguf_arch="qwen2")
