"""Mends other people's checkpoints: explains each finding and its remedy, and writes only when told to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit import checks
from quantkit.checkpoint import MANIFEST, FolderWriter, Source, folder_hashes, read_manifest, write_json
from quantkit.checks import Finding, Model
from quantkit.errors import UserError
from quantkit.formats import compressed_tensors, gptq
from quantkit.formats._common import names_pattern, with_fused
from quantkit.load import format_of, quantized_modules
from quantkit.qweight import QuantWeight


@dataclass(frozen=True, slots=True)
class Remedy:
    """finding: what is wrong. text: what would be done, "" when nothing can be. config: changes config.json
    in place; copies: file name -> where it is taken from; nibbles: tensors whose bytes' halves are
    exchanged."""

    finding: Finding
    text: str
    config: Callable[[dict[str, Any]], None] | None = None
    copies: Mapping[str, Path] = field(default_factory=dict)
    nibbles: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        return bool(self.text)


def diagnose(folder: Path, against: Path | None = None, trust_remote_code: bool = False) -> list[Remedy]:
    """Every finding with its remedy. against: the base model, source of missing files and of the right
    weights."""
    base = None if against is None else Source(against)
    findings = checks.check(folder, trust_remote_code)
    if base is not None:
        findings += _compared(folder, base, findings)
    return [_remedy(f, folder, base) for f in findings]


def repair(
    folder: Path, remedies: list[Remedy], out: Path, *, in_place: bool = False, overwrite: bool = False
) -> list[Finding]:
    """Carry out the possible remedies into the new folder ``out`` and check the result; returns what is still
    wrong.

    in_place: ``out`` is ``folder`` itself, replaced only once the mended copy is complete. Raises UserError.
    """
    if out.exists() and not (in_place or overwrite):
        raise UserError(f"{out} exists; choose another folder with -o")
    if out.resolve() == folder.resolve() and not in_place:
        raise UserError(f"{out} is the folder itself; choose another with -o, or allow it with --in-place")
    staging = out.with_name(f".{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    nibbles = {name for r in remedies for name in r.nibbles}
    shutil.copytree(folder, staging, ignore=shutil.ignore_patterns("*.safetensors*") if nibbles else None)
    try:
        if nibbles:
            _rewrite(Source(folder), staging, nibbles)
        config = json.loads((staging / "config.json").read_text(encoding="utf-8"))
        for remedy in remedies:
            if remedy.config is not None:
                remedy.config(config)
            for name, origin in remedy.copies.items():
                shutil.copyfile(origin, staging / name)
        write_json(staging / "config.json", config)
        if (quantization := config.get("quantization_config")) and (
            staging / "quantize_config.json"
        ).is_file():
            write_json(staging / "quantize_config.json", quantization)
        if manifest := read_manifest(staging):
            write_json(staging / MANIFEST, {**manifest, **folder_hashes(staging)})
        left = checks.check(staging)
        if out.exists():
            aside = out.with_name(f".{out.name}.old-{os.getpid()}")
            out.rename(aside)
            staging.rename(out)
            shutil.rmtree(aside)
        else:
            staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return left


def _rewrite(source: Source, folder: Path, nibbles: set[str]) -> None:
    with FolderWriter(folder, {n: (i.dtype, i.shape) for n, i in source.tensors.items()}) as writer:
        for name in source.tensors:
            tensor = source.tensor(name)
            writer.write(name, checks.swap_nibbles(tensor) if name in nibbles else tensor)


# ------------------------------------------------------------------------------------ against the base


def _compared(folder: Path, base: Source, known: list[Finding]) -> list[Finding]:
    """What only the base model can tell: files and template that it has, nibbles and zero points that fit
    it."""
    try:
        source = Source(folder)
        fmt = format_of(source.config)
    except UserError:
        return []
    named = {f.facts.get("file") for f in known}
    out = [
        Finding("side-files", f"{file.name} is in {base.folder.name} and not here", facts={"file": file.name})
        for file in base.side_files()
        if not (folder / file.name).exists() and file.name not in named and file.name != "chat_template.jinja"
    ]
    codes = {f.code for f in known}
    if fmt is not None and not codes & {"zero-points", "nibbles", "group-size", "weights", "files"}:
        out += _fits_better(source, fmt, base)
    return out


def _fits_better(source: Source, fmt: Any, base: Source) -> list[Finding]:
    """Other readings of a few modules, by their distance to the base model's weights."""
    modules = quantized_modules(source, fmt)
    quantization = source.config["quantization_config"]
    readings: dict[str, tuple[dict[str, Any], bool]] = {
        "as it is": (quantization, False),
        "nibbles": (quantization, True),
    }
    said = other = ""
    if fmt is gptq and quantization.get("quant_method") == "gptq":
        said = quantization.get("checkpoint_format") or quantization.get("format") or gptq.V1
        other = gptq.V1 if said == gptq.V2 else gptq.V2
        readings["zero-points"] = ({**quantization, "checkpoint_format": other, "format": other}, False)
    distance, base_names = dict.fromkeys(readings, 0.0), Model(base.folder).names
    compared = 0
    for module in list(modules)[:: max(1, len(modules) // 6)]:
        name = base_names.tensor(f"{module}.weight")
        if name not in base:
            continue
        original = base.tensor(name).float()
        compared += 1
        for label, (config, swapped) in readings.items():
            parts = {n: source.tensor(n) for n in modules[module]}
            if swapped:
                parts = {n: checks.swap_nibbles(t) if _packed_codes(n) else t for n, t in parts.items()}
            try:
                value = fmt.unpack(module, parts, config)
            except UserError:
                distance[label] += 1.0
                continue
            if isinstance(value, QuantWeight) and value.shape == tuple(original.shape):
                distance[label] += float((value.dequantize() - original).norm() / original.norm())
    if not compared:
        return []
    best = min(distance, key=lambda k: distance[k])
    if best == "as it is" or distance[best] > 0.7 * distance["as it is"]:
        return []
    mean = {k: v / compared for k, v in distance.items()}
    if best == "nibbles":
        names = tuple(n for m in modules.values() for n in m if _packed_codes(n))
        return [
            Finding(
                "nibbles",
                "with the nibbles of every byte exchanged the weights are "
                f"{mean[best]:.3f} from the base, as they are "
                f"{mean['as it is']:.3f} (relative distance)",
                facts={"tensors": names},
            )
        ]
    return [
        Finding(
            "zero-points",
            f"read as checkpoint_format {other!r} the weights are {mean[best]:.3f} "
            f"from the base, as {said!r} "
            f"{mean['as it is']:.3f} (relative "
            "distance)",
            facts={"said": said, "right": other},
        )
    ]


def _packed_codes(name: str) -> bool:
    return name.endswith((".qweight", ".weight_packed"))


# -------------------------------------------------------------------------------------------- remedies


def _remedy(finding: Finding, folder: Path, base: Source | None) -> Remedy:
    maker = _REMEDIES.get(finding.code)
    return Remedy(finding, "") if maker is None else maker(finding, folder, base)


def _zero_points(f: Finding, folder: Path, base: Source | None) -> Remedy:
    right = f.facts.get("right")
    if right is None:
        return Remedy(f, "")

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"].update(checkpoint_format=right, format=right)

    return Remedy(f, f"write checkpoint_format {right!r} into the configuration; no weight changes", change)


def _group_size(f: Finding, folder: Path, base: Source | None) -> Remedy:
    held, modules = f.facts["held"], list(f.facts["modules"])
    source = Source(folder)
    fmt = format_of(source.config)
    assert fmt is not None
    everything = len(modules) == len(quantized_modules(source, fmt))
    if not everything and fmt is not gptq:
        return Remedy(f, "")

    def change(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        if fmt is compressed_tensors:
            for group in quantization["config_groups"].values():
                group["weights"].update(group_size=held or None, strategy="group" if held else "channel")
        elif everything:
            quantization["group_size"] = held or -1
        else:
            pattern = "+:" + names_pattern(with_fused(modules))
            quantization["dynamic"] = {
                pattern: {"group_size": held or -1},
                **(quantization.get("dynamic") or {}),
            }

    return Remedy(f, f"write group size {held or -1} into the configuration; no weight changes", change)


def _tie_flag(f: Finding, folder: Path, base: Source | None) -> Remedy:
    right = f.facts["right"]
    return Remedy(
        f,
        f"write tie_word_embeddings: {str(right).lower()}",
        lambda config: config.update(tie_word_embeddings=right),
    )


def _ignore_list(f: Finding, folder: Path, base: Source | None) -> Remedy:
    absent, quantized = list(f.facts["modules"]), list(f.facts["quantized"])
    fmt = format_of(Source(folder).config)

    def change(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        if fmt is compressed_tensors:
            quantization["ignore"] = [*(quantization.get("ignore") or []), *absent]
        elif fmt is gptq:
            pattern = "-:" + names_pattern(with_fused(absent))
            quantization["dynamic"] = {pattern: {}, **(quantization.get("dynamic") or {})}
            quantization["modules_in_block_to_quantize"] = [
                [m] for m in quantized if not m.endswith("lm_head")
            ]
        else:
            quantization["modules_to_not_convert"] = [
                *(quantization.get("modules_to_not_convert") or []),
                *absent,
            ]

    key = {compressed_tensors.NAME: "ignore", gptq.NAME: "dynamic and modules_in_block_to_quantize"}.get(
        fmt.NAME if fmt else "", "modules_to_not_convert"
    )
    return Remedy(f, f"add {len(absent)} modules to {key}", change)


def _side_files(f: Finding, folder: Path, base: Source | None) -> Remedy:
    name = f.facts.get("file")
    if name is None or base is None:
        return Remedy(f, "")
    if (base.folder / name).is_file():
        return Remedy(f, f"copy {name} from {base.folder.name}", copies={name: base.folder / name})
    return Remedy(f, "")


def _chat_template(f: Finding, folder: Path, base: Source | None) -> Remedy:
    if base is None:
        return Remedy(f, "")
    name = (
        "chat_template.jinja" if (base.folder / "chat_template.jinja").is_file() else "tokenizer_config.json"
    )
    if checks.chat_template(base.folder) is None:
        return Remedy(f, "")
    return Remedy(
        f, f"copy the chat template ({name}) from {base.folder.name}", copies={name: base.folder / name}
    )


def _nibbles(f: Finding, folder: Path, base: Source | None) -> Remedy:
    names = tuple(f.facts.get("tensors") or (f.facts["tensor"],))
    return Remedy(f, f"exchange the nibbles of {len(names)} tensors ({names[0]})", nibbles=names)


_REMEDIES: dict[str, Callable[[Finding, Path, Source | None], Remedy]] = {
    "zero-points": _zero_points,
    "group-size": _group_size,
    "tie-flag": _tie_flag,
    "ignore-list": _ignore_list,
    "side-files": _side_files,
    "chat-template": _chat_template,
    "nibbles": _nibbles,
}
