"""The block walk: load a block, capture, rewrite, solve, commit, advance. Knows no kernel and no file format.

At any time one decoder block is in memory, besides the hidden states of the calibration data. Each finished
block is committed to the work folder; a run that was interrupted replays the finished blocks (their forward
pass only) and goes on, with the same numbers as an unbroken run.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from quantkit.activations import HessianSum, NonFinite, Seen
from quantkit.checkpoint import Source, read_rows
from quantkit.errors import UserError
from quantkit.heap import give_back
from quantkit.modelspec import ModelSpec
from quantkit.plan import HIDDEN_IN_MEMORY, LayerPlan, Names, Plan, batch_tokens
from quantkit.recipe import Rule, make_rewrite, make_solver
from quantkit.rewrites import Probe
from quantkit.skeleton import BlockCall, capture, decoder_blocks, embedding_modules, materialize, release
from quantkit.walk import Batches, HiddenStates, Walk
from quantkit.workdir import BlockResult, ModuleReport, WorkFolder

# Halted forward passes of one block and the largest solve beside them may take this much; past it each group's
# pass is run again instead.
SUSPEND_IN_MEMORY = 480_000_000
# A rewrite is proven on a window of this many tokens.
PROBE_TOKENS = 64


class Progress(Protocol):
    """Where the walk reports to; the command line draws it, tests ignore it."""

    def block(self, index: int, total: int) -> None: ...

    def module(self, report: ModuleReport) -> None: ...


class Silent:
    def block(self, index: int, total: int) -> None:
        pass

    def module(self, report: ModuleReport) -> None:
        pass


@dataclass(slots=True)
class Timings:
    """Wall-clock seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(slots=True)
class _Run:
    model: nn.Module
    spec: ModelSpec
    source: Source
    plan: Plan
    names: Names
    work: WorkFolder
    progress: Progress
    timings: Timings

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self.names.tensor(name))


@torch.no_grad()
def run(
    model: nn.Module,
    spec: ModelSpec,
    source: Source,
    plan: Plan,
    ids: Tensor | None,
    work: WorkFolder,
    progress: Progress | None = None,
    timings: Timings | None = None,
) -> None:
    """Quantize every block of ``model`` (on the meta device) into the work folder.

    ids: int64 ``[sequences, tokens]`` calibration data, or None when nothing in the recipe needs data.
    Raises UserError when activations stop being finite, naming the module.
    """
    state = _Run(
        model, spec, source, plan, Names(source, spec), work, progress or Silent(), timings or Timings()
    )
    blocks = decoder_blocks(model, spec)
    by_block: dict[int, list[LayerPlan]] = {}
    for layer in plan.layers:
        by_block.setdefault(layer.block, []).append(layer)
    done = work.finished()
    streams = _Streams.start(state, ids) if ids is not None and done < len(blocks) else None
    try:
        for i, block in enumerate(blocks):
            state.progress.block(i, len(blocks))
            if i < done:
                if streams is not None:
                    streams.replay(state, i, block, work.load(i))
                continue
            with state.timings.stage("load"):
                materialize(block, f"{spec.blocks}.{i}", state.tensor)
            layers = [p for p in by_block.get(i, []) if p.scheme is not None]
            if streams is None:
                result = _solve_without_data(state, block, i, layers)
            else:
                result = streams.advance(state, i, block, layers)
            with state.timings.stage("write"):
                work.commit(i, result)
            release(block)
        state.progress.block(len(blocks), len(blocks))
    finally:
        if streams is not None:
            streams.close()


def _solve_without_data(
    state: _Run, block: nn.Module, index: int, layers: Sequence[LayerPlan]
) -> BlockResult:
    result = BlockResult({}, {}, [])
    for layer in layers:
        local = layer.module.removeprefix(f"{state.spec.blocks}.{index}.")
        with state.timings.stage("solve"):
            _solve_group(state, block, [(local, layer)], None, result)
    return result


def _solve_group(
    state: _Run,
    block: nn.Module,
    members: Sequence[tuple[str, LayerPlan]],
    seen: Seen | None,
    result: BlockResult,
) -> None:
    """Solve the linears of one group, put the dequantized weights into the block, and note what happened."""
    by_rule: dict[int, list[tuple[str, LayerPlan]]] = {}
    for local, layer in members:
        by_rule.setdefault(id(layer.rule), []).append((local, layer))
    for part in by_rule.values():
        rule: Rule = part[0][1].rule
        solver = make_solver(rule)
        modules = [block.get_submodule(local) for local, _ in part]
        weights = [_weight(m, state.spec).float() for m in modules]
        schemes = [layer.scheme for _, layer in part]
        try:
            solutions = solver.solve_group(weights, seen, schemes)
        except NonFinite as e:
            raise UserError(f"{part[0][1].module}: {e}; the module cannot be quantized") from e
        for (_, layer), module, solution in zip(part, modules, solutions):
            result.weights[layer.module] = solution.weight
            _set_weight(module, state.spec, solution.weight.dequantize())
            report = ModuleReport(
                layer.module, str(layer.scheme), rule.solver, float(solution.error), float(solution.baseline),
                0 if seen is None else seen.tokens, list(solution.notes),
            )  # fmt: skip
            result.reports.append(report)
            state.progress.module(report)


def _weight(module: nn.Module, spec: ModelSpec) -> Tensor:
    return module.weight.T if spec.transposed else module.weight  # type: ignore[union-attr,return-value]


def _set_weight(module: nn.Module, spec: ModelSpec, weight: Tensor) -> None:
    module.weight.data = weight.T.contiguous() if spec.transposed else weight  # type: ignore[union-attr]


class _Streams:
    """Hidden states of the calibration data: of the model as quantized so far, and, when some solver corrects
    upstream error, of the original model as well."""

    def __init__(
        self,
        batches: Batches,
        calls: list[dict[int, BlockCall]],
        quantized: HiddenStates,
        original: HiddenStates | None,
        first_ids: Tensor,
    ) -> None:
        self.batches, self.calls, self.quantized, self.original = batches, calls, quantized, original
        self.first_ids = first_ids
        self._probe_calls: list[dict[int, BlockCall]] | None = None

    @staticmethod
    def start(state: _Run, ids: Tensor) -> _Streams:
        with state.timings.stage("capture"):
            recipe = state.plan.recipe
            batches = Batches(
                len(ids), max(1, batch_tokens(recipe, state.plan.layers) // recipe.calib.seq_len)
            )
            hidden, calls = _embed(state, ids, batches)
            needs_cross = any("cross" in make_solver(p.rule).needs for p in state.plan.quantized.values())
            original = None
            if needs_cross:
                original = HiddenStates(
                    tuple(hidden.data.shape),
                    state.work.scratch("original") if _big(tuple(hidden.data.shape)) else None,
                )
                original.data.copy_(hidden.data)
        return _Streams(batches, calls, hidden, original, ids[:1].clone())

    def close(self) -> None:
        self.quantized.close()
        if self.original is not None:
            self.original.close()

    def replay(self, state: _Run, index: int, block: nn.Module, result: BlockResult) -> None:
        """Advance past a block that an earlier run finished."""
        with state.timings.stage("replay"):
            materialize(block, f"{state.spec.blocks}.{index}", state.tensor)
            if self.original is not None:
                Walk(block, [], self.original.data, self.batches, self.calls[index], False).finish(
                    self.original.data
                )
            apply_result(block, f"{state.spec.blocks}.{index}", state.spec, result)
            Walk(block, [], self.quantized.data, self.batches, self.calls[index], False).finish(
                self.quantized.data
            )
            release(block)

    def advance(self, state: _Run, index: int, block: nn.Module, layers: Sequence[LayerPlan]) -> BlockResult:
        """Rewrite and solve one block and move both streams past it."""
        prefix = f"{state.spec.blocks}.{index}"
        by_local = {p.module.removeprefix(f"{prefix}."): p for p in layers}
        groups = [g for g in state.spec.groups_in(block) if any(name in by_local for name in g)]
        result = BlockResult({}, {}, [])
        original_block = None
        if self.original is not None:
            original_block = copy.deepcopy(block)
        scales = self._rewrite(state, prefix, block, groups, by_local, result)
        suspend = self._suspended_bytes(block, groups) <= SUSPEND_IN_MEMORY
        walk = self._walk(block, groups, self.quantized.data, index, suspend)
        twin = None
        if original_block is not None and self.original is not None:
            twin = self._walk(original_block, groups, self.original.data, index, suspend)
        for g, group in enumerate(groups):
            members = [(name, by_local[name]) for name in group if name in by_local]
            seen = self._see(state, walk, twin, g, members, scales.get(group[0]))
            give_back()
            with state.timings.stage("solve"):
                _solve_group(state, block, members, seen, result)
            del seen
            give_back()
        with state.timings.stage("capture"):
            walk.finish(self.quantized.data)
            if twin is not None and self.original is not None:
                twin.finish(self.original.data)
        self._check(prefix)
        return result

    def _walk(
        self, block: nn.Module, groups: Sequence[tuple[str, ...]], hidden: Tensor, index: int, suspend: bool
    ) -> Walk:
        heads = [block.get_submodule(g[0]) for g in groups]
        return Walk(block, heads, hidden, self.batches, self.calls[index], suspend)

    def _suspended_bytes(self, block: nn.Module, groups: Sequence[tuple[str, ...]]) -> int:
        """What the halted passes hold at most (residual stream, the group's input and its neighbours), and what
        factorizing the widest Hessian takes meanwhile."""
        sequences, tokens, width = self.quantized.data.shape
        widest = max(
            (cast(Tensor, block.get_submodule(g[0]).weight).shape[-1] for g in groups), default=width
        )
        streams = 1 if self.original is None else 2
        halted = sequences * tokens * (2 * width + max(widest, 2 * width)) * 4 * streams
        return halted + widest * widest * 20

    def _see(
        self,
        state: _Run,
        walk: Walk,
        twin: Walk | None,
        g: int,
        members: Sequence[tuple[str, LayerPlan]],
        divided_by: Tensor | None = None,
    ) -> Seen:
        layer = members[0][1]
        cross = twin is not None and any("cross" in make_solver(p.rule).needs for _, p in members)
        total = HessianSum(layer.columns, cross=cross)
        inputs: Iterator[Tensor] = walk.visit(g)
        originals: Iterator[Tensor | None] = itertools.repeat(None) if twin is None else twin.visit(g)
        while True:
            with state.timings.stage("capture"):
                x, x_original = next(inputs, None), next(originals, None)
            if x is None:
                break
            with state.timings.stage("hessian"):
                try:
                    if x_original is not None and divided_by is not None:
                        x_original = x_original / divided_by  # the rewritten model's inputs are x / s
                    total.add(x, x_original if cross else None)
                except NonFinite as e:
                    raise UserError(
                        f"input of {layer.module}: {e}; the model overflows on this calibration data"
                    ) from e
        return total.seen()

    def _rewrite(
        self,
        state: _Run,
        prefix: str,
        block: nn.Module,
        groups: Sequence[tuple[str, ...]],
        by_local: Mapping[str, LayerPlan],
        result: BlockResult,
    ) -> dict[str, Tensor]:
        """Apply the recipe's rewrites to the block. Returns what each group's inputs were divided by.

        Floats that changed are rounded to their stored dtype before anything is solved against them.
        """
        scales: dict[str, Tensor] = {}
        for wanted in state.plan.recipe.rewrites:
            rewrite = make_rewrite(wanted)
            index = int(prefix.rpartition(".")[2])
            walk = self._walk(block, groups, self.quantized.data, index, suspend=False)
            seen = {}
            for g, group in enumerate(groups):
                first = next(name for name in group if name in by_local)
                seen[group[0]] = self._see(state, walk, None, g, [(first, by_local[first])])
            probe = Probe(self.quantized.data[:1, :PROBE_TOKENS].clone(), self._probe_call(state, index))
            schemes = {name: p.scheme for name, p in by_local.items() if p.scheme is not None}
            with state.timings.stage("rewrite"):
                report = rewrite.apply(block, state.spec, seen, schemes, state.model.config, probe=probe)
            result.notes += [
                f"{prefix}: {wanted.name}: {what}: {why}" for what, why in report.skipped.items()
            ]
            for name, s in report.input_scales.items():
                scales[name] = scales[name] * s if name in scales else s
        if scales:
            self._store_changed(state, prefix, block, by_local, result)
        return scales

    def _probe_call(self, state: _Run, index: int) -> BlockCall:
        """How the block is called for one short window."""
        if self._probe_calls is None:
            ids = self.first_ids[:1, :PROBE_TOKENS]
            self._probe_calls = _embed(state, ids, Batches(1, 1))[1]
        return self._probe_calls[index][1]

    def _store_changed(
        self,
        state: _Run,
        prefix: str,
        block: nn.Module,
        by_local: Mapping[str, LayerPlan],
        result: BlockResult,
    ) -> None:
        for name, value in block.named_parameters():
            if name.removesuffix(".weight") in by_local:
                continue
            stored = state.tensor(f"{prefix}.{name}")
            if not torch.equal(stored.to(value.dtype), value):
                result.floats[f"{prefix}.{name}"] = value.detach().to(stored.dtype)
                value.data = result.floats[f"{prefix}.{name}"].to(value.dtype)

    def _check(self, prefix: str) -> None:
        if not bool(torch.isfinite(self.quantized.data.sum())):
            raise UserError(
                f"hidden states after {prefix} are not finite; the model overflows on this calibration data"
            )


def apply_result(block: nn.Module, prefix: str, spec: ModelSpec, result: BlockResult) -> None:
    """Put a finished block's weights into its module."""
    for module, weight in result.weights.items():
        _set_weight(block.get_submodule(module.removeprefix(f"{prefix}.")), spec, weight.dequantize())
    for name, value in result.floats.items():
        owner, _, leaf = name.removeprefix(f"{prefix}.").rpartition(".")
        getattr(block.get_submodule(owner), leaf).data = value.float()


def _embed(state: _Run, ids: Tensor, batches: Batches) -> tuple[HiddenStates, list[dict[int, BlockCall]]]:
    """Hidden states that enter the first block, and how every block is called for each batch shape.

    Only the embedding rows that occur are read: a vocabulary of 150,000 rows would otherwise be the largest
    thing in memory.
    """
    model, spec = state.model, state.spec
    names = embedding_modules(model, spec)
    embedding: Any = model.get_submodule(spec.embed)
    info = state.source.tensors.get(state.names.tensor(f"{spec.embed}.weight"))
    compact = isinstance(embedding, nn.Embedding) and info is not None
    for name in names:
        if not (compact and name == spec.embed):
            materialize(model.get_submodule(name), name, state.tensor)
    rows = embedding.weight.shape[0]
    if int(ids.max()) >= rows:
        raise UserError(
            f"the calibration data hold token {int(ids.max())}, the model has {rows} embeddings; the tokenizer does not "
            "belong to this model"
        )
    used, position = torch.unique(ids, return_inverse=True)
    padding = getattr(embedding, "padding_idx", None)
    if compact and info is not None:
        embedding.padding_idx = None  # type: ignore[assignment]
        embedding.weight = nn.Parameter(read_rows(info, used).float(), requires_grad=False)
        ids = position
    hidden: HiddenStates | None = None
    calls: dict[int, list[BlockCall]] = {}
    for at in batches.slices:
        first, recorded = capture(model, spec, ids[at])
        calls.setdefault(at.stop - at.start, recorded)
        if hidden is None:
            shape = (len(ids), ids.shape[1], first.shape[-1])
            hidden = HiddenStates(shape, state.work.scratch("quantized") if _big(shape) else None)
        hidden.data[at] = first
    assert hidden is not None
    if compact:
        # a meta tensor of the original shape again, so that nobody takes the reduced one for the real one
        embedding.weight = nn.Parameter(torch.empty(info.shape, device="meta"), requires_grad=False)  # type: ignore[union-attr]
        embedding.padding_idx = padding  # type: ignore[assignment]
    for name in names:
        release(model.get_submodule(name))
    per_block = [
        {size: recorded[i] for size, recorded in calls.items()}
        for i in range(len(decoder_blocks(model, spec)))
    ]
    return hidden, per_block


def _big(shape: tuple[int, ...]) -> bool:
    return shape[0] * shape[1] * shape[2] * 4 > HIDDEN_IN_MEMORY
