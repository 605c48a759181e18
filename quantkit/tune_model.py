"""Tuning of a finished run: builds the quantized model from the work folder, trains it, writes it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint import Source
from quantkit.errors import UserError
from quantkit.modelspec import ModelSpec
from quantkit.plan import Names
from quantkit.skeleton import (
    build_skeleton,
    decoder_blocks,
    materialize,
    materialize_embeddings,
    materialize_head,
)
from quantkit.streamed import StreamedModel
from quantkit.tune import ScaledLinear, TuneOptions, Tuner, TuneReport
from quantkit.workdir import BlockResult, WorkFolder


def tune_work(
    source: Source,
    spec: ModelSpec,
    config: Any,
    work: WorkFolder,
    ids: Tensor,
    options: TuneOptions,
    tell: Callable[[str], None],
    trust_remote_code: bool = False,
) -> TuneReport | None:
    """Tune scales and norms of all blocks in ``work`` on the windows ``ids``; None when it was done before.

    The whole quantized model is in memory while it trains (codes as bytes, activations of one step). Raises
    UserError for a model whose head does more than a matrix product.
    """
    if work.tuned() is not None:
        return None
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise UserError(f"tuning does not support this model ({key} is set); use a recipe without `tune`")
    tell("tuning: predictions of the original on the calibration windows")
    teacher_model = StreamedModel(source.folder, trust_remote_code)
    teacher = teacher_model.hidden_states(ids)
    model: Any = build_skeleton(config, trust_remote_code=trust_remote_code)
    names = Names(source, spec)

    def tensor(name: str) -> Tensor:
        return source.tensor(names.tensor(name))

    materialize_embeddings(model, spec, tensor)
    materialize(model.get_submodule(spec.norm), spec.norm, tensor)
    results = [work.load(i) for i in range(len(decoder_blocks(model, spec)))]
    for i, result in enumerate(results):
        _fill(model, f"{spec.blocks}.{i}", spec, result, tensor)
    materialize_head(model, spec, tensor)
    head = model.get_submodule(spec.head).weight.detach()
    body = model.base_model

    def states(batch: Tensor) -> Tensor:
        return body(input_ids=batch, use_cache=False).last_hidden_state

    tuner = Tuner(states, body, head, spec.norm_offset)
    last = [0.0]

    def progress(step: int, kl: float, held: float | None) -> None:
        if held is not None:
            last[0] = held
            tell(f"tuning: step {step} of {options.steps}, KL {kl:.4f}, held out {held:.4f}")

    report = tuner.train(ids, teacher, options, progress)
    if report.accepted:
        report = _store(model, spec, source, names, tuner, work, results, report, ids, teacher, options)
    work.finish_tuning(asdict(report))
    return report


def _fill(
    model: nn.Module, prefix: str, spec: ModelSpec, result: BlockResult, tensor: Callable[[str], Tensor]
) -> None:
    """Load one block, its quantized linears as ScaledLinear."""
    block = model.get_submodule(prefix)
    for module, weight in result.weights.items():
        local = module.removeprefix(f"{prefix}.")
        bias = (
            tensor(f"{module}.bias")
            if getattr(block.get_submodule(local), "bias", None) is not None
            else None
        )
        bias = result.floats.get(f"{module}.bias", bias)
        parent, _, leaf = local.rpartition(".")
        setattr(block.get_submodule(parent), leaf, ScaledLinear(weight, bias))

    def known(name: str) -> Tensor:
        return result.floats[name] if name in result.floats else tensor(name)

    for path, module in block.named_modules():
        if not isinstance(module, ScaledLinear) and list(module.parameters(recurse=False)):
            materialize(_leaf(module), f"{prefix}.{path}", known)


def _leaf(module: nn.Module) -> nn.Module:
    """The module itself; materialize walks children, and only leaves reach here."""
    if list(module.children()):
        raise UserError(
            f"{type(module).__name__} has parameters of its own and children; tuning does not support it"
        )
    return module


def _store(
    model: nn.Module, spec: ModelSpec, source: Source, names: Names, tuner: Tuner, work: WorkFolder,
    results: list[BlockResult], report: TuneReport, ids: Tensor, teacher: Tensor, options: TuneOptions,
) -> TuneReport:  # fmt: skip
    """Round to stored dtypes, check the rounded model, and write tuned copies of the blocks."""
    base = f"{model.base_model_prefix}."
    weights = {base + n: w for n, w in tuner.weights().items()}
    gains = {}
    for name, value in tuner.gains().items():
        stored = source.tensors[names.tensor(base + name)].dtype
        gains[base + name] = value.to(stored)
    with torch.no_grad():  # what will be stored must be what is accepted
        for linear in tuner.linears.values():
            linear.start.copy_(linear.result().scale.float())
            linear.theta.zero_()
        for name, module in tuner.norms.items():
            gain: Any = module.parametrizations["weight"]  # type: ignore[index,union-attr]
            gain.original.copy_(gains[f"{base}{name}.weight"].float())
            gain[0].phi.zero_()
    held = min(options.held, max(1, len(ids) // 4))
    after = tuner.measure(ids[-held:], teacher[-held:])
    if after >= report.before:
        return TuneReport(report.before, after, report.steps, report.best_step, False)
    for i, result in enumerate(results):
        prefix = f"{spec.blocks}.{i}."
        floats = {**result.floats, **{n: v for n, v in gains.items() if n.startswith(prefix)}}
        if i == len(results) - 1:
            floats.update({n: v for n, v in gains.items() if not n.startswith(f"{spec.blocks}.")})
        tuned = {n: weights[n] for n in result.weights}
        work.commit_tuned(i, BlockResult(tuned, floats, result.reports, result.notes))
    return TuneReport(report.before, after, report.steps, report.best_step, True)
