"""A model that is run from disk, one decoder block at a time: original, ours or foreign, in any format we read.

Evaluation needs the final hidden states of a few thousand tokens from each model. Run this way, neither model is
ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint import Source
from quantkit.load import format_of, load_config, quantized_modules, read_module
from quantkit.modelspec import spec_for
from quantkit.nn.qlinear import quantize_activations
from quantkit.plan import Names
from quantkit.qweight import QuantWeight
from quantkit.skeleton import (
    build_skeleton,
    capture,
    decoder_blocks,
    embedding_modules,
    materialize,
    materialize_head,
    release,
    run_block,
    run_head,
    run_tail,
)


class StreamedModel:
    """Opens a folder; nothing but headers is read until a method needs it. All arithmetic in float32.

    Raises UserError for a folder that cannot be read.
    """

    def __init__(self, folder: str | Path, trust_remote_code: bool = False) -> None:
        self.source = Source(folder)
        config = load_config(self.source, trust_remote_code)
        self._format = format_of(self.source.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        self.config: Any = config
        self.model = build_skeleton(config, trust_remote_code=trust_remote_code)
        self.spec = spec_for(config, self.model)
        self._names = Names(self.source, self.spec)
        self._stored = {} if self._format is None else quantized_modules(self.source, self._format)
        self._with_activations: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        """A parameter by its name in the model, dequantized when it is stored quantized."""
        module = name.removesuffix(".weight")
        if self._stored and name.endswith(".weight"):
            marker = self._format.marker  # type: ignore[union-attr]
            stored = self._names.tensor(module + marker).removesuffix(marker)
            if stored in self._stored:
                value = read_module(self.source, self._format, stored, self._stored[stored])  # type: ignore[arg-type]
                if isinstance(value, QuantWeight):
                    if value.scheme.activation:
                        self._with_activations.add(module)
                    value = value.dequantize()
                return value.T.contiguous() if self.spec.transposed else value
        return self.source.tensor(self._names.tensor(name))

    @torch.no_grad()
    def hidden_states(
        self, ids: Tensor, batch: int = 1, tick: Callable[[int, int], None] | None = None
    ) -> Tensor:
        """Final hidden states (after the last norm) float32 ``[sequences, tokens, hidden]`` of int64 ``ids``.

        batch: sequences run at once. tick(block, blocks) is called before each block.
        """
        names = embedding_modules(self.model, self.spec)
        for name in names:
            materialize(self.model.get_submodule(name), name, self.tensor)
        slices = [slice(i, min(i + batch, len(ids))) for i in range(0, len(ids), batch)]
        calls: dict[int, list] = {}
        pieces = []
        for at in slices:
            first, recorded = capture(self.model, self.spec, ids[at])
            calls.setdefault(at.stop - at.start, recorded)
            pieces.append(first)
        for name in names:
            release(self.model.get_submodule(name))
        hidden = torch.cat(pieces)
        del pieces
        blocks = decoder_blocks(self.model, self.spec)
        for i, block in enumerate(blocks):
            if tick:
                tick(i, len(blocks))
            prefix = f"{self.spec.blocks}.{i}"
            materialize(block, prefix, self.tensor)
            hooks = self._activation_hooks(block, prefix)
            for at in slices:
                hidden[at] = run_block(block, hidden[at], calls[at.stop - at.start][i])
            for hook in hooks:
                hook.remove()
            release(block)
        norm = self.model.get_submodule(self.spec.norm)
        materialize(norm, self.spec.norm, self.tensor)
        for at in slices:
            hidden[at] = run_tail(self.model, self.spec, hidden[at])
        release(norm)
        return hidden

    def _activation_hooks(self, block: nn.Module, prefix: str) -> list:
        names = [m.removeprefix(f"{prefix}.") for m in self._with_activations if m.startswith(f"{prefix}.")]
        return [
            block.get_submodule(n).register_forward_pre_hook(lambda _, args: (quantize_activations(args[0]),))
            for n in names
        ]

    def load_head(self) -> None:
        """Bring the output head into memory; :meth:`logits` needs it."""
        materialize_head(self.model, self.spec, self.tensor)

    def free_head(self) -> None:
        release(self.model.get_submodule(self.spec.head))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., vocab]`` from final hidden states ``[..., hidden]``, by the model's own head code."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        return run_head(self.model, self.spec, flat).reshape(*hidden.shape[:-1], -1)
