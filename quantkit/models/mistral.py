"""Mistral: llama's block with another window; gguf files carry it as llama."""

from quantkit.models.llama import SPEC as LLAMA

SPEC = LLAMA
