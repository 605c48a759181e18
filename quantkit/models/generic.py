"""Discovery of an architecture that has no file: a tiny random model of the same type is traced.

What is found: the list of decoder blocks, embedding, final norm and head; every linear of a block, grouped by
the tensor that it reads (the same storage, not equal values); rescale pairs, each proven on the tiny block by
scaling at random and comparing outputs. Matrices that no linear layer holds (routers, fused experts) are
listed as ``unquantized`` and logged. Before a spec is returned, walking the tiny model block by block is
compared with its full forward; a difference is an error, not a note.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UserError
from quantkit.models import _folding
from quantkit.modelspec import Fold, ModelSpec
from quantkit.skeleton import BlockCall, capture, decoder_blocks, run_block, run_head, run_tail

logger = logging.getLogger("quantkit")

_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_VOCAB = 128


def discover(config: Any) -> ModelSpec:
    """The ModelSpec of a config whose model type has no file. Raises UserError saying what was not found."""
    model = _tiny(config)
    spec = _frame(model)
    hidden, calls = capture(model, spec, _ids())
    spec = replace(spec, tuple_output=_returns_tuple(model, spec, hidden, calls[0]))
    traces: list[tuple[nn.Module, Tensor, BlockCall, _Trace]] = []
    for block, call in zip(decoder_blocks(model, spec), calls):
        if not any(_same_structure(block, seen[0]) for seen in traces):
            traces.append((block, hidden, call, _trace(block, hidden, call)))
        hidden = run_block(block, hidden, call)
    spec = _with_groups(spec, [(block, trace) for block, _, _, trace in traces])
    spec = replace(spec, norm_offset=_norm_offset(spec, traces, model.config))
    folds = tuple(
        f for block, x, call, trace in traces for f in _folds(spec, block, x, call, trace, model.config)
    )
    spec = replace(spec, folds=tuple(dict.fromkeys(folds)))
    _assert_walk(model, spec)
    if spec.unquantized:
        logger.warning(
            "%s: %s are not linear layers and stay unquantized",
            config.model_type,
            ", ".join(spec.unquantized),
        )
    return spec


def _ids() -> Tensor:
    return torch.randint(3, _VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


def _shrunk(config: Any, narrow: bool) -> Any:
    small = copy.deepcopy(config)
    small.vocab_size, small.pad_token_id, small.use_cache = _VOCAB, None, False
    small.bos_token_id = small.eos_token_id = 1
    if not narrow:
        return small
    heads = _folding.heads_of(config)
    kv = min(heads.kv, 2)
    query = kv * (2 if heads.group > 1 else 1)
    if heads.group == 1:
        kv = query = min(heads.query, 4)
    small.num_attention_heads = query
    if getattr(small, "num_key_value_heads", None) is not None:
        small.num_key_value_heads = kv
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        small.word_embed_proj_dim = query * 16
    small.hidden_size = query * 16
    if getattr(small, "head_dim", None) is not None:
        small.head_dim = 16
    for name in _WIDTHS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 88)
    return small


@torch.no_grad()
def _tiny(config: Any) -> nn.Module:
    """A random model of the type, as narrow as can be built and run; all layers are kept, since their kinds
    may depend on the index."""
    from transformers import AutoModelForCausalLM

    failures = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for narrow in (True, False):
            try:
                model = AutoModelForCausalLM.from_config(_shrunk(config, narrow), dtype=torch.float32)
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
                    else:  # all-one norms and zero biases would hide a wrong fold
                        parameter.add_(0.2 * torch.randn_like(parameter))
                model = model.eval().requires_grad_(False)
                model(input_ids=_ids(), use_cache=False)
                return model
            except (
                Exception
            ) as error:  # any model code may fail on shrunk sizes; the real ones are tried next
                failures.append(f"{type(error).__name__}: {error}")
    raise UserError(
        f"the architecture {config.model_type!r} has no file in quantkit/models and a small model of it does "
        f"not run ({failures[0]}); write quantkit/models/{config.model_type}.py after the example of llama.py"
    )


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _frame(model: Any) -> ModelSpec:
    """Embedding, blocks, final norm and head by name; groups are still empty."""
    kind = model.config.model_type
    count = model.config.num_hidden_layers
    lists = [
        (sum(p.numel() for p in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "." in name
    ]
    if not lists:
        raise UserError(f"no list of {count} decoder blocks found in a {kind!r} model")
    blocks = max(lists)[1]
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embed is None or head is None:
        raise UserError(f"the {kind!r} model names no input embedding or no output head")
    order: list[str] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda m, a, o, name=name: order.append(name))
            stack.callback(handle.remove)
        model(input_ids=_ids(), use_cache=False)
    last = f"{blocks}.{count - 1}"
    after = order[order.index(last) + 1 :]
    norms = [n for n in after if _is_norm(model.get_submodule(n))]
    if not norms:
        raise UserError(f"no final norm found after the decoder blocks of a {kind!r} model")
    return ModelSpec(
        groups=(), embed=_name_of(model, embed), blocks=blocks, norm=norms[0], head=_name_of(model, head)
    )


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and "norm" in type(module).__name__.lower()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _returns_tuple(model: nn.Module, spec: ModelSpec, hidden: Tensor, call: BlockCall) -> bool:
    return isinstance(decoder_blocks(model, spec)[0](hidden, *call.args, **call.kwargs), tuple)


def _structure(block: nn.Module) -> list[tuple[str, str]]:
    return [(name, type(module).__name__) for name, module in block.named_modules()]


def _same_structure(a: nn.Module, b: nn.Module) -> bool:
    return _structure(a) == _structure(b)


@dataclass(slots=True)
class _Trace:
    """inputs/outputs: (name, key) in call order; a key identifies the memory that a tensor occupies."""

    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: list[Tensor] = field(
        default_factory=list
    )  # keeps memory from being reused, which would mix up keys


def _key(x: Tensor) -> tuple[int, ...]:
    # a reshaped view is the same input; a slice (another offset or width) is not
    return (x.untyped_storage().data_ptr(), int(x.storage_offset()), x.shape[-1], x.numel())


@torch.no_grad()
def _trace(block: nn.Module, hidden: Tensor, call: BlockCall) -> _Trace:
    trace = _Trace()

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            values = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
            if not values or name in trace.inputs or not isinstance(output, Tensor):
                return
            trace.kept += [values[0], output]
            trace.inputs[name], trace.outputs[name] = _key(values[0]), _key(output)

        return record

    with ExitStack() as stack:
        for name, module in block.named_modules():
            if _is_linear(module) or _is_norm(module):
                stack.callback(module.register_forward_hook(hook(name), with_kwargs=True).remove)
        run_block(block, hidden, call)
    return trace


def _with_groups(spec: ModelSpec, traces: list[tuple[nn.Module, _Trace]]) -> ModelSpec:
    groups: list[tuple[str, ...]] = []
    unquantized: list[str] = []
    kinds: set[bool] = set()
    for block, trace in traces:
        modules = dict(block.named_modules())
        by_input: dict[tuple[int, ...], list[str]] = {}
        for name, key in trace.inputs.items():
            if _is_linear(modules[name]):
                by_input.setdefault(key, []).append(name)
                kinds.add(type(modules[name]).__name__ == "Conv1D")
        # the linears' own order in the block, so that q, k, v keep it; groups stay in forward order
        position = {name: index for index, name in enumerate(modules)}
        groups += [tuple(sorted(names, key=position.__getitem__)) for names in by_input.values()]
        found = {name for names in by_input.values() for name in names}
        for dotted, parameter in block.named_parameters():
            name = dotted.removesuffix(".weight")
            if parameter.dim() > 1 and name not in found:
                unquantized.append(name)
    if not groups:
        raise UserError("the decoder blocks call no linear layer, so there is nothing to quantize")
    if len(kinds) > 1:
        raise UserError("blocks that mix nn.Linear and Conv1D are not supported")
    return replace(
        spec,
        groups=tuple(dict.fromkeys(groups)),
        transposed=kinds == {True},
        unquantized=tuple(dict.fromkeys(unquantized)),
    )


@torch.no_grad()
def _proven(
    spec: ModelSpec, block: nn.Module, hidden: Tensor, call: BlockCall, fold: Fold, config: Any
) -> bool:
    """Whether scaling by random factors in 1/2 .. 2 keeps the block's output to float32 rounding."""
    if _folding.misfit(block, spec, fold, config):
        return False
    before = run_block(block, hidden, call)
    saved = [(tensor, tensor.clone()) for tensor in _folding.touched(block, fold)]
    width = _folding.width_of(block, spec, fold, config)
    s = torch.exp2(2 * torch.rand(width, generator=torch.Generator().manual_seed(1)) - 1)
    try:
        _folding.scale(block, spec, fold, s, config)
        after = run_block(block, hidden, call)
    finally:
        for tensor, old in saved:
            tensor.copy_(old)
    return bool((after - before).abs().max() <= 1e-4 * (before - hidden).abs().max())


def _norm_folds(spec: ModelSpec, block: nn.Module, trace: _Trace) -> list[Fold]:
    modules = dict(block.named_modules())
    folds = []
    for group in spec.groups_in(block):
        norm = next(
            (
                n
                for n in trace.outputs
                if _is_norm(modules[n]) and trace.outputs[n] == trace.inputs.get(group[0])
            ),
            None,
        )
        if norm is not None:
            folds.append(Fold(norm, group))
    # a norm that feeds routers or fused experts, alone or beside linears
    for norm in (n for n in trace.outputs if _is_norm(modules[n])):
        group = next((f.consumers for f in folds if f.producer == norm), ())
        width = modules[norm].weight.shape[0]
        others = tuple(n for n in spec.unquantized if _folding.has_width(block, n, spec, width))
        if others:
            folds.append(Fold(norm, (*group, *others)))
    return folds


def _norm_offset(
    spec: ModelSpec, traces: list[tuple[nn.Module, Tensor, BlockCall, _Trace]], config: Any
) -> float:
    for offset in (0.0, 1.0):
        trial = replace(spec, norm_offset=offset)
        for block, hidden, call, trace in traces:
            if any(_proven(trial, block, hidden, call, f, config) for f in _norm_folds(trial, block, trace)):
                return offset
    return 0.0


def _folds(
    spec: ModelSpec, block: nn.Module, hidden: Tensor, call: BlockCall, trace: _Trace, config: Any
) -> list[Fold]:
    """Rescale pairs that hold on this block: norms, then linear pairs; tried by shape, proven by value."""
    tried: dict[str, Fold] = {}
    candidates = _norm_folds(spec, block, trace)
    order = [n for n in trace.inputs if n in spec.linears_in(block)]
    for group in spec.groups_in(block):
        if group[0] not in order:
            continue
        earlier = order[: order.index(group[0])]
        for producer in reversed(earlier):
            candidates += [
                Fold(producer, group, kind="linear"),
                Fold(producer, group, kind="linear", rows="gate_up:up"),
                Fold(producer, group, kind="value"),
                Fold(producer, group, kind="value", rows="qkv:v"),
            ]
    for fold in candidates:
        if fold.producer not in tried and _proven(spec, block, hidden, call, fold, config):
            tried[fold.producer] = fold
    return list(tried.values())


@torch.no_grad()
def _assert_walk(model: Any, spec: ModelSpec) -> None:
    ids = _ids()
    hidden, calls = capture(model, spec, ids)
    for block, call in zip(decoder_blocks(model, spec), calls):
        hidden = run_block(block, hidden, call)
    walked = run_head(model, spec, run_tail(model, spec, hidden))
    full = model(input_ids=ids, use_cache=False).logits
    if not torch.equal(walked, full):
        raise UserError(
            f"walking a {model.config.model_type!r} model block by block differs from its forward by "
            f"{float((walked - full).abs().max()):.3g}; write quantkit/models/{model.config.model_type}.py"
        )
