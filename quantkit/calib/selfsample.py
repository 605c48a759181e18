"""Calibration text written by the model itself (as in LLM-QAT, arXiv 2305.17888): no data needed at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.calib.passages import specials_of

Sampler = Callable[[int, int, int], Tensor]
"""(samples, seq_len, seed) -> int64 [samples, seq_len]; the same arguments give the same ids."""


def sampler_for(model: Any, tokenizer: Any, temperature: float = 1.0, batch: int = 8) -> Sampler:
    """A Sampler that draws from a transformers causal model, with its key-value cache.

    Each sample starts with the token that starts a document for this tokenizer (BOS, or else the document
    separator); where there is neither, with a random token. Sampling goes on through an end-of-text token:
    what follows is the next document. Ids are drawn on the CPU in float32 by a private generator.
    """
    specials = specials_of(tokenizer)
    start = specials.bos if specials.bos is not None else specials.separator

    @torch.no_grad()
    def sample(samples: int, seq_len: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        device = next(model.parameters()).device
        done = []
        for first in range(0, samples, batch):
            rows = min(batch, samples - first)
            if start is None:
                ids = torch.randint(len(tokenizer), (rows, 1), generator=generator)
            else:
                ids = torch.full((rows, 1), start)
            cache, step = None, ids
            while ids.shape[1] < seq_len:
                out = model(input_ids=step.to(device), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                chances = torch.softmax(out.logits[:, -1].float().cpu() / temperature, -1)
                chances[:, len(tokenizer) :] = 0  # padding rows of the vocabulary are no tokens
                step = torch.multinomial(chances, 1, generator=generator)
                ids = torch.cat([ids, step], 1)
            done.append(ids[:, :seq_len])
        return torch.cat(done)

    return sample
