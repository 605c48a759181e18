"""Hugging Face checkpoints on disk: a lazy, validated reader and a streaming, atomic writer.

Both work tensor by tensor, so that a model never needs to fit in memory. The safetensors layout is read and
written here directly (header and offsets; format: github.com/huggingface/safetensors) because the library's
writer wants all tensors at once and its reader maps whole files into the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}
SIDE_FILE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".md", ".tiktoken")
MANIFEST = "quantkit.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: file, dtype, shape, first byte and length in bytes."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises UserError when it is truncated or malformed."""
    size = path.stat().st_size
    try:
        with path.open("rb") as f:
            prefix = f.read(8)
            if len(prefix) < 8:
                raise ValueError("shorter than its header length field")
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                raise ValueError(f"header of {length} bytes does not fit in a file of {size} bytes")
            header = json.loads(f.read(length))
        metadata = header.pop("__metadata__", {})
        start, infos, end = 8 + length, {}, 0
        for name, item in header.items():
            a, b = item["data_offsets"]
            dtype, shape = DTYPES[item["dtype"]], tuple(item["shape"])
            infos[name] = TensorInfo(path, dtype, shape, start + a, b - a)
            end = max(end, b)
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is not a complete safetensors file ({e}); download or copy it again") from e
    if start + end != size:
        raise UserError(
            f"{path} is truncated or damaged: its header promises {start + end:,} bytes, the file has {size:,}; "
            "download or copy it again"
        )
    return infos, metadata


def read_tensor(info: TensorInfo) -> Tensor:
    """Read one tensor into fresh memory."""
    out = torch.empty(info.nbytes, dtype=torch.uint8)
    with info.file.open("rb") as f:
        f.seek(info.offset)
        if f.readinto(out.numpy().data) != info.nbytes:
            raise UserError(f"{info.file} ended in the middle of a tensor; copy it again")
    return (
        out.view(info.dtype).reshape(info.shape) if info.nbytes else torch.empty(info.shape, dtype=info.dtype)
    )


def read_rows(info: TensorInfo, rows: Tensor) -> Tensor:
    """Read some rows (int64, any order) of a 2-D tensor: an embedding need not be loaded whole."""
    width = info.nbytes // info.shape[0]
    out = torch.empty(len(rows), width, dtype=torch.uint8)
    view = out.numpy()
    with info.file.open("rb") as f:
        for i, row in enumerate(rows.tolist()):
            f.seek(info.offset + row * width)
            f.readinto(view[i])
    return out.view(info.dtype).reshape(len(rows), *info.shape[1:])


class Source:
    """A model folder, opened lazily and checked before any work.

    Raises UserError when the folder has no config, no safetensors weights, absent shards or damaged files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is not a folder")
        config = self.folder / "config.json"
        if not config.is_file():
            raise UserError(f"{self.folder} has no config.json; a Hugging Face model folder is needed")
        try:
            self.config: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as e:
            raise UserError(f"{config} is not valid JSON: {e}") from e
        self.files = self._weight_files()
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        for path in self.files:
            infos, metadata = read_header(path)
            self.tensors.update(infos)
            self.metadata.update(metadata)

    def _weight_files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as e:
                raise UserError(f"{index} is not a valid safetensors index: {e}") from e
            missing = [n for n in names if not (self.folder / n).is_file()]
            if missing:
                raise UserError(
                    f"{self.folder} lacks {len(missing)} of {len(names)} weight files that its index names: "
                    f"{', '.join(missing[:3])}; download them again"
                )
            return [self.folder / n for n in names]
        if single.is_file():
            return [single]
        found = sorted(self.folder.glob("*.safetensors"))
        if found:
            return found
        pickles = sorted(p.name for ext in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(ext))
        if pickles:
            raise UserError(
                f"{self.folder} holds only pickle weights ({pickles[0]}), which can run code when opened and are "
                "refused; convert once with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise UserError(f"{self.folder} has no model.safetensors and no model.safetensors.index.json")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        """Read one tensor. Raises UserError when the checkpoint lacks it."""
        try:
            return read_tensor(self.tensors[name])
        except KeyError:
            raise UserError(
                f"{self.folder} has no tensor {name!r}; the checkpoint does not fit its config"
            ) from None

    @property
    def nbytes(self) -> int:
        return sum(i.nbytes for i in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype that holds most of the weights."""
        totals: dict[torch.dtype, int] = {}
        for info in self.tensors.values():
            if info.dtype.is_floating_point:
                totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
        return max(totals, key=lambda d: totals[d], default=torch.float32)

    def side_files(self) -> list[Path]:
        """Everything beside the weights that belongs to the model: tokenizer, template, generation config, code."""
        return sorted(
            p
            for p in self.folder.iterdir()
            if p.is_file()
            and (p.suffix in SIDE_FILE_SUFFIXES or p.name.upper().startswith(("LICENSE", "NOTICE")))
            and p.name not in ("config.json", "model.safetensors.index.json", MANIFEST, "README.md")
        )

    def scan(self, progress: Callable[[str, int], None] | None = None) -> str:
        """Read every tensor once: returns a sha256 of all contents, raises UserError at NaN or infinity."""
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name}|{info.dtype}|{info.shape}|".encode())
            for piece in _pieces(info):
                digest.update(piece.numpy().data)
                if info.dtype.is_floating_point and info.dtype.itemsize > 1:
                    values = piece.view(info.dtype)
                    # the sum of finite values may overflow, so a bad sum is only a reason to look closely
                    if not bool(torch.isfinite(values.sum(dtype=torch.float32))):
                        bad = int((~torch.isfinite(values)).sum())
                        if bad:
                            raise UserError(
                                f"{name} holds {bad} NaN or infinite values; the checkpoint is damaged, get it again"
                            )
            if progress:
                progress(name, info.nbytes)
        return digest.hexdigest()


def _pieces(info: TensorInfo, limit: int = 1 << 24) -> Iterator[Tensor]:
    step = limit - limit % 8
    buffer = torch.empty(min(step, max(info.nbytes, 1)), dtype=torch.uint8)
    with info.file.open("rb") as f:
        f.seek(info.offset)
        left = info.nbytes
        while left:
            piece = buffer[: min(step, left)]
            f.readinto(piece.numpy().data)
            left -= len(piece)
            yield piece


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes; read piece by piece."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(torch.equal(a, b) for a, b in zip(_pieces(one), _pieces(other)))


# ------------------------------------------------------------------------------------------------ writing

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def nbytes_of(dtype: torch.dtype, shape: Iterable[int]) -> int:
    n = dtype.itemsize
    for s in shape:
        n *= s
    return n


def shard(layout: Layout, limit: int) -> list[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Split into files of at most ``limit`` bytes, in the order given; a tensor is never split."""
    shards: list[dict] = [{}]
    size = 0
    for name, (dtype, shape) in layout.items():
        n = nbytes_of(dtype, shape)
        if shards[-1] and size + n > limit:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += n
    return shards


def header_bytes(layout: Layout, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Header of a safetensors file and the absolute offset of each tensor.

    Tensors are ordered by descending item size, then by name, so that each lies on a multiple of its item size.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, places = 0, {}
    for name in sorted(layout, key=lambda n: (-layout[n][0].itemsize, n)):
        dtype, shape = layout[name]
        n = nbytes_of(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + n]}
        places[name] = at
        at += n
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {k: v + start for k, v in places.items()}


class FolderWriter:
    """Writes the tensors of ``layout`` in any order into ``model.safetensors`` or shards of it.

    Every tensor must be written exactly once with the promised dtype and shape; ``close`` checks it. As a context
    manager it closes at the end of the block, and only lets go of the files when the block raised.
    """

    def __init__(self, folder: Path, layout: Layout, shard_limit: int = 5_000_000_000) -> None:
        self.folder, self.layout = folder, dict(layout)
        self._left = set(self.layout)
        shards = shard(self.layout, shard_limit)
        many = len(shards) > 1
        self._where: dict[str, tuple[Any, int]] = {}
        self._handles = []
        weight_map: dict[str, str] = {}
        for i, part in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
            head, places = header_bytes(part, {"format": "pt"})
            handle = (folder / file).open("w+b")
            self._handles.append(handle)
            handle.write(head)
            for name, offset in places.items():
                self._where[name] = (handle, offset)
                weight_map[name] = file
        if many:
            total = sum(nbytes_of(*v) for v in self.layout.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _place(self, name: str, dtype: torch.dtype, shape: Iterable[int]) -> Any:
        """The file, at the place of this tensor. Raises ValueError for another dtype or shape, or a repeat."""
        planned, planned_shape = self.layout[name]
        if dtype != planned or tuple(shape) != tuple(planned_shape):
            raise ValueError(f"{name}: planned {planned} {tuple(planned_shape)}, got {dtype} {tuple(shape)}")
        if name not in self._left:
            raise ValueError(f"{name} was written twice")
        self._left.discard(name)
        handle, offset = self._where[name]
        handle.seek(offset)
        return handle

    def write(self, name: str, tensor: Tensor) -> None:
        handle = self._place(name, tensor.dtype, tensor.shape)
        if tensor.numel():
            handle.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def copy(self, name: str, info: TensorInfo) -> None:
        """Write a tensor of another file as it is, piece by piece: the embedding need not be in memory whole."""
        handle = self._place(name, info.dtype, info.shape)
        for piece in _pieces(info):
            handle.write(piece.numpy().data)

    def close(self) -> None:
        if self._left:
            raise ValueError(f"{len(self._left)} tensors were never written: {sorted(self._left)[:3]}")
        for handle in self._handles:
            handle.flush()
            os.fsync(handle.fileno())
            handle.close()

    def abort(self) -> None:
        for handle in self._handles:
            handle.close()


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file, written beside its place and renamed into it."""
    layout = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    head, places = header_bytes(layout, metadata)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as f:
        f.write(head)
        for name in sorted(places, key=lambda n: places[n]):
            if tensors[name].numel():
                f.write(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Atomic: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def tensor_hash(info: TensorInfo) -> str:
    """First 16 hex digits of the sha256 of a tensor's bytes: enough to tell a changed one, short in a manifest."""
    digest = hashlib.sha256()
    for piece in _pieces(info):
        digest.update(piece.numpy().data)
    return digest.hexdigest()[:16]


def folder_hashes(folder: Path) -> dict[str, dict[str, str]]:
    """What a manifest promises of a folder: "sha256" of each weight file, "side_files" likewise (config.json and
    the index among them; the model card may be refreshed later and is left out), "tensors" by :func:`tensor_hash`."""
    source = Source(folder)
    side = [*source.side_files(), folder / "config.json", folder / "model.safetensors.index.json"]
    return {
        "sha256": {f.name: file_hash(f) for f in source.files},
        "side_files": {f.name: file_hash(f) for f in sorted(side) if f.is_file()},
        "tensors": {name: tensor_hash(info) for name, info in sorted(source.tensors.items())},
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """quantkit.json of a folder that quantkit wrote; None for others. Raises UserError when it is damaged."""
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{file} is not valid JSON ({e}); copy the folder again, or delete this file") from e
    if not isinstance(found, dict):
        raise UserError(f"{file} is no manifest of quantkit; copy the folder again, or delete this file")
    return found
