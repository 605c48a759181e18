"""The GGUF container, version 3: metadata, tensor table, aligned data. Nothing here knows of models.

Layout (little-endian; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)::

    "GGUF" u32 version, u64 tensors, u64 keys
    keys:     string key, u32 type, value         a string is u64 length + UTF-8 bytes
    tensors:  string name, u32 dims, u64[dims] (innermost first), u32 kind, u64 offset
    padding to the alignment (32), then each tensor's bytes, each padded to the alignment
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.formats._common import CannotRead

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32

# GGML types: id -> name, weights a block, bytes a block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
IDS = {name: number for number, (name, _, _) in TYPES.items()}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of ``columns`` weights; a row is a whole number of blocks."""
    _, block, size = TYPES[IDS[kind]]
    return columns // block * size


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """kind: name of the GGML type. shape: as torch has it, outermost first. start: byte in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Writer:
    """Writes one tensor after the other, so that a model need not be in memory.

    The table of tensors stands before the data but is complete only at the end; data therefore goes to a
    spool beside the file first. ``finish`` puts the header in front. Left without it, nothing remains::

        with Writer(path) as file:
            file.add("output_norm.weight", "F32", (64,), array.tobytes())
            file.finish({"general.architecture": "llama"})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spool_path = path.with_name(path.name + ".data")
        self._part_path = path.with_name(path.name + ".part")
        self._spool: BinaryIO = open(self._spool_path, "w+b")  # noqa: SIM115 - closed in __exit__
        self._table: dict[str, tuple[str, tuple[int, ...], int]] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()
        for leftover in (self._spool_path, self._part_path):
            leftover.unlink(missing_ok=True)

    def add(self, name: str, kind: str, shape: tuple[int, ...], data: bytes | np.ndarray) -> None:
        """Append a tensor of weights ``shape``; ``data`` holds exactly its blocks in row order."""
        block = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        rows = int(np.prod(shape[:-1]))
        expected = rows * row_bytes(kind, shape[-1])
        if len(block) != expected:
            raise ValueError(f"{name}: {len(block)} bytes, but {shape} in {kind} takes {expected}")
        if name in self._table:
            raise ValueError(f"tensor {name} is written twice")
        self._table[name] = (kind, shape, self._spool.tell())
        self._spool.write(block)
        self._spool.write(b"\0" * (-self._spool.tell() % ALIGNMENT))

    def kinds(self) -> list[str]:
        """The GGML types of the tensors so far, one each."""
        return [kind for kind, _, _ in self._table.values()]

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Write header and data to the path, replacing it in one step.

        metadata values: bool, int (uint32), float (float32), str, or a list of str, int (int32) or float.
        """
        with open(self._part_path, "wb") as out:
            out.write(MAGIC + struct.pack("<IQQ", VERSION, len(self._table), len(metadata)))
            for key, value in metadata.items():
                out.write(_string(key) + _value(key, value))
            for name, (kind, shape, offset) in self._table.items():
                out.write(_string(name) + struct.pack("<I", len(shape)))
                out.write(struct.pack(f"<{len(shape)}QIQ", *reversed(shape), IDS[kind], offset))
            out.write(b"\0" * (-out.tell() % ALIGNMENT))
            self._spool.seek(0)
            shutil.copyfileobj(self._spool, out, 1 << 24)
            out.flush()
            os.fsync(out.fileno())
        os.replace(self._part_path, self.path)


class Reader:
    """Metadata and tensor table of a file; tensor bytes are mapped, not read. Raises CannotRead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != MAGIC:
                raise CannotRead(f"{path} is no GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            self.metadata, self.tensors = self._header()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise CannotRead(f"{path}: the header is damaged or truncated ({error})") from None
        for name, info in self.tensors.items():
            if info.start + info.nbytes > size:
                raise CannotRead(
                    f"{path} is truncated: {name} ends at byte {info.start + info.nbytes}, the file at {size}"
                )

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, read-only uint8 ``[rows, bytes of a row]``."""
        info = self.tensors[name]
        flat = np.frombuffer(self._data, np.uint8, info.nbytes, info.start)
        return flat.reshape(int(np.prod(info.shape[:-1])), -1)

    def _header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        version, count, keys = self._take("<IQQ")
        if version not in (2, 3):
            raise CannotRead(f"{self.path}: GGUF version {version} is not read; 2 and 3 are")
        metadata = {}
        for _ in range(keys):
            key = self._take_string()
            metadata[key] = self._take_value(self._take("<I")[0])
        table = []
        for _ in range(count):
            name = self._take_string()
            (dims,) = self._take("<I")
            *reverse_shape, kind, offset = self._take(f"<{dims}QIQ")
            table.append((name, tuple(reversed(reverse_shape)), kind, offset))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        start = self._at + -self._at % alignment
        return metadata, {n: self._info(n, shape, kind, start + offset) for n, shape, kind, offset in table}

    def _info(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        if kind not in TYPES:
            raise CannotRead(f"{self.path}: {name} is of GGML type {kind}, which is not read")
        label, block, _ = TYPES[kind]
        if shape[-1] % block:
            raise CannotRead(f"{self.path}: {name} has rows of {shape[-1]}, no multiple of {label}'s {block}")
        return TensorInfo(label, shape, start, int(np.prod(shape[:-1])) * row_bytes(label, shape[-1]))

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _take_string(self) -> str:
        (length,) = self._take("<Q")
        if self._at + length > len(self._data):
            raise IndexError(f"a string of {length} bytes at {self._at}")
        text = self._data[self._at : self._at + length]
        self._at += length
        return text.decode()

    def _take_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._take_string()
        if kind == _ARRAY:
            inner, count = self._take("<IQ")
            if inner in _SCALARS:
                return list(self._take(f"<{count}{_SCALARS[inner]}"))
            return [self._take_value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise CannotRead(f"{self.path}: metadata of unknown type {kind}; the header is damaged")
        return self._take("<" + _SCALARS[kind])[0]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{key}: an empty list has no type")
        if isinstance(value[0], str):
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
        kind = 6 if isinstance(value[0], float) else 5
        return struct.pack(f"<IIQ{len(value)}{_SCALARS[kind]}", _ARRAY, kind, len(value), *value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    kind = 7 if isinstance(value, bool) else 4 if isinstance(value, int) else 6
    return struct.pack("<I" + _SCALARS[kind], kind, value)
