"""Attention over a quantized KV cache: reference.py is the oracle, hf.py the door for transformers."""
