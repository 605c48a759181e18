"""ModelSpec: what quantkit must know of an architecture, as data.

A file ``quantkit/models/<model_type>.py`` holds one constant ``SPEC``. All names are relative: ``embed``,
``blocks``, ``norm`` and ``head`` to the model, everything else to one decoder block. A model type without a
file is discovered by tracing (``quantkit.models.generic``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from quantkit import plugins
from quantkit.errors import UserError


@dataclass(frozen=True, slots=True)
class Fold:
    """A rescale pair: dividing the producer's outputs by s and multiplying the consumers' input columns by s
    keeps the block's function, for any s > 0 per channel.

    producer: a norm or a linear of the block.
    consumers: all that read the producer's output: modules with ``weight [out, in]`` or fused expert
        parameters ``[experts, out, in]``. Routers belong here too, or the fold changes the routing.
    kind: "norm" (weight and bias are divided), "linear" (rows and bias of a linear are divided), or "value"
        (as linear, but under grouped queries one value channel feeds the same channel of several query heads,
        so s is shared between them: consumer channels are ``[heads, head_dim]``, producer channels
        ``[kv_heads, head_dim]``).
    rows: which of the producer's rows carry the scaled output: "" for all of them, "gate_up:up" for the
        second half, "qkv:v" for the value rows of a fused ``[q, k, v]`` projection.
    """

    producer: str
    consumers: tuple[str, ...]
    kind: str = "norm"
    rows: str = ""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture as data. ``groups`` are in forward order; linears of one group read the same input.

    A model whose blocks differ (dense and expert layers mixed) lists the names of all kinds; ``groups_in``
    and ``folds_in`` give what a particular block has.
    """

    groups: tuple[tuple[str, ...], ...]
    embed: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    folds: tuple[Fold, ...] = ()
    norm_offset: float = 0.0  # gemma's RMSNorm multiplies by 1 + weight
    transposed: bool = False  # GPT-2's Conv1D stores [in, out]
    tuple_output: bool = False  # the block returns (hidden, ...) instead of hidden
    fused: tuple[tuple[str, ...], ...] = ()  # sets that serving engines fuse and that must share a scheme
    unquantized: tuple[
        str, ...
    ] = ()  # block submodules or parameters that are never quantized (routers, experts)
    writers: tuple[str, ...] = ()  # linears (or expert parameters) whose outputs reach the residual stream
    post_norms: tuple[str, ...] = ()  # norms between a writer and the residual stream (gemma)
    # block-relative parameter -> how checkpoints hold it: pieces joined row-wise, "{expert}" counts from 0
    checkpoint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_arch: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # block-relative HF name -> gguf name

    def groups_in(self, block: nn.Module) -> tuple[tuple[str, ...], ...]:
        """The groups of linears that this block has, in forward order."""
        present = (tuple(name for name in group if has(block, name)) for group in self.groups)
        return tuple(group for group in present if group)

    def linears_in(self, block: nn.Module) -> tuple[str, ...]:
        """All linears of the block that may be quantized, in forward order."""
        return tuple(name for group in self.groups_in(block) for name in group)

    def folds_in(self, block: nn.Module) -> tuple[Fold, ...]:
        """The rescale pairs of this block, each with the consumers that it has."""
        folds = []
        for fold in self.folds:
            consumers = tuple(name for name in fold.consumers if has(block, name))
            if has(block, fold.producer) and consumers:
                folds.append(Fold(fold.producer, consumers, fold.kind, fold.rows))
        return tuple(folds)


def has(root: nn.Module, name: str) -> bool:
    """Whether ``root`` has a submodule or parameter of this dotted name."""
    current: Any = root
    for part in name.split("."):
        current = getattr(current, part, None)
        if current is None:
            return False
    return True


def weight_of(root: nn.Module, name: str) -> nn.Parameter:
    """The parameter itself when ``name`` is one, else the named module's ``weight``."""
    current: Any = root
    for part in name.split("."):
        current = getattr(current, part)
    return current if isinstance(current, Tensor) else current.weight  # type: ignore[return-value]


def unlisted(block: nn.Module, spec: ModelSpec) -> list[str]:
    """Matrices of the block (parameters of two or three dimensions) that ``spec`` neither quantizes nor names
    as unquantized. Not empty means that the spec does not describe this block: nothing is skipped silently.
    """
    known = set(spec.linears_in(block)) | set(spec.unquantized)
    owners = {
        name.removesuffix(".weight"): param for name, param in block.named_parameters() if param.dim() > 1
    }
    return [n for n in owners if n not in known and not any(n.startswith(f"{k}.") for k in spec.unquantized)]


def spec_for(config: Any, model: nn.Module | None = None) -> ModelSpec:
    """The ModelSpec of a transformers config.

    Taken from ``quantkit/models/<model_type>.py``, else discovered by tracing a tiny random model of the same
    type. With ``model`` (meta device is enough) every block is checked against it. Raises UserError naming
    what is missing or not covered.
    """
    kind = str(config.model_type)
    if kind.replace("_", "-") in plugins.names("models"):
        spec: ModelSpec = plugins.load("models", kind).SPEC
    else:
        spec = plugins.load("models", "generic").discover(config)
    if model is not None:
        check(model, spec, kind)
    return spec


def check(model: nn.Module, spec: ModelSpec, kind: str) -> None:
    """Raise UserError unless ``spec`` describes every decoder block of ``model``."""
    for name in (spec.embed, spec.blocks, spec.norm):
        if not has(model, name):
            raise UserError(
                f"the architecture data for {kind!r} names {name!r}, which this model does not have"
            )
    blocks = model.get_submodule(spec.blocks)
    for index, block in enumerate(blocks.children()):
        if stray := unlisted(block, spec):
            raise UserError(
                f"the architecture data for {kind!r} does not cover {', '.join(stray)} of block {index}; "
                f"add them to quantkit/models/{kind}.py (to `groups`, or to `unquantized`)"
            )
