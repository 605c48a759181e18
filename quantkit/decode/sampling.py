"""From logits to a token: greedy, or sampling with temperature and top-p from a private generator.

numpy, not torch: at 2 ms a token, waking torch's thread pool for one argmax would cost more than the argmax.
"""

from __future__ import annotations

import numpy as np

from quantkit.errors import UserError


class Sampler:
    """Picks tokens. temperature 0: the most likely one. top_p: nucleus sampling (Holtzman et al. 2019).

    seed: of a generator that nothing else uses, so the same seed and logits give the same text.
    Raises UserError for a temperature below 0 or a top_p outside (0, 1].
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature >= 0:
            raise UserError(
                f"temperature {temperature} makes no distribution; give 0 (greedy) or a positive number"
            )
        if not 0 < top_p <= 1:
            raise UserError(f"top-p {top_p} is no probability; give a number above 0 and up to 1")
        self.temperature = temperature
        self.top_p = top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray) -> int:
        """A token id from float logits ``[vocab]``. Raises UserError when none of them is a number."""
        if self.temperature == 0:
            best = int(logits.argmax())
            if not np.isfinite(logits[best]):
                raise UserError(
                    "the model gives no finite logits; its weights or scales are damaged (quantkit inspect)"
                )
            return best
        return int(self._random.choice(len(logits), p=self.distribution(logits)))

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        """float64 probabilities ``[vocab]`` that a token is drawn from: softmax, then the nucleus alone."""
        scaled = logits.astype(np.float64) / self.temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        if not np.isfinite(p).all():
            raise UserError(
                "the model gives no finite logits; its weights or scales are damaged (quantkit inspect)"
            )
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            # the smallest set whose sum reaches top_p: a token is in while the sum before it is still short
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= self.top_p]] = 0
            p /= p.sum()
        return p
