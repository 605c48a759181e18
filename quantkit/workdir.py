"""The work folder: finished blocks as QuantWeights, committed one by one, so that a run can be resumed.

``fingerprint.json`` says what the run was made from. ``block-00007.safetensors`` holds a block's results: for each
quantized module ``<module>#codes`` (packed), ``#scale``, ``#zero``, ``#order``, and under their own names the
floats that rewrites changed; its metadata hold schemes and reports. A block file appears by rename: it is whole
or absent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit import packing
from quantkit.checkpoint import TensorInfo, read_header, read_tensor, write_file, write_json
from quantkit.errors import UserError
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme


@dataclass(slots=True)
class ModuleReport:
    """What became of one linear. error: relative output error; baseline: the same for plain rounding."""

    module: str
    scheme: str
    solver: str
    error: float
    baseline: float
    tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def worse_than_rounding(self) -> bool:
        return self.error > self.baseline * (1 + 1e-6) + 1e-12


@dataclass(slots=True)
class BlockResult:
    """Everything a block leaves behind."""

    weights: dict[str, QuantWeight]
    floats: dict[str, Tensor]
    reports: list[ModuleReport]
    notes: list[str] = field(default_factory=list)


class WorkFolder:
    """Creates or re-opens a work folder. Raises UserError when it belongs to another model, recipe or data."""

    def __init__(self, path: Path, fingerprint: Mapping[str, str], resume: bool = True) -> None:
        self.path = path
        file = path / "fingerprint.json"
        path.mkdir(parents=True, exist_ok=True)
        if file.is_file() and resume:
            old = json.loads(file.read_text(encoding="utf-8"))
            changed = [k for k in fingerprint if old.get(k) != fingerprint[k]]
            if changed:
                said = ", ".join(f"{k} ({str(old.get(k))[:12]} -> {fingerprint[k][:12]})" for k in changed)
                raise UserError(
                    f"{path} holds an unfinished run that differs in {said}; run the old command again to finish it, "
                    "or start over with --restart (it deletes the unfinished run)"
                )
        elif file.is_file() or any(path.iterdir()):
            self.clear()
            path.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            write_json(file, dict(fingerprint))

    def _file(self, block: int) -> Path:
        return self.path / f"block-{block:05d}.safetensors"

    def finished(self) -> int:
        """Number of leading blocks that are done."""
        n = 0
        while self._file(n).is_file():
            n += 1
        return n

    def commit(self, block: int, result: BlockResult) -> None:
        self._write(self._file(block), result)

    def commit_tuned(self, block: int, result: BlockResult) -> None:
        """A tuned copy of a block; it counts only once :meth:`finish_tuning` was called."""
        self._write(self.path / f"tuned-{block:05d}.safetensors", result)

    def finish_tuning(self, report: dict[str, Any]) -> None:
        write_json(self.path / "tuned.json", report)

    def tuned(self) -> dict[str, Any] | None:
        """The report of a tuning that was finished, or None."""
        file = self.path / "tuned.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def _write(self, file: Path, result: BlockResult) -> None:
        tensors: dict[str, Tensor] = dict(result.floats)
        schemes = {}
        for module, qw in result.weights.items():
            schemes[module] = {**dataclasses.asdict(qw.scheme), "columns": qw.shape[1]}
            tensors[f"{module}#codes"] = packing.pack(qw.codes, qw.scheme.bits)
            tensors[f"{module}#scale"] = qw.scale
            if qw.zero is not None:
                tensors[f"{module}#zero"] = qw.zero
            if qw.order is not None:
                tensors[f"{module}#order"] = qw.order
        metadata = {
            "schemes": json.dumps(schemes, sort_keys=True),
            "reports": json.dumps([dataclasses.asdict(r) for r in result.reports]),
            "notes": json.dumps(result.notes),
        }
        write_file(file, tensors, metadata)

    def load(self, block: int) -> BlockResult:
        """A finished block, tuned if tuning was finished and accepted."""
        tuned = self.path / f"tuned-{block:05d}.safetensors"
        file = tuned if tuned.is_file() and (self.tuned() or {}).get("accepted") else self._file(block)
        infos, metadata = read_header(file)
        weights = {}
        for module, d in json.loads(metadata["schemes"]).items():
            weights[module] = _weight(module, dict(d), infos)
        floats = {n: read_tensor(i) for n, i in infos.items() if "#" not in n}
        reports = [ModuleReport(**r) for r in json.loads(metadata["reports"])]
        return BlockResult(weights, floats, reports, json.loads(metadata["notes"]))

    def scratch(self, name: str) -> Path:
        return self.path / f"scratch-{name}.bin"

    def clear(self) -> None:
        """Delete the run. Only files that a run writes are touched."""
        for pattern in ("block-*.safetensors", "tuned*", "*.tmp", "scratch-*.bin", "fingerprint.json"):
            for file in self.path.glob(pattern):
                file.unlink()
        if not any(self.path.iterdir()):
            self.path.rmdir()


def _weight(module: str, d: dict[str, Any], infos: Mapping[str, TensorInfo]) -> QuantWeight:
    columns = d.pop("columns")
    scheme = Scheme(**d)

    def part(suffix: str) -> Tensor | None:
        info = infos.get(f"{module}#{suffix}")
        return None if info is None else read_tensor(info)

    codes, scale = part("codes"), part("scale")
    assert codes is not None and scale is not None
    return QuantWeight(
        scheme, packing.unpack(codes, scheme.bits, columns), scale, part("zero"), part("order")
    )
