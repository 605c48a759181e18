"""Calibrating and rewriting a whole tiny model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from twins import token_ids

from quantkit.activations import HessianSum, Seen
from quantkit.modelspec import ModelSpec
from quantkit.rewrites import Probe, RewriteReport
from quantkit.scheme import Scheme
from quantkit.skeleton import BlockCall, capture, decoder_blocks, run_block


def calibrate(block: nn.Module, spec: ModelSpec, hidden: Tensor, call: BlockCall) -> dict[str, Seen]:
    """Statistics of every group's input, with sample rows, from one call of the block."""
    sums: dict[str, HessianSum] = {}
    samples: dict[str, Tensor] = {}

    def hook(name: str):
        def record(module: nn.Module, args: tuple) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            sums.setdefault(name, HessianSum(x.shape[-1])).add(x)
            samples[name] = x[:64].clone()

        return record

    with ExitStack() as stack:
        for group in spec.groups_in(block):
            stack.callback(block.get_submodule(group[0]).register_forward_pre_hook(hook(group[0])).remove)
        run_block(block, hidden, call)
    seen = {name: total.seen() for name, total in sums.items()}
    for name, one in seen.items():
        one.sample = samples[name]
    return seen


def rewrite_blocks(model: Any, spec: ModelSpec, rewrite: Any, scheme: Scheme) -> list[RewriteReport]:
    """Apply a block rewrite to every block; the hidden states advance through the rewritten blocks."""
    hidden, calls = capture(model, spec, token_ids(4, 48, seed=3))
    reports = []
    for block, call in zip(decoder_blocks(model, spec), calls):
        seen = calibrate(block, spec, hidden, call)
        schemes: Mapping[str, Scheme] = dict.fromkeys(spec.linears_in(block), scheme)
        probe = Probe(hidden, call)
        reports.append(rewrite.apply(block, spec, seen, schemes, model.config, probe=probe))
        hidden = run_block(block, hidden, call)
    return reports


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """``[2, 40, vocab]`` on tokens that no calibration saw."""
    return model(input_ids=token_ids(2, 40, seed=9), use_cache=False).logits


def moved(after: Tensor, before: Tensor) -> float:
    return float((after - before).abs().max())
