"""From one checkpoint format to another without new rounding, or a refusal that says what would be lost.

Two passes, one tensor in memory at a time: the first finds the scheme each weight has in the target, the
second writes. What was written is read back and compared before the staged output is renamed into its place.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import quantkit
from quantkit import plugins
from quantkit.checkpoint import (
    MANIFEST,
    FolderWriter,
    Layout,
    Source,
    file_hash,
    folder_hashes,
    read_manifest,
    write_json,
)
from quantkit.errors import UserError, VerificationError
from quantkit.formats import CannotStore
from quantkit.formats._common import is_ordered
from quantkit.model_card import write_card
from quantkit.opened import UNQUANTIZED, Opened, open_any
from quantkit.plan import layout_bytes
from quantkit.quantize import check_output
from quantkit.qweight import QuantWeight
from quantkit.regroup import cast_scale, difference, split_groups, with_scale_dtype
from quantkit.scheme import Scheme
from quantkit.sizes import show_size

TARGETS = ("compressed-tensors", "gptq", "awq", "gguf")
SPLITS = (128, 64, 32, 16, 8)
# Tensors of two dimensions that are no linear: token and position embeddings.
EMBEDDINGS = ("embed", ".wte", ".wpe", "wte.", "wpe.")


@dataclass(frozen=True, slots=True)
class Fit:
    """A weight's scheme in the target. scale_error: largest absolute error of casting its scales; steps:
    largest error of the target's own arithmetic as a fraction of a quantization step. Both 0.0 when exact."""

    shape: tuple[int, int]
    scheme: Scheme
    scale_error: float
    steps: float


@dataclass(frozen=True, slots=True)
class Exported:
    """out: what was written. notes: what a user should know. rounding: largest error, in words; "" when
    exact."""

    out: Path
    modules: int
    nbytes: int
    rounding: str
    notes: list[str]


def export(
    source: str | Path,
    format_name: str,
    out: str | Path,
    *,
    overwrite: bool = False,
    allow_rounding: bool = False,
    keep_floats: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write ``source`` (folder or .gguf) in another format as the new ``out`` (a .gguf file for gguf).

    allow_rounding: accept what the target rounds (scales to float16, Q4_1's offset), and its size is
    reported. keep_floats: store weights that are no integer grid (llama.cpp's K-quants, NF4) as floats
    instead of refusing. Raises UserError for what cannot be converted exactly, VerificationError when the
    output reads back otherwise.
    """
    opened, out = open_any(source), Path(out)
    _check_request(opened, format_name, out)
    fmt = plugins.load("formats", format_name)
    survey = _Survey(opened, fmt, allow_rounding, keep_floats)
    tell(
        f"{len(survey.fits)} quantized weights, all of them "
        f"{'exact' if not survey.rounding else 'stored with ' + survey.rounding}"
    )
    if out.is_file() and overwrite and format_name == "gguf":
        check_output(out.with_name(f".{out.name}.new"), False, survey.nbytes)
    else:
        check_output(out, overwrite, survey.nbytes)
    staging = out.with_name(f".{out.name}.staging{out.suffix}")
    _remove(staging)
    try:
        if format_name == "gguf":
            _write_gguf(opened, survey, fmt, staging)
        else:
            _write_folder(opened, survey, fmt, staging)
        tell("reading back what was written")
        compare(opened, survey, staging)
        _remove(out)
        staging.rename(out)
    finally:
        _remove(staging)
    return Exported(out, len(survey.fits), survey.nbytes, survey.rounding, survey.notes)


def _check_request(opened: Opened, format_name: str, out: Path) -> None:
    if format_name not in TARGETS:
        raise UserError(f"cannot export to {format_name!r}: {plugins.suggest(format_name, list(TARGETS))}")
    if opened.format == UNQUANTIZED and format_name != "gguf":
        raise UserError(
            f"{opened.path} is not quantized; use `quantkit quantize {opened.path.name} --format "
            f"{format_name}`"
        )
    if opened.format == format_name:
        raise UserError(f"{opened.path} already is {format_name}; nothing to convert")
    if (format_name == "gguf") != (out.suffix == ".gguf"):
        raise UserError(
            f"{out} cannot hold {format_name}; "
            + ("give a file name ending in .gguf" if format_name == "gguf" else "give a folder's name")
        )


class _Survey:
    """The first pass: what each tensor becomes. Raises UserError when anything would be lost."""

    def __init__(self, opened: Opened, fmt: ModuleType, allow_rounding: bool, keep_floats: bool) -> None:
        self.fits: dict[str, Fit] = {}
        self.floats: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.notes: list[str] = []
        self.ordered = False
        self._opened, self._fmt = opened, fmt
        self.dtype = getattr(
            torch, str(opened.config.get("dtype") or opened.config.get("torch_dtype") or "bfloat16")
        )
        refused: list[tuple[str, str]] = []
        grids_lost: list[str] = []
        wide: list[str] = []
        for name, value in opened.items():
            if isinstance(value, QuantWeight):
                try:
                    self.fits[name] = self._fit(name, value)
                except CannotStore as e:
                    refused.append((name, str(e).removeprefix(f"{name}: ")))
                continue
            if value.dim() == 2 and self._was_quantized(name, value) and not _is_embedding(name):
                grids_lost.append(name)
            self.floats[name] = (self._float_dtype(value, allow_rounding), tuple(value.shape))
            if self.floats[name][0] == torch.float32 and value.dim() == 2:
                wide.append(name)
        if refused:
            name, reason = refused[0]
            raise UserError(
                f"{fmt.NAME} cannot hold {len(refused)} of {len(refused) + len(self.fits)} weights of "
                f"{opened.path.name}, "
                f"first {name}: {reason}"
            )
        if grids_lost and not keep_floats:
            kinds = sorted({opened.kinds.get(n, opened.format) for n in grids_lost})
            raise UserError(
                f"{len(grids_lost)} weights of {opened.path.name} ({', '.join(kinds)}; first "
                f"{grids_lost[0]}) lie on no grid "
                "of integer codes and zero points, so converting them would round anew; quantize the "
                "original model, or "
                "keep these as floats with --keep-floats"
            )
        if fmt.NAME == "awq":
            self._one_group()
        self.rounding = self._rounding(allow_rounding)
        if wide and opened.is_gguf:
            self.notes.append(f"{wide[0]} is stored in float32: its values are exact in no 16-bit type")
        self._check_compute_dtype()
        self.layout, self.quantization = self._plan()
        self.nbytes = layout_bytes(self.layout)

    def _fit(self, name: str, weight: QuantWeight) -> Fit:
        """Raises CannotStore."""
        fmt = self._fmt
        if is_ordered(weight):
            if fmt.NAME != "gptq":
                raise CannotStore("its groups follow an act-order (g_idx), for which only gptq has a place")
            self.ordered = True
        dtype = _scale_dtype(fmt, weight)
        scheme = _split_scheme(fmt, weight.scheme.with_(scale_dtype=dtype), *weight.shape)
        scale, error = cast_scale(weight.scale, getattr(torch, dtype))
        if not math.isfinite(error):
            raise CannotStore(
                f"its largest scale {float(weight.scale.float().abs().max()):.4g} overflows {dtype}"
            )
        steps = 0.0
        if hasattr(fmt, "rounding") and fmt.rounding(scheme, weight.shape[1]) and weight.zero is not None:
            offset = weight.zero.double() * scale.double()
            rounded = offset.to(torch.float32).to(torch.float16).double()
            steps = float(((rounded - offset) / scale.double()).abs().nan_to_num().max())
        return Fit(weight.shape, scheme, error, steps)

    def _was_quantized(self, name: str, value: Tensor) -> bool:
        if self._opened.is_gguf:
            return self._opened.kinds.get(name, "F32") not in ("F32", "F16", "BF16")
        return self._opened.format == "bitsandbytes" and name.removesuffix(".weight") in self._bnb_modules()

    def _bnb_modules(self) -> set[str]:
        from quantkit.load import quantized_modules

        return set(quantized_modules(Source(self._opened.path), plugins.load("formats", self._opened.format)))

    def _float_dtype(self, value: Tensor, allow_rounding: bool) -> torch.dtype:
        """The stored dtype of a float tensor: folders keep theirs, GGUF's float32 shrinks where that is
        exact."""
        if not self._opened.is_gguf or value.dtype != torch.float32 or self._fmt.NAME == "gguf":
            return value.dtype
        exact = torch.equal(value.to(self.dtype).float(), value)
        return self.dtype if exact or allow_rounding else torch.float32

    def _one_group(self) -> None:
        """AWQ files state one group size for all weights: split to the largest that divides them all."""
        sizes = {f.scheme.group or f.shape[1] for f in self.fits.values()}
        if len({f.scheme.group for f in self.fits.values()}) > 1 and (common := math.gcd(*sizes)) >= 16:
            common = next((g for g in SPLITS if common % g == 0), 0)
            if common:
                self.fits = {
                    n: Fit(f.shape, f.scheme.with_(group=common), f.scale_error, f.steps)
                    for n, f in self.fits.items()
                }
                self.notes.append(
                    f"AWQ knows one group size, so all scales are repeated over groups of {common}"
                )

    def _rounding(self, allowed: bool) -> str:
        """The largest error in words, "" when exact. Raises UserError when there is one and it is not
        allowed."""
        worst_scale = max(self.fits, key=lambda n: self.fits[n].scale_error, default=None)
        worst_step = max(self.fits, key=lambda n: self.fits[n].steps, default=None)
        said = []
        if worst_scale and self.fits[worst_scale].scale_error:
            f = self.fits[worst_scale]
            count = sum(1 for x in self.fits.values() if x.scale_error)
            said.append(
                f"scales of {count} weights rounded to {f.scheme.scale_dtype}, largest error "
                f"{f.scale_error:.3g} in {worst_scale}"
            )
        if worst_step and self.fits[worst_step].steps:
            count = sum(1 for x in self.fits.values() if x.steps)
            said.append(
                f"Q4_1 offsets of {count} weights rounded to float16, largest error "
                f"{self.fits[worst_step].steps:.4f} "
                f"of a step in {worst_step}"
            )
        words = "; ".join(said)
        if words and not allowed:
            raise UserError(
                f"{self._fmt.NAME} cannot hold {self._opened.path.name} exactly: {words}; accept that with "
                "--allow-rounding"
            )
        return words

    def _check_compute_dtype(self) -> None:
        """Loaders cast scales to the model's dtype: float16 scales in a bfloat16 model would be rounded
        there."""
        if self._fmt.NAME != "compressed-tensors" or self.dtype != torch.bfloat16:
            return
        if self._opened.is_gguf or self._opened.format in ("gptq", "awq"):
            for name, value in self._opened.items():
                if isinstance(value, QuantWeight) and cast_scale(value.scale, torch.bfloat16)[1]:
                    self.dtype = torch.float16
                    self.notes.append(
                        f"config.json says dtype float16: the scales (first of {name}) are exact there and "
                        "not in bfloat16"
                    )
                    return

    def _plan(self) -> tuple[Layout, dict[str, Any]]:
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = dict(self.floats)
        if self._fmt.NAME == "gguf":
            for name, f in self.fits.items():
                layout[name] = (
                    torch.uint8,
                    (math.ceil(f.shape[0] * f.shape[1] * f.scheme.bits_per_weight(f.shape[1]) / 8),),
                )
            return layout, {}
        for name, f in self.fits.items():
            layout.update(self._fmt.layout(name, *f.shape, f.scheme))
        kept = [n.removesuffix(".weight") for n, (_, shape) in self.floats.items() if _is_linear(n, shape)]
        order = "dynamic" if self.ordered else None
        quantization = self._fmt.config({n: f.scheme for n, f in self.fits.items()}, kept, order=order)
        if kv := self._opened.quantization.get("kv_cache_scheme"):
            if self._fmt.NAME == "compressed-tensors":
                quantization["kv_cache_scheme"] = kv
            else:
                self.notes.append(
                    f"the KV-cache scheme of {self._opened.format} is left behind: {self._fmt.NAME} has no "
                    "place for it"
                )
        return layout, quantization

    def adapt(self, name: str, value: Tensor | QuantWeight) -> Tensor | QuantWeight:
        """A tensor or weight of the source as the target holds it."""
        if isinstance(value, Tensor):
            return value.to(self.floats[name][0])
        scheme = self.fits[name].scheme
        if scheme.group != value.scheme.group:
            value = split_groups(value, scheme.group)
        return with_scale_dtype(value, scheme.scale_dtype)


def _scale_dtype(fmt: ModuleType, weight: QuantWeight) -> str:
    """float16 where the format fixes it; compressed-tensors keeps 16-bit scales as they are."""
    if fmt.NAME != "compressed-tensors":
        return "float16"
    if weight.scheme.scale_dtype != "float32":
        return weight.scheme.scale_dtype
    return "bfloat16" if cast_scale(weight.scale, torch.bfloat16)[1] == 0 else "float16"


def _split_scheme(fmt: ModuleType, scheme: Scheme, rows: int, columns: int) -> Scheme:
    """The scheme itself, or with smaller groups when the target needs them. Raises CannotStore."""
    reason = fmt.why_not(scheme, rows, columns)
    if reason is None:
        return scheme
    if scheme.activation:
        raise CannotStore(reason)  # W8A8 has no groups
    old = scheme.group or columns
    for group in SPLITS:
        if group < old and old % group == 0 and columns % group == 0:
            finer = scheme.with_(group=group)
            if fmt.why_not(finer, rows, columns) is None:
                return finer
    raise CannotStore(reason)


def _is_embedding(name: str) -> bool:
    return any(part in name for part in EMBEDDINGS)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.endswith(".weight") and not _is_embedding(name)


# --------------------------------------------------------------------------------------------- writing


def _adapted(opened: Opened, survey: _Survey) -> Iterator[tuple[str, Tensor | QuantWeight]]:
    for name, value in opened.items():
        yield name, survey.adapt(name, value)


def _write_gguf(opened: Opened, survey: _Survey, fmt: ModuleType, out: Path) -> None:
    fmt.write(_adapted(opened, survey), opened.config, opened.path, out)


def _write_folder(opened: Opened, survey: _Survey, fmt: ModuleType, folder: Path) -> None:
    folder.mkdir(parents=True)
    with FolderWriter(folder, survey.layout) as writer:
        for name, value in _adapted(opened, survey):
            if isinstance(value, Tensor):
                writer.write(name, value)
                continue
            for tensor_name, tensor in fmt.pack(name, value, survey.quantization).items():
                writer.write(tensor_name, tensor)
    opened.write_side_files(folder)
    for name, content in fmt.side_files(survey.quantization).items():
        (folder / name).write_bytes(content)
    config = {**opened.config, "dtype": str(survey.dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    write_json(folder / "config.json", {**config, "quantization_config": survey.quantization})
    write_json(folder / MANIFEST, _manifest(opened, survey, fmt, folder))
    write_card(folder)


def _manifest(opened: Opened, survey: _Survey, fmt: ModuleType, folder: Path) -> dict[str, Any]:
    """As quantize writes it, with where the weights came from. Holds no time and no path."""
    old = {} if opened.is_gguf else (read_manifest(opened.path) or {})
    weights = sum(f.shape[0] * f.shape[1] for f in survey.fits.values())
    bits = sum(f.shape[0] * f.shape[1] * f.scheme.bits_per_weight(f.shape[1]) for f in survey.fits.values())
    files = [opened.path] if opened.is_gguf else Source(opened.path).files
    return {
        "quantkit": quantkit.__version__,
        "base_model": old.get("base_model"),
        "converted_from": {
            "name": opened.path.name,
            "format": opened.format,
            "sha256": {f.name: file_hash(f) for f in files},
        },
        "fingerprint": old.get("fingerprint"),
        "recipe": old.get("recipe"),
        "format": fmt.NAME,
        "bits_per_weight": round(bits / weights, 4),
        "bytes": survey.nbytes,
        "plan": [
            {
                "module": n,
                "shape": list(f.shape),
                "scheme": asdict(f.scheme),
                "solver": None,
                "reason": "converted",
            }
            for n, f in survey.fits.items()
        ],
        "calibration": old.get("calibration"),
        "modules": old.get("modules", []),
        "notes": [*old.get("notes", []), *survey.notes, *([survey.rounding] if survey.rounding else [])],
        "warnings": old.get("warnings", []),
        **folder_hashes(folder),
    }


# ---------------------------------------------------------------------------------------- reading back


def compare(opened: Opened, survey: _Survey, written: Path) -> None:
    """Read ``written`` and compare every tensor with the source's. Raises VerificationError naming the first
    that differs. Both are streamed: the source is re-read in the order of the written one's modules."""
    again = open_any(written)
    want: dict[str, str] = {}
    for name, value in opened.items():
        want[name] = _digest(survey.adapt(name, value), again, name)
    for name, value in again.items():
        if name not in want:
            raise VerificationError(f"{name} was written, but {opened.path.name} has no such tensor")
        if want.pop(name) != _digest(value, again, name):
            raise VerificationError(
                f"{name} reads back from {again.format} with other values than it was written with"
            )
    tied = {"lm_head.weight", "lm_head"} if again.is_gguf and again.config["tie_word_embeddings"] else set()
    if left := sorted(set(want) - tied):
        raise VerificationError(
            f"{len(left)} tensors of {opened.path.name} are not in the output: {left[:3]}"
        )


def _digest(value: Tensor | QuantWeight, again: Opened, name: str) -> str:
    """A fingerprint of what a value stands for, equal however it is grouped, stored or named symmetric."""
    import hashlib

    if isinstance(value, Tensor):
        # GGUF stores gemma's norms with 1 added in float32; what comes back is exact to that sum's last bit
        sums = (
            again.is_gguf
            and value.dim() == 1
            and again.config["model_type"].startswith("gemma")
            and "norm" in name
        )
        values = (value.float() + 1.0) if sums else value.float() if value.is_floating_point() else value
        return hashlib.sha256(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    rows, columns = value.shape
    index = value.columns_to_groups()
    digest = hashlib.sha256(f"{value.scheme.bits}|{value.scheme.activation}|{rows}|{columns}|".encode())
    digest.update(value.codes.contiguous().numpy().tobytes())
    step = max(1, (1 << 22) // columns)
    middle = torch.full((1, 1), value.scheme.midpoint, dtype=torch.uint8)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        digest.update(value.scale[part].float()[:, index].contiguous().numpy().tobytes())
        zero = (
            middle.expand(min(step, rows - first), columns)
            if value.zero is None
            else value.zero[part][:, index]
        )
        digest.update(zero.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_line(done: Exported) -> str:
    return f"{done.modules} weights, {show_size(done.nbytes)}" + (
        f"; {done.rounding}" if done.rounding else ", exact"
    )


__all__ = ["TARGETS", "Exported", "Fit", "compare", "difference", "export", "size_line"]
