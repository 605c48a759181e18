"""The plan: every module with its scheme and the reason, exact output bytes, memory and disk, from headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from quantkit import plugins
from quantkit.checkpoint import Layout, Source, header_bytes, nbytes_of, shard
from quantkit.errors import UserError
from quantkit.modelspec import ModelSpec
from quantkit.recipe import Recipe, Rule, make_rewrite, make_solver
from quantkit.scheme import Scheme, SchemeError

FITTING_GROUPS = (128, 64, 32)
# Hidden states up to this many bytes stay in memory; beyond it they go to a memory-mapped file.
HIDDEN_IN_MEMORY = 512_000_000


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What happens to one linear: its scheme (None: kept as it is), solver, and the reason in words."""

    module: str
    block: int
    rows: int
    columns: int
    scheme: Scheme | None
    rule: Rule
    reason: str


@dataclass(slots=True)
class Plan:
    """Everything decided before work starts.

    layout: every tensor of the output. peak_bytes: estimated peak of one block's work; disk_bytes: output and
    work folder together. warnings: what the user should hear before hours are spent.
    """

    recipe: Recipe
    format: str
    layers: list[LayerPlan]
    carried: list[str]
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    quantization_config: dict[str, Any]
    output_bytes: int
    source_bytes: int
    peak_bytes: int
    disk_bytes: int
    warnings: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> dict[str, LayerPlan]:
        return {p.module: p for p in self.layers if p.scheme is not None}

    @property
    def bits_per_weight(self) -> float:
        """Mean over the quantized linears, scales and zero points included."""
        weights = sum(p.rows * p.columns for p in self.quantized.values())
        bits = sum(p.rows * p.columns * p.scheme.bits_per_weight(p.columns) for p in self.layers if p.scheme)
        return bits / weights if weights else 0.0


class Names:
    """Module names of the running model <-> tensor names of the checkpoint, which may lack the base prefix."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        self._source = source
        prefix = spec.blocks.rpartition(".")[0].split(".")[0]
        self._prefix = f"{prefix}." if prefix else ""

    def tensor(self, name: str) -> str:
        """The checkpoint's name of a parameter; the given name when neither form is there."""
        if name in self._source:
            return name
        if self._prefix and name.startswith(self._prefix) and name.removeprefix(self._prefix) in self._source:
            return name.removeprefix(self._prefix)
        return name


def block_count(source: Source, spec: ModelSpec) -> int:
    """Number of decoder blocks in the checkpoint. Raises UserError when there are none."""
    tail = spec.blocks.split(".", 1)[-1]
    pattern = re.compile(rf"^(?:{re.escape(spec.blocks)}|{re.escape(tail)})\.(\d+)\.")
    found = [int(m[1]) for name in source.tensors if (m := pattern.match(name))]
    if not found:
        raise UserError(
            f"{source.folder} has no tensors under {spec.blocks!r}; the checkpoint does not fit its config"
        )
    return max(found) + 1


def fit_group(scheme: Scheme, columns: int, fit: str) -> tuple[Scheme, str]:
    """The scheme a width can have, and the reason when it is not the one asked for."""
    if scheme.group == 0 or columns % scheme.group == 0:
        return scheme, ""
    if fit == "ragged":
        last = columns % scheme.group
        return scheme, f"last group has {last} columns (ragged, as asked)"
    for group in FITTING_GROUPS:
        if group < scheme.group and columns % group == 0:
            return scheme.with_(
                group=group
            ), f"group {group}: {scheme.group} does not divide {columns} columns"
    return scheme.with_(group=0), f"one scale per row: no group of {FITTING_GROUPS} divides {columns} columns"


def make_plan(source: Source, spec: ModelSpec, recipe: Recipe) -> Plan:
    """Decide everything from the config and the tensor headers. Raises UserError for what cannot be."""
    refuse_quantized(source)
    fmt = plugins.load("formats", recipe.export.format)
    if hasattr(fmt, "write"):
        raise UserError(
            f"{recipe.export.format} is a whole-file format; quantize to compressed-tensors first, then run "
            f"`quantkit export FOLDER --format {recipe.export.format}`"
        )
    names = Names(source, spec)
    layers, warnings = _layers(source, spec, recipe, fmt, names)
    chosen = {p.module: p for p in layers if p.scheme is not None}
    if not chosen:
        raise UserError(
            "the recipe quantizes nothing: every rule keeps the original weights or matches no module"
        )
    if not source.config.get("tie_word_embeddings", False) and f"{spec.head}.weight" not in source:
        warnings.append(f"the checkpoint has no {spec.head}.weight although its embeddings are not tied")

    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    weight_of = {names.tensor(f"{m}.weight"): m for m in chosen}
    carried = []
    for name, info in source.tensors.items():
        if name in weight_of:
            p = chosen[weight_of[name]]
            module = name.removesuffix(".weight")
            layout.update(fmt.layout(module, p.rows, p.columns, p.scheme))
        else:
            layout[name] = (info.dtype, info.shape)
            carried.append(name)
    order = column_order(recipe)
    quantized = {names.tensor(f"{m}.weight").removesuffix(".weight"): p.scheme for m, p in chosen.items()}
    kept = [p.module for p in layers if p.scheme is None]
    config = fmt.config(quantized, kept, order=order)
    output = layout_bytes(layout)
    work = sum(nbytes_of(*layout[n]) for n in layout if n not in carried)
    return Plan(
        recipe=recipe,
        format=recipe.export.format,
        layers=layers,
        carried=carried,
        layout=layout,
        quantization_config=config,
        output_bytes=output,
        source_bytes=source.nbytes,
        peak_bytes=peak_bytes(source, spec, recipe, layers),
        disk_bytes=output + work + max(0, hidden_bytes(source, recipe) - HIDDEN_IN_MEMORY) * 2,
        warnings=warnings,
    )


def refuse_quantized(source: Source) -> None:
    if "quantization_config" in source.config:
        method = source.config["quantization_config"].get("quant_method", "?")
        raise UserError(
            f"{source.folder} is already quantized ({method}); quantize the original model, or use "
            "`quantkit export` to change its format"
        )


def _layers(
    source: Source, spec: ModelSpec, recipe: Recipe, fmt: ModuleType, names: Names
) -> tuple[list[LayerPlan], list[str]]:
    layers: list[LayerPlan] = []
    warnings: list[str] = []
    used: set[int] = set()
    for block in range(block_count(source, spec)):
        for linear in (name for group in spec.groups for name in group):
            module = f"{spec.blocks}.{block}.{linear}"
            info = source.tensors.get(names.tensor(f"{module}.weight"))
            if info is None:
                continue  # blocks of a mixed model differ; what a block lacks is checked against the skeleton
            rows, columns = (info.shape[1], info.shape[0]) if spec.transposed else info.shape
            index = next((i for i, r in enumerate(recipe.rules) if r.matches(module)), None)
            if index is None:
                layers.append(LayerPlan(module, block, rows, columns, None, Rule(), "no rule matches: kept"))
                continue
            used.add(index)
            layers.append(_layer(module, block, rows, columns, recipe.rules[index], index, fmt))
    for i, rule in enumerate(recipe.rules):
        if i not in used:
            example = layers[0].module if layers else "none"
            raise UserError(
                f"rule {i + 1} ({rule.match!r}) matches no linear of this model; names look like {example!r}"
            )
    notes: dict[str, int] = {}
    for p in layers:
        if p.scheme is not None and "does not divide" in p.reason:
            notes[p.reason.split("; ", 1)[-1]] = notes.get(p.reason.split("; ", 1)[-1], 0) + 1
    warnings += [f"{count} modules get {note}" for note, count in notes.items()]
    if spec.unquantized:
        warnings.append(f"left in the original precision by architecture: {', '.join(spec.unquantized)}")
    return layers, warnings


def _layer(
    module: str, block: int, rows: int, columns: int, rule: Rule, index: int, fmt: ModuleType
) -> LayerPlan:
    said = f"rule {index + 1} ({rule.match})"
    if rule.weights is None:
        return LayerPlan(module, block, rows, columns, None, rule, f"{said}: kept as it is")
    try:
        scheme, why = fit_group(rule.weights.scheme(), columns, rule.weights.fit)
    except SchemeError as e:
        raise UserError(f"{module}: {e}") from e
    refusal = fmt.why_not(scheme, rows, columns)
    if refusal:
        raise UserError(
            f"{module} ({rows}x{columns}): format {fmt.NAME} cannot hold {scheme}: {refusal}. "
            "Change the scheme, choose another --format, or add a rule that keeps this module"
        )
    return LayerPlan(module, block, rows, columns, scheme, rule, f"{said}; {why}" if why else said)


def column_order(recipe: Recipe) -> str | None:
    """How the solvers order columns: None, "static" or "dynamic" (then files need a group index)."""
    orders = {getattr(make_solver(r), "act_order", None) for r in recipe.rules if r.weights is not None}
    orders -= {None, "none"}
    if "dynamic" in orders:
        return "dynamic"
    return "static" if orders else None


def layout_bytes(layout: Layout, shard_limit: int = 5_000_000_000) -> int:
    """Exact bytes of the safetensors files that hold this layout, headers included."""
    total = 0
    for part in shard(layout, shard_limit):
        head, _ = header_bytes(part, {"format": "pt"})
        total += len(head) + sum(nbytes_of(*v) for v in part.values())
    return total


def hidden_size(config: Mapping[str, Any]) -> int:
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def hidden_bytes(source: Source, recipe: Recipe) -> int:
    """float32 hidden states of the calibration data; two streams when a solver corrects upstream error."""
    if not recipe.needs_data:
        return 0
    streams = 1 + any("cross" in make_solver(r).needs for r in recipe.rules if r.weights is not None)
    return recipe.calib.samples * recipe.calib.seq_len * hidden_size(source.config) * 4 * streams


def peak_bytes(source: Source, spec: ModelSpec, recipe: Recipe, layers: list[LayerPlan]) -> int:
    """Peak above the interpreter: one block in float32 with its stored copy, hidden states, one batch of
    activations, and the largest solve (Hessian, its factors in float64, and the group's work copies)."""
    by_block: dict[int, int] = {}
    for p in layers:
        by_block[p.block] = by_block.get(p.block, 0) + p.rows * p.columns
    block = max(by_block.values()) * (4 + source.dtype.itemsize)
    if not recipe.needs_data:
        return block + max(p.rows * p.columns for p in layers) * 24
    hidden = min(hidden_bytes(source, recipe), HIDDEN_IN_MEMORY)
    widest = max(p.columns for p in layers)
    stacked = max(p.rows * p.columns for p in layers) * 3
    solve = widest * widest * (4 + 4 + 8 + 8) + stacked * 4 * 4
    batch = (
        batch_tokens(recipe, layers) * (2 * max(p.rows for p in layers) + 6 * hidden_size(source.config)) * 4
    )
    streams = 2 if any("cross" in make_solver(r).needs for r in recipe.rules if r.weights is not None) else 1
    return block * streams + hidden + max(solve, batch * streams)


def batch_tokens(recipe: Recipe, layers: list[LayerPlan]) -> int:
    """Tokens run through a block at once: enough to keep the processor busy, few enough to stay small (the widest
    activation of a batch is at most 25 MB, several of them are alive)."""
    widest = max(max(p.rows, p.columns) for p in layers)
    tokens = min(4096, max(1, 6_300_000 // widest))
    return max(1, tokens // recipe.calib.seq_len) * recipe.calib.seq_len


def describe_rewrites(recipe: Recipe) -> list[str]:
    return [f"{r.name} {make_rewrite(r)}" for r in recipe.rewrites]
