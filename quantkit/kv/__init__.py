"""Quantized key/value pages: the arithmetic, the pool that holds them, sequences made of them."""
