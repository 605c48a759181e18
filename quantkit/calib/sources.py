"""Where calibration rows come from: text, JSON lines, parquet, folders, the `datasets` hub, bundled text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from quantkit.errors import UserError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".raw", ".utf8")
JSON_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet",)
TENSOR_SUFFIXES = (".safetensors", ".npy")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")
ROW_SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + TABLE_SUFFIXES

ACCEPTED = (
    "'default', 'self', a .txt, .jsonl or .parquet file, a folder of such files, token ids in a .safetensors "
    "or .npy file, or hub:NAME[:split[:column]]"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source: plain ``text``, or chat ``messages`` ([{"role", "content"}, …]); never both."""

    where: str  # "file.jsonl line 7", for messages to the user
    text: str = ""
    messages: tuple[dict[str, Any], ...] | None = None
    kind: str = ""
    lang: str = ""


@dataclass(slots=True)
class Rows:
    """What a source gave: its rows, the files read, and files of a folder that were passed over."""

    rows: list[Row]
    files: list[str] = field(default_factory=list)
    skipped_files: list[str] = field(default_factory=list)
    note: str = ""


def default_folder() -> Path:
    """The bundled calibration text: inside an installed package, or at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "calib_data", package.parent / "calib_data"):
        if any(folder.glob("*.jsonl")):
            return folder
    raise UserError(
        "the bundled calibration text is missing from this installation; reinstall quantkit or name a text "
        "file with --calib"
    )


def read_rows(source: str, limit: int) -> Rows:
    """Rows of any text source. ``limit`` bounds the rows taken from a hub data set (files are read whole).

    Raises UserError for a source that is missing, malformed, or of a kind that is not accepted.
    """
    if source == "default":
        folder = default_folder()
        return _read_folder(folder)
    if source.startswith("hub:"):
        return _read_hub(source, limit)
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"calibration source {source!r} does not exist; give {ACCEPTED}")
    if path.is_dir():
        return _read_folder(path)
    return Rows(_read_file(path), [path.name])


def _read_folder(folder: Path) -> Rows:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    wanted = [p for p in files if p.suffix.lower() in ROW_SUFFIXES]
    if folder == _default_or_none():
        wanted = [p for p in wanted if p.suffix == ".jsonl"]  # its README is not calibration text
    if not wanted:
        raise UserError(f"folder {folder} holds no {', '.join(ROW_SUFFIXES)} file; give {ACCEPTED}")
    rows = [row for path in wanted for row in _read_file(path)]
    names = [p.relative_to(folder).as_posix() for p in wanted]
    return Rows(rows, names, [p.relative_to(folder).as_posix() for p in files if p not in wanted])


def _default_or_none() -> Path | None:
    try:
        return default_folder()
    except UserError:
        return None


def _read_file(path: Path) -> list[Row]:
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return [Row(path.name, text=_read_text(path), kind=path.stem)]
    if suffix in JSON_SUFFIXES:
        return list(_read_jsonl(path))
    if suffix in TABLE_SUFFIXES:
        return list(_read_parquet(path))
    if suffix in PICKLES:
        raise UserError(
            f"{path} may be a pickle, which can run code when opened; save the token ids as "
            ".safetensors or .npy"
        )
    raise UserError(f"cannot calibrate on {path}: its ending {suffix!r} is not known; give {ACCEPTED}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv -t utf-8"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    # Not splitlines(): JSON strings may hold U+2028, which it takes for the end of a line.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}); each line "
                'must be one object such as {"text": "…"}'
            ) from error
        if not isinstance(value, dict):
            raise UserError(
                f"{path}, line {number}: expected an object with 'text' or 'messages', found "
                f"{type(value).__name__}"
            )
        yield row_of(value, where, path.stem)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
    columns = [name for name in ("text", "messages", "kind", "lang") if name in file.schema_arrow.names]
    if not {"text", "messages"} & set(columns):
        raise UserError(
            f"{path} has neither a 'text' nor a 'messages' column (it has "
            f"{', '.join(file.schema_arrow.names)}); rename the column that holds the text"
        )
    number = 0
    for batch in file.iter_batches(columns=columns):
        for value in batch.to_pylist():
            number += 1
            yield row_of(value, f"{path.name} row {number}", path.stem)


def row_of(value: dict[str, Any], where: str, kind: str) -> Row:
    """A Row from a mapping. Raises UserError when it has neither text nor messages, or they are malformed."""
    messages, text = value.get("messages"), value.get("text")
    label = str(value.get("kind") or kind)
    lang = str(value.get("lang") or "")
    if messages is not None:
        good = isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None
            for m in messages
        )
        if not good:
            raise UserError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
        return Row(where, messages=tuple(messages), kind=label, lang=lang)
    if isinstance(text, str):
        return Row(where, text=text, kind=label, lang=lang)
    if text is not None:
        raise UserError(f"{where}: 'text' must be a string, found {type(text).__name__}")
    keys = ", ".join(map(repr, value)) or "none"
    raise UserError(
        f"{where}: neither 'text' nor 'messages' (keys: {keys}); rename the key that holds the text"
    )


def _read_hub(source: str, limit: int) -> Rows:
    """``hub:NAME[@CONFIG][:split[:column]]``; the first ``limit`` rows, streamed."""
    parts = source.split(":")
    if len(parts) > 4 or not parts[1]:
        raise UserError(f"{source!r} is not hub:NAME[@CONFIG][:split[:column]]")
    name, _, config = parts[1].partition("@")
    split = parts[2] if len(parts) > 2 and parts[2] else "train"
    column = parts[3] if len(parts) > 3 else ""
    rows = list(_hub_rows(name, config or None, split, column, limit))
    note = f"split {split}" + (f"; only its first {limit} rows were read" if len(rows) == limit else "")
    return Rows(rows, [f"{parts[1]} ({split})"], note=note)


def _hub_rows(name: str, config: str | None, split: str, column: str, limit: int) -> Iterator[Row]:
    import datasets

    try:
        # Streaming: a web-sized data set must not be downloaded for 128 samples.
        stream: Iterable[dict[str, Any]] = datasets.load_dataset(name, config, split=split, streaming=True)
        values = list(islice(stream, limit))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot load data set {name!r} ({reason}); without a network only the Hugging Face cache of "
            "this machine can serve it: check name, config and split, or give a local file with --calib FILE"
        ) from error
    for number, value in enumerate(values, 1):
        where = f"{name} {split} row {number}"
        if column and column not in value:
            raise UserError(f"{where}: no column {column!r}; it has {', '.join(value)}")
        cell = value[column] if column else None
        if column:
            value = {"messages": cell} if isinstance(cell, list) else {"text": cell}
        yield row_of(value, where, config or name)
