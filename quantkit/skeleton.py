"""The empty model and its parts: built on the meta device, filled one piece at a time, run block by block.

A model's forward pass is: embed, blocks, final norm, head. Walking it in pieces equals the full forward
exactly, provided that every block gets *its own* arguments back (gemma's sliding and full layers have
different masks and rotary tables), so they are recorded from one cheap pass in which no block runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from quantkit.errors import UserError
from quantkit.modelspec import ModelSpec


@dataclass(frozen=True, slots=True)
class BlockCall:
    """How the model calls one block, its hidden states left out.

    args: positional arguments after the hidden states; kwargs: keyword arguments (mask, rotary tables, ...).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build_skeleton(
    config: Any, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> nn.Module:
    """The causal language model of a transformers config with every parameter on the meta device.

    Buffers that are no checkpoint tensors (rotary frequencies, embedding scales) are real. Evaluation mode,
    attention by torch's scaled_dot_product_attention where the model has it, else eager. ``config`` is not
    changed. dtype: what the model computes in; parameters loaded by :func:`materialize` should have it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.use_cache = False
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    with init_empty_weights(include_buffers=False):
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
                raise
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
    # buffers that do live in the checkpoint are loaded like parameters
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to("meta")
    return model.eval().requires_grad_(False)


def _stored(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(dotted name, owner, attribute) of all parameters and persistent buffers below ``module``."""
    for path, owner in module.named_modules():
        names = [n for n, p in owner._parameters.items() if p is not None]
        names += [
            n
            for n, b in owner._buffers.items()
            if b is not None and n not in owner._non_persistent_buffers_set
        ]
        for name in names:
            yield (f"{path}.{name}" if path else name), owner, name


def materialize(
    module: nn.Module, prefix: str, tensors: Callable[[str], Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Give a submodule its weights: every parameter and stored buffer becomes ``tensors(prefix.name)``.

    Floating-point tensors are converted to ``dtype``. Raises UserError when a shape differs from the model's.
    What ``tensors`` raises for an absent name passes through.
    """
    for dotted, owner, name in _stored(module):
        full = f"{prefix}.{dotted}" if prefix else dotted
        old = getattr(owner, name)
        new = tensors(full)
        if new.shape != old.shape:
            raise UserError(
                f"{full} has shape {tuple(new.shape)} in the checkpoint; the model expects {tuple(old.shape)}"
            )
        if new.is_floating_point():
            new = new.to(dtype)
        if name in owner._parameters:
            owner._parameters[name] = nn.Parameter(new, requires_grad=False)
        else:
            owner._buffers[name] = new


def checkpoint_reader(
    spec: ModelSpec, read: Callable[[str], Tensor], present: Container[str]
) -> Callable[[str], Tensor]:
    """A ``tensors`` function for :func:`materialize` that also assembles what checkpoints hold in pieces.

    The running model fuses a layer's experts into one parameter ``[experts, out, in]``, and may have renamed
    modules, while checkpoints keep one tensor per expert (``spec.checkpoint``). ``read`` gives a tensor by
    its checkpoint name, ``present`` knows which names exist. A name that cannot be assembled goes to
    ``read``, which raises its own error.
    """
    prefix = f"{spec.blocks}."

    def tensor(name: str) -> Tensor:
        index, _, local = name.removeprefix(prefix).partition(".")
        if name in present or not name.startswith(prefix) or local not in spec.checkpoint:
            return read(name)
        pieces = [f"{prefix}{index}.{piece}" for piece in spec.checkpoint[local]]
        if "{expert}" not in pieces[0]:
            return torch.cat([read(piece) for piece in pieces])
        count = 0
        while pieces[0].format(expert=count) in present:
            count += 1
        if count == 0:
            return read(name)
        out = torch.empty(0)
        for expert in range(count):
            one = torch.cat([read(piece.format(expert=expert)) for piece in pieces])
            if expert == 0:
                out = one.new_empty(count, *one.shape)
            out[expert] = one
        return out

    return tensor


def release(module: nn.Module) -> None:
    """Send a submodule's parameters and stored buffers back to the meta device; their memory is freed."""
    for _, owner, name in _stored(module):
        old = getattr(owner, name)
        if name in owner._parameters:
            owner._parameters[name] = nn.Parameter(old.detach().to("meta"), requires_grad=False)
        else:
            owner._buffers[name] = old.to("meta")


def decoder_blocks(model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """The decoder blocks in order."""
    return list(model.get_submodule(spec.blocks).children())


def has_tied_head(model: nn.Module) -> bool:
    """Whether the head's weight is the embedding's (the checkpoint then usually holds it once)."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


@contextmanager
def _replaced_forwards(pairs: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within the context each module's forward is the given function. Attributes stay reachable, because the
    module itself is not swapped."""
    try:
        for module, forward in pairs:
            module.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for module, _ in pairs:
            module.__dict__.pop("forward", None)


def _split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    if args:
        return args[0], BlockCall(args[1:], dict(kwargs))
    kwargs = dict(kwargs)
    return kwargs.pop("hidden_states"), BlockCall((), kwargs)


@torch.no_grad()
def capture(model: nn.Module, spec: ModelSpec, input_ids: Tensor) -> tuple[Tensor, list[BlockCall]]:
    """One pass in which no block runs: what enters the first block, and how each block is called.

    input_ids: int64 ``[batch, tokens]``. Only the embeddings (everything before the blocks that has weights)
    must be materialized; blocks, final norm and head may be on the meta device. Returns hidden states
    ``[batch, tokens, hidden]`` exactly as the model makes them (scaled for gemma, with positions for GPT-2)
    and one BlockCall per block, in order.
    """
    blocks = decoder_blocks(model, spec)
    first: list[Tensor] = []
    calls: list[BlockCall] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        hidden, call = _split_hidden(args, kwargs)
        if not first:
            first.append(hidden)
        calls.append(call)
        return (hidden,) if spec.tuple_output else hidden

    def identity(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden

    replaced: list[tuple[nn.Module, Callable[..., Any]]] = [(block, record) for block in blocks]
    replaced.append((model.get_submodule(spec.norm), identity))
    with _replaced_forwards(replaced):
        cast(nn.Module, model.base_model)(input_ids=input_ids, use_cache=False)
    if len(calls) != len(blocks):
        raise UserError(
            f"the model called {len(calls)} of its {len(blocks)} blocks; this architecture cannot be walked"
        )
    return first[0], calls


def capture_block_calls(model: nn.Module, spec: ModelSpec, input_ids: Tensor) -> list[BlockCall]:
    """How each block is called for these token ids; see :func:`capture`."""
    return capture(model, spec, input_ids)[1]


def embed_tokens(model: nn.Module, spec: ModelSpec, input_ids: Tensor) -> Tensor:
    """Hidden states ``[batch, tokens, hidden]`` that enter the first block; see :func:`capture`."""
    return capture(model, spec, input_ids)[0]


@torch.no_grad()
def run_block(block: nn.Module, hidden: Tensor, call: BlockCall) -> Tensor:
    """One block on hidden states ``[batch, tokens, hidden]``; the same shape comes back."""
    out = block(hidden, *call.args, **call.kwargs)
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def run_tail(model: nn.Module, spec: ModelSpec, hidden: Tensor) -> Tensor:
    """The final norm: hidden states in, hidden states out. The head follows in :func:`run_head`."""
    return model.get_submodule(spec.norm)(hidden)


@torch.no_grad()
def run_head(model: nn.Module, spec: ModelSpec, hidden: Tensor) -> Tensor:
    """Logits ``[batch, tokens, vocab]`` from normed hidden states, by the model's own code, so that soft caps
    and logit scales are applied. Only the head must be materialized."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Tail(BaseModelOutputWithPast):
        """Fields that other output types have (router logits, attentions) read as None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    def inner(*args: Any, **kwargs: Any) -> Tail:
        return Tail(last_hidden_state=hidden)

    ids = torch.zeros(hidden.shape[:-1], dtype=torch.long)
    # OPT's causal model calls the decoder directly, past its base model
    bodies = {
        id(m): m
        for m in (cast(nn.Module, model.base_model), model.get_submodule(spec.blocks.rpartition(".")[0]))
    }
    with _replaced_forwards([(body, inner) for body in bodies.values()]):
        return model(input_ids=ids, use_cache=False).logits


def materialize_head(
    model: nn.Module, spec: ModelSpec, tensors: Callable[[str], Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Load the head alone. When it is tied, its weight is read under the embedding's name."""
    head = model.get_submodule(spec.head)
    if not has_tied_head(model):
        materialize(head, spec.head, tensors, dtype)
        return
    materialize(
        head,
        spec.head,
        lambda name: tensors(f"{spec.embed}.weight" if name.endswith(".weight") else name),
        dtype,
    )


def materialize_embeddings(
    model: nn.Module, spec: ModelSpec, tensors: Callable[[str], Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Load everything that runs before the blocks: embeddings of tokens and positions, their norms."""
    for name in embedding_modules(model, spec):
        materialize(model.get_submodule(name), name, tensors, dtype)


def embedding_modules(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Full names of the modules outside blocks, final norm and head, with or without weights."""
    skip = {spec.blocks, spec.norm, spec.head}
    names: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            full = f"{prefix}.{name}" if prefix else name
            if full in skip:
                continue
            if any(other.startswith(f"{full}.") for other in skip):
                visit(full, child)
            else:
                names.append(full)

    visit("", model)
    return names
