"""Move a dequantized model off the grids that its weights lie on. For benchmarks only.

Weights that were once 4-bit and written back to bfloat16 sit on the old grid, so requantizing them with the
same groups is nearly free and flatters every method. A permutation of channels keeps the function and every
single weight value, but mixes the old groups: the residual stream, the MLP's channels and the value channels
inside each head are shuffled. ``random_scales`` also draws a factor in 1/1.4 .. 1.4 per channel for every
rescale pair (norm into linears, v into o, up into down), so that weights of one row leave their common grid
altogether; this rounds weights anew and favours methods that undo such scales, so it is a second variant and
not the benchmark.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import skeleton
from quantkit.checkpoint import FolderWriter, Source, write_json
from quantkit.errors import UserError
from quantkit.models import _folding
from quantkit.modelspec import Fold, ModelSpec, has, spec_for

SPREAD = 1.4  # largest random factor; the smallest is its reciprocal
TOLERANCE = 1e-4  # largest relative change of a block's output, float32


@dataclass(frozen=True, slots=True)
class OffgridReport:
    """What was done.

    moved: largest relative change of any block's output on a random input, in float32, before storing.
    rounding: largest relative change of a weight by storing it in the checkpoint's dtype
    (0 without random scales: permuted values are stored bit by bit)."""

    blocks: int
    permutations: int
    scales: int
    moved: float
    rounding: float


class Mover:
    """Permutes (and scales) the pieces of one model in place, float32 or any other dtype.

    Raises UserError for an architecture whose residual writers are not known.
    """

    def __init__(
        self, spec: ModelSpec, config: Any, width: int, seed: int, random_scales: bool = False
    ) -> None:
        if not spec.writers:
            raise UserError(
                f"{config.model_type!r} models cannot be moved off their grid: the architecture data does "
                "not say which linears write to the residual stream (`writers`)"
            )
        self.spec, self.config, self.random_scales = spec, config, random_scales
        self._generator = torch.Generator().manual_seed(seed)
        self.residual = self._permutation(width)
        self.permutations, self.scales = 1, 0

    def _permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator)

    @torch.no_grad()
    def embedding(self, embed: nn.Module) -> None:
        """Token or position embeddings ``[rows, hidden]``."""
        _permute(embed.weight, -1, self.residual)  # type: ignore[arg-type]

    @torch.no_grad()
    def norm(self, norm: nn.Module) -> None:
        """A norm of the residual stream."""
        for name in ("weight", "bias"):
            if isinstance(value := getattr(norm, name, None), Tensor):
                _permute(value, 0, self.residual)

    @torch.no_grad()
    def head(self, head: nn.Module) -> None:
        """``[vocab, hidden]``; a tied head is the embedding and must not be moved twice."""
        _permute(head.weight, -1, self.residual)  # type: ignore[arg-type]

    @torch.no_grad()
    def block(self, block: nn.Module) -> None:
        """One decoder block: residual stream, MLP channels, value channels, then the random factors."""
        spec = self.spec
        folds = spec.folds_in(block)
        norms = [f for f in folds if f.kind == "norm"]
        for name in (*(f.producer for f in norms), *(n for n in spec.post_norms if has(block, n))):
            self.norm(block.get_submodule(name))
        for name in dict.fromkeys(n for f in norms for n in f.consumers):
            _permute(_folding.matrix(block, name, spec), -1, self.residual)
        for name in (n for n in spec.writers if has(block, n)):
            _permute(_folding.matrix(block, name, spec), -2, self.residual)
            bias = _folding.bias_of(block, name)
            if bias is not None:
                _permute(bias, 0, self.residual)
        for fold in folds:
            if fold.kind == "linear":
                self._channels(block, fold)
            elif fold.kind == "value":
                self._values(block, fold)
        if self.random_scales:
            for fold in folds:
                size = _folding.width_of(block, spec, fold, self.config)
                exponent = 2 * torch.rand(size, generator=self._generator) - 1
                _folding.scale(block, spec, fold, torch.exp(exponent * math.log(SPREAD)), self.config)
                self.scales += size

    def _channels(self, block: nn.Module, fold: Fold) -> None:
        """MLP channels: whatever is multiplied channel by channel (gate and up) is shuffled alike."""
        order = self._permutation(_folding.width_of(block, self.spec, fold, self.config))
        partners = next((g for g in self.spec.groups_in(block) if fold.producer in g), (fold.producer,))
        rows = torch.cat([order, order + len(order)]) if fold.rows == "gate_up:up" else order
        for name in partners:
            _permute(_folding.matrix(block, name, self.spec), -2, rows)
            bias = _folding.bias_of(block, name)
            if bias is not None:
                _permute(bias, 0, rows)
        for name in fold.consumers:
            _permute(_folding.matrix(block, name, self.spec), -1, order)
        self.permutations += 1

    def _values(self, block: nn.Module, fold: Fold) -> None:
        """Value channels: a permutation per kv head, which its query heads' outputs share."""
        heads = _folding.heads_of(self.config)
        orders = torch.stack([self._permutation(heads.dim) for _ in range(heads.kv)])  # [kv, dim]
        inside = (orders + torch.arange(heads.kv)[:, None] * heads.dim).flatten()
        span = _folding.producer_rows(block, self.spec, fold, self.config)
        _permute(_folding.matrix(block, fold.producer, self.spec)[span], -2, inside)
        bias = _folding.bias_of(block, fold.producer)
        if bias is not None:
            _permute(bias[span], 0, inside)
        per_query = orders.repeat_interleave(heads.group, 0)  # [heads, dim]
        columns = (per_query + torch.arange(heads.query)[:, None] * heads.dim).flatten()
        for name in fold.consumers:
            _permute(_folding.matrix(block, name, self.spec), -1, columns)
        self.permutations += heads.kv


def _permute(x: Tensor, dim: int, order: Tensor) -> None:
    x.copy_(x.index_select(dim, order))


def make_offgrid(
    src_folder: str | Path, dst_folder: str | Path, seed: int = 0, random_scales: bool = False
) -> OffgridReport:
    """Write an off-grid copy of a Hugging Face model folder; one block is in memory at a time.

    Each block is proven: its float32 output on a random input must be the old one, permuted. Raises UserError
    when a block's output moves, when ``dst_folder`` exists, or when the architecture cannot be moved.
    """
    source, target = Source(src_folder), Path(dst_folder)
    if target.exists():
        raise UserError(f"{target} exists already; remove it or choose another folder")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder)
    model = skeleton.build_skeleton(config)
    spec = spec_for(config, model)
    staged = target.with_name(target.name + ".part")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    layout = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
    try:
        with FolderWriter(staged, layout) as writer:
            report = _Copy(source, writer, model, spec, seed, random_scales).run()
        write_json(staged / "config.json", source.config)
        for path in source.side_files():
            shutil.copyfile(path, staged / path.name)
        staged.rename(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)  # renamed away when all went well
    return report


class _Copy:
    """Streams the pieces of one model from source to writer, moving each on the way."""

    def __init__(
        self,
        source: Source,
        writer: FolderWriter,
        model: Any,
        spec: ModelSpec,
        seed: int,
        random_scales: bool,
    ) -> None:
        self.source, self.writer, self.model, self.spec = source, writer, model, spec
        width = model.get_submodule(spec.norm).weight.shape[0]
        self.mover = Mover(spec, model.config, width, seed, random_scales)
        self.left = set(source.tensors)
        self.moved, self.rounding = 0.0, 0.0

    def run(self) -> OffgridReport:
        model, spec, mover = self.model, self.spec, self.mover
        skeleton.materialize_embeddings(model, spec, self.source.tensor)
        tokens = torch.arange(3, 27)[None] % model.config.vocab_size
        calls = skeleton.capture_block_calls(model, spec, tokens)
        for name in skeleton.embedding_modules(model, spec):
            module = model.get_submodule(name)
            if isinstance(getattr(module, "weight", None), Tensor):
                mover.embedding(module)
                self._write(module, name)
        blocks = skeleton.decoder_blocks(model, spec)
        for index, (block, call) in enumerate(zip(blocks, calls)):
            name = f"{spec.blocks}.{index}"
            skeleton.materialize(block, name, self.source.tensor)
            self._prove(block, call, name)
            self._write(block, name)
            skeleton.release(block)
        norm = model.get_submodule(spec.norm)
        skeleton.materialize(norm, spec.norm, self.source.tensor)
        mover.norm(norm)
        self._write(norm, spec.norm)
        if f"{spec.head}.weight" in self.source:
            head = model.get_submodule(spec.head)
            skeleton.materialize(head, spec.head, self.source.tensor)
            mover.head(head)
            self._write(head, spec.head)
        if self.left:
            raise UserError(
                f"{len(self.left)} tensors belong to no known part of the model: {sorted(self.left)[:3]}"
            )
        return OffgridReport(len(blocks), mover.permutations, mover.scales, self.moved, self.rounding)

    def _prove(self, block: nn.Module, call: skeleton.BlockCall, name: str) -> None:
        order = self.mover.residual
        hidden = torch.randn(1, 24, len(order), generator=torch.Generator().manual_seed(0))
        before = skeleton.run_block(block, hidden, call)[..., order]
        self.mover.block(block)
        after = skeleton.run_block(block, hidden[..., order], call)
        moved = float((after - before).abs().max() / before.abs().max())
        if not moved <= TOLERANCE:
            raise UserError(f"the output of {name} moved by {moved:.1e} (relative); nothing is written")
        self.moved = max(self.moved, moved)

    def _write(self, module: nn.Module, prefix: str) -> None:
        for dotted, tensor in module.state_dict().items():
            name = f"{prefix}.{dotted}"
            dtype, _ = self.writer.layout[name]
            stored = tensor.to(dtype)
            error = ((stored.float() - tensor).abs() / tensor.abs().clamp_min(1e-30)).max()
            self.rounding = max(self.rounding, float(error))
            self.writer.write(name, stored)
            self.left.discard(name)
