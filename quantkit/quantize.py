"""The main job: model in, verified quantized folder out."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantkit
from quantkit import plugins
from quantkit.checkpoint import MANIFEST, FolderWriter, Source, folder_hashes, same_bytes, write_json
from quantkit.errors import UserError, VerificationError
from quantkit.heap import give_back
from quantkit.load import load_config, load_tokenizer
from quantkit.model_card import write_card
from quantkit.modelspec import ModelSpec, spec_for
from quantkit.pipeline import Progress, Timings, run
from quantkit.plan import Names, Plan, make_plan
from quantkit.recipe import Recipe
from quantkit.resolve import resolve_model
from quantkit.runtime_rules import lint
from quantkit.sizes import show_size
from quantkit.skeleton import build_skeleton
from quantkit.workdir import ModuleReport, WorkFolder


@dataclass(slots=True)
class Job:
    """A quantization that has been checked and planned but not begun."""

    name: str
    source: Source
    spec: ModelSpec
    plan: Plan
    model: Any
    trust_remote_code: bool = False


@dataclass(slots=True)
class Outcome:
    """folder: the finished output. reports: one per module. seconds: wall clock by stage."""

    folder: Path
    plan: Plan
    reports: list[ModuleReport]
    seconds: dict[str, float]
    audit: dict[str, Any] | None


def prepare(model: str, recipe: Recipe, trust_remote_code: bool = False) -> Job:
    """Resolve, open, check and plan; no weight is read. Raises UserError."""
    source = Source(resolve_model(model))
    if not trust_remote_code and "auto_map" in source.config:
        raise UserError(
            f"{model} brings its own Python code; read it, then allow it with --trust-remote-code"
        )
    config = load_config(source, trust_remote_code)
    skeleton = build_skeleton(config, trust_remote_code=trust_remote_code)
    spec = spec_for(config, skeleton)
    job = Job(model, source, spec, make_plan(source, spec, recipe), skeleton, trust_remote_code)
    if recipe.export.runtime:
        job.plan.warnings += refusals(job, recipe.export.runtime)
    return job


def refusals(job: Job, runtime: str, tp: int = 1) -> list[str]:
    """Sentences why ``runtime`` on ``tp`` ranks would refuse the planned output; see runtime_rules.lint."""
    modules = {p.module: (p.scheme, (p.rows, p.columns)) for p in job.plan.layers}
    return lint(runtime, job.plan.format, modules, job.spec.fused, tp)


def check_output(out: Path, overwrite: bool, need: int) -> None:
    """Refuse an existing folder, an unwritable place or a disk without room, before any work."""
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another folder with -o, or replace it with --overwrite")
    if out.is_file():
        raise UserError(f"{out} is a file; choose a folder with -o")
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        probe = parent / f".quantkit-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UserError(f"cannot write in {parent}: {e.strerror}; choose another folder with -o") from e
    free = shutil.disk_usage(parent).free
    if free < need:
        raise UserError(
            f"{parent} has {show_size(free)} free and this run needs {show_size(need)}; free some space or choose "
            "another disk with -o"
        )


def calibration(job: Job):
    """The recipe's calibration windows and their audit, or None when nothing needs data. Raises UserError."""
    from quantkit.calib import CalibOptions, load_calibration

    recipe = job.plan.recipe
    if not recipe.needs_data:
        return None
    spec = recipe.calib
    limit = job.source.config.get("max_position_embeddings") or job.source.config.get("n_positions")
    if limit and spec.seq_len > limit:
        raise UserError(f"--seq-len {spec.seq_len} is longer than the model's context of {limit} tokens")
    tokenizer = load_tokenizer(job.source.folder, job.trust_remote_code)
    sampler = _sampler(job, tokenizer) if spec.source == "self" else None
    vocabulary = int(job.source.config.get("vocab_size", 0))
    options = CalibOptions(vocab_size=vocabulary)
    return load_calibration(spec.source, tokenizer, spec.samples, spec.seq_len, spec.seed, sampler, options)


def _sampler(job: Job, tokenizer: Any):
    """Draws calibration text from the original model itself, which is whole in memory meanwhile."""
    from quantkit.calib import sampler_for
    from quantkit.load import load

    model = load(job.source.folder, torch.float32, trust_remote_code=job.trust_remote_code)
    return sampler_for(model, tokenizer)


def fingerprint(job: Job, content_hash: str, ids_hash: str) -> dict[str, str]:
    """What makes two runs the same run."""
    import transformers

    return {
        "model": content_hash,
        "recipe": job.plan.recipe.digest(),
        "calibration data": ids_hash,
        "quantkit": quantkit.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


def quantize(
    model: str,
    out: str | Path,
    recipe: Recipe,
    *,
    overwrite: bool = False,
    restart: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
    on_audit: Callable[[Any], None] = lambda _: None,
) -> Outcome:
    """Quantize ``model`` into the new folder ``out`` and verify what was written.

    model: Hugging Face folder, hub id or .gguf file. progress and tell: where the walk and single sentences are
    reported. Raises UserError for everything a user can mend, VerificationError when the written folder does not
    hold what was solved (it is then kept under its staging name).
    """
    job = prepare(model, recipe, trust_remote_code)
    return execute(
        job, Path(out), overwrite=overwrite, restart=restart, progress=progress, tell=tell, on_audit=on_audit
    )


def execute(
    job: Job,
    out: Path,
    *,
    overwrite: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
    on_audit: Callable[[Any], None] = lambda _: None,
) -> Outcome:
    """Carry out a prepared job; see :func:`quantize`."""
    plan, timings = job.plan, Timings()
    check_output(out, overwrite, plan.disk_bytes)
    with timings.stage("data"):
        calib = calibration(job)
    give_back()  # a tokenizer of a large vocabulary leaves 100 MB behind
    if calib is not None:
        on_audit(calib.audit)
    with timings.stage("scan"):
        tell("reading all weights once: checking for NaN and infinity")
        content_hash = job.source.scan()
    audit = None if calib is None else calib.audit.as_dict()
    marks = fingerprint(job, content_hash, audit["sha256"] if audit else "none")
    work = WorkFolder(out.with_name(out.name + ".work"), marks, resume=not restart)
    if done := work.finished():
        tell(f"resuming: {done} blocks of an earlier run are finished")
    run(job.model, job.spec, job.source, plan, None if calib is None else calib.ids, work, progress, timings)
    if plan.recipe.tune is not None and calib is not None:
        with timings.stage("tune"):
            _tune(job, work, calib.ids, tell)
    staging = out.with_name(out.name + ".staging")
    with timings.stage("write"):
        reports = assemble(job, work, staging, marks, audit)
    with timings.stage("verify"):
        verify_against_work(job, work, staging)
    if out.exists():
        shutil.rmtree(out)
    staging.rename(out)
    work.clear()
    return Outcome(out, plan, reports, timings.seconds, audit)


def _tune(job: Job, work: WorkFolder, ids: Tensor, tell: Callable[[str], None]) -> None:
    from quantkit.tune import TuneOptions
    from quantkit.tune_model import tune_work

    assert job.plan.recipe.tune is not None
    options = TuneOptions(seed=job.plan.recipe.calib.seed, **job.plan.recipe.tune.model_dump())
    config = load_config(job.source, job.trust_remote_code)
    report = tune_work(job.source, job.spec, config, work, ids, options, tell, job.trust_remote_code)
    if report is not None:
        said = "kept" if report.accepted else "not better on held-out windows: dropped"
        tell(f"tuning: KL {report.before:.4f} -> {report.after:.4f} on held-out windows, {said}")


def assemble(
    job: Job, work: WorkFolder, staging: Path, marks: Mapping[str, str], audit: dict | None
) -> list[ModuleReport]:
    """Write the output folder from the finished blocks and the source; returns the module reports."""
    plan, source, names = job.plan, job.source, Names(job.source, job.spec)
    fmt = plugins.load("formats", plan.format)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    reports: list[ModuleReport] = []
    notes: list[str] = []
    changed: set[str] = set()
    with FolderWriter(staging, plan.layout) as writer:
        for block in range(work.finished()):
            result = work.load(block)
            for module, weight in result.weights.items():
                stored = names.tensor(f"{module}.weight").removesuffix(".weight")
                for name, tensor in fmt.pack(stored, weight, plan.quantization_config).items():
                    writer.write(name, tensor)
            for name, value in result.floats.items():
                stored = names.tensor(name)
                writer.write(stored, value)
                changed.add(stored)
            reports += result.reports
            notes += result.notes
        for name in plan.carried:
            if name not in changed:
                writer.copy(name, source.tensors[name])
    for file in source.side_files():
        shutil.copyfile(file, staging / file.name)
    for name, content in fmt.side_files(plan.quantization_config).items():
        (staging / name).write_bytes(content)
    config = {**source.config, "quantization_config": plan.quantization_config}
    write_json(staging / "config.json", config)
    write_json(staging / MANIFEST, manifest(job, marks, audit, reports, notes, work.tuned(), staging))
    write_card(staging)
    return reports


def manifest(
    job: Job,
    marks: Mapping[str, str],
    audit: dict | None,
    reports: list[ModuleReport],
    notes: list[str],
    tuning: dict | None,
    folder: Path,
) -> dict[str, Any]:
    """quantkit.json: enough to know and to repeat what was done. Holds no time and no path, so that the same run
    gives the same bytes."""
    plan = job.plan
    return {
        "quantkit": quantkit.__version__,
        "base_model": Path(job.name).name if Path(job.name).exists() else job.name,
        "fingerprint": dict(marks),
        "recipe": plan.recipe.model_dump(mode="json"),
        "format": plan.format,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "bytes": plan.output_bytes,
        "plan": [
            {
                "module": p.module,
                "shape": [p.rows, p.columns],
                "scheme": None if p.scheme is None else asdict(p.scheme),
                "solver": p.rule.solver if p.scheme is not None else None,
                "reason": p.reason,
            }
            for p in plan.layers
        ],
        "calibration": audit,
        "modules": [asdict(r) for r in reports],
        "notes": notes,
        "tuning": tuning,
        "warnings": plan.warnings,
        **folder_hashes(folder),
    }


def verify_against_work(job: Job, work: WorkFolder, folder: Path) -> None:
    """Re-open the written folder, unpack every module and compare it with what was solved.

    Raises VerificationError naming the module and the difference.
    """
    fmt = plugins.load("formats", job.plan.format)
    written, names = Source(folder), Names(job.source, job.spec)
    config = written.config["quantization_config"]
    seen: set[str] = set()
    for block in range(work.finished()):
        result = work.load(block)
        for module, solved in result.weights.items():
            stored = names.tensor(f"{module}.weight").removesuffix(".weight")
            parts = {stored + s: written.tensor(stored + s) for s in fmt.suffixes if stored + s in written}
            difference = solved.same_as(fmt.unpack(stored, parts, config, solved.shape))
            if difference:
                raise VerificationError(
                    f"{module} was not written as it was solved: {difference}; kept in {folder}"
                )
            seen.update(parts)
        for name, value in result.floats.items():
            if not torch.equal(written.tensor(names.tensor(name)), value):
                raise VerificationError(f"{name} was not written as it was solved; kept in {folder}")
            seen.add(names.tensor(name))
    for name in job.plan.carried:
        if name in seen:
            continue
        if name not in written or not same_bytes(written.tensors[name], job.source.tensors[name]):
            raise VerificationError(f"{name} differs from the original model's; kept in {folder}")
        seen.add(name)
    if stray := sorted(set(written.tensors) - seen):
        raise VerificationError(
            f"{len(stray)} tensors were written that no plan names: {stray[:3]}; kept in {folder}"
        )
