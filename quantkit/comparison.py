"""Folders of one model side by side: measured here, or read from files of rows, as one report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint import Source, read_manifest
from quantkit.errors import UserError
from quantkit.evals._rows import provenance
from quantkit.evals.corpus import Windows
from quantkit.evals.corpus import windows as make_windows
from quantkit.heap import give_back
from quantkit.load import load, load_config, load_tokenizer
from quantkit.measure import measure_folder
from quantkit.model_card import read_rows
from quantkit.report import Report, Sample, Variant, csv, html, markdown, plots
from quantkit.report.variants import Row
from quantkit.resolve import resolve_model

PROMPT = "The three states of matter are"
SAMPLE_TOKENS = 48
# Fields of a row that tell where it comes from, not what it is.
ORIGIN = (
    "command", "versions", "hardware", "cores", "threads", "accelerator", "memory_bytes", "seed", "date", "commit",
)  # fmt: skip
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Folder:
    """given: as the user named it. path: the folder that is read, which for a .gguf file lies in the cache."""

    name: str
    given: str
    path: Path


def compare(
    models: Sequence[str],
    against: str | None = None,
    corpus: str = "heldout",
    windows: int = 8,
    seq_len: int = 512,
    rows: Sequence[Path] = (),
    samples: bool = True,
    trust_remote_code: bool = False,
    tell: Tell = lambda _: None,
) -> Report:
    """Measure ``models`` on the same windows and put them beside what ``rows`` files hold.

    against: the original; it is measured too, comes first, and the others' divergence is to it. Without it the
        first variant is the baseline. Where nothing is measured it may be the name of a model in ``rows``.
    rows: JSON-lines files as `quantkit eval --json` writes them, one or more models a file. Rows of a model that
        is also measured here are added to it; what was measured here comes first.
    tell: gets progress and warnings, a line each.
    Raises UserError, before anything is measured, for models that are not variants of one.
    """
    recorded = from_rows(rows)
    if against is not None and not models and against in {v.name for v in recorded}:
        return _report(sorted(recorded, key=lambda v: v.name != against), against, tell)
    if not models and not recorded:
        raise UserError(
            "there is nothing to compare: give model folders, or files of measured rows with --rows"
        )
    folders = _folders(models, against)
    measured: list[Variant] = []
    if folders:
        chosen = _windows(folders, corpus, windows, seq_len, trust_remote_code)
        reference = folders[0] if against is not None else None
        for number, folder in enumerate(folders, 1):
            tell(f"{number}/{len(folders)} {folder.name}: {chosen.name}")
            measured.append(_measure(folder, chosen, reference, samples, trust_remote_code, tell))
    title = folders[0].name if against is not None else _base_model(folders)
    return _report(_merged(measured, recorded), title, tell)


def write(report: Report, out: Path, tell: Tell = lambda _: None) -> list[Path]:
    """The page, and Markdown and CSV beside it; the files written. Without matplotlib there is no page."""
    markdown_file, csv_file = check_output(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    written = []
    try:
        plots.available()
    except UserError as error:
        tell(f"{out.name} was not written: {error}")
    else:
        written.append(html.write(report, out))
    markdown_file.write_text(f"# {report.title}\n\n{markdown(report)}", encoding="utf-8")
    csv_file.write_text(csv(report), encoding="utf-8")
    return [*written, markdown_file, csv_file]


def check_output(out: Path) -> tuple[Path, Path]:
    """The Markdown and CSV files beside a page. Raises UserError for a name that is not a page's."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"-o {out}: give a name that ends in .html; Markdown and CSV are written beside it")
    if out.is_dir():
        raise UserError(f"-o {out} is a folder; give the name of a file")
    return out.with_suffix(".md"), out.with_suffix(".csv")


# ---------------------------------------------------------------------------------------- rows of files


def from_rows(files: Sequence[Path]) -> list[Variant]:
    """Variants in order of appearance, one for each "model" (or for the file, where rows name none)."""
    found: dict[str, list[Row]] = {}
    for file in files:
        try:
            rows = read_rows(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read rows from {file}: {error}") from error
        if not rows:
            raise UserError(f"{file} holds no rows")
        for row in rows:
            found.setdefault(str(row.get("model") or file.stem), []).append(_checked(row, file))
    return [
        Variant(name, _newest([_own_fields(r) for r in rows]), provenance=_origin(rows[-1]))
        for name, rows in found.items()
    ]


def _checked(row: Row, file: Path) -> Row:
    """JSON knows no NaN, Python's reader does: it becomes "no value", as everywhere in quantkit."""
    for key in ("value", "stderr"):
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UserError(f"{file}: the {key} of metric {row['metric']!r} is {value!r}, which is no number")
        if value is not None and not math.isfinite(value):
            row = {**row, key: None}
    return row


def _own_fields(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ORIGIN and key != "model"}


def _origin(row: Row) -> Row:
    return {key: row[key] for key in (*ORIGIN, "data_sha256") if key in row}


def _identity(row: Row) -> tuple[tuple[str, Any], ...]:
    """What a row measures, without its result. The text is named by corpus and windows; its hash stands on rows
    that no text was measured for, too."""
    skip = ("value", "stderr", "data_sha256")
    return tuple(
        sorted((k, repr(v)) for k, v in row.items() if k not in skip and isinstance(v, (str, int, bool)))
    )


def _newest(rows: list[Row]) -> list[Row]:
    """Files are appended to: of rows that measure the same thing, the last one stays."""
    return list({_identity(row): row for row in rows}.values())


def _merged(measured: list[Variant], recorded: list[Variant]) -> list[Variant]:
    more = {v.name: v for v in recorded}
    out = []
    for variant in measured:
        other = more.pop(variant.name, None)
        if other is not None:
            known = {_identity(row) for row in variant.rows}
            variant.rows.extend(row for row in other.rows if _identity(row) not in known)
            if other.provenance:
                variant.provenance["rows from files"] = other.provenance
        out.append(variant)
    return [*out, *more.values()]


# ---------------------------------------------------------------------------------------- measuring


def _folders(models: Sequence[str], against: str | None) -> list[Folder]:
    """The original first, then the models, each once and under a name of its own."""
    given = list(models) if against is None else [against, *models]
    paths = [resolve_model(name) for name in given]
    places = [path.resolve() for path in paths]
    for i, place in enumerate(places):
        if place in places[:i]:
            if against is not None and places.index(place) == 0:
                continue  # the original among the models: it is measured anyway
            raise UserError(f"{given[i]} is given twice")
    once = [i for i, place in enumerate(places) if place not in places[:i]]
    names = _short_names([given[i] for i in once])
    return [Folder(name, given[i], paths[i]) for name, i in zip(names, once)]


def _short_names(given: Sequence[str]) -> list[str]:
    """The last part of each path, and of those that are alike as many parts as tell them apart."""
    parts = [Path(name).resolve().parts if Path(name).exists() else Path(name).parts for name in given]
    names = []
    for i, own in enumerate(parts):
        others = [other for j, other in enumerate(parts) if j != i]
        count = next(
            (n for n in range(1, len(own)) if all(o[-n:] != own[-n:] for o in others)), len(own)
        )  # fmt: skip
        names.append("/".join(own[-count:]))
    return names


def _windows(folders: list[Folder], corpus: str, count: int, seq_len: int, trust: bool) -> Windows:
    """The same windows for all. Raises UserError for folders that read the text as other tokens."""
    first, *others = folders
    chosen = make_windows(corpus, load_tokenizer(first.path, trust), seq_len, count, spread=True)
    vocab = None
    for folder in folders:
        config = load_config(Source(folder.path), trust).get_text_config()
        room = getattr(config, "max_position_embeddings", None)
        if room and seq_len > room:
            raise UserError(f"--seq-len {seq_len} is longer than the context of {folder.name}, {room} tokens")
        vocab = vocab or config.vocab_size
        if config.vocab_size != vocab:
            raise UserError(
                f"{folder.name} has a vocabulary of {config.vocab_size:,} tokens and {first.name} one of "
                f"{vocab:,}: they are no variants of one model"
            )
    for folder in others:
        tokenizer = load_tokenizer(folder.path, trust)
        if make_windows(corpus, tokenizer, seq_len, count, spread=True).sha256 != chosen.sha256:
            raise UserError(
                f"{folder.name} and {first.name} read {chosen.corpus} as different tokens, so their numbers "
                "would not compare"
            )
    return chosen


def _measure(
    folder: Folder, chosen: Windows, reference: Folder | None, samples: bool, trust: bool, tell: Tell
) -> Variant:
    original = reference.path if reference is not None and reference is not folder else None
    rows = measure_folder(folder.path, chosen, original, trust) + _memory(folder, trust, tell)
    manifest = read_manifest(folder.path) or {}
    about = provenance(data_sha256=chosen.sha256)
    written = []
    if samples:
        written.append(Sample(PROMPT, greedy(folder.path, PROMPT, SAMPLE_TOKENS, trust)))
        about["sample"] = f"greedy, at most {SAMPLE_TOKENS} tokens, dequantized weights in float32"
    give_back()
    return Variant(folder.name, rows, _layer_errors(manifest), written, _note(folder, manifest), about)


def _memory(folder: Folder, trust: bool, tell: Tell) -> list[Row]:
    """Weights by class and the cache's bytes per token. Of a .gguf file, not of its dequantized copy."""
    from quantkit.evals import memory, row

    given = Path(folder.given)
    rows = memory.from_folder(given if given.suffix == ".gguf" else folder.path).rows()
    try:
        per_token = memory.cache_bytes_per_token(load_config(Source(folder.path), trust))
    except UserError as error:
        tell(f"{folder.name}: no size of the cache, {error}")
        return rows
    return [*rows, row("cache_bytes_per_token", per_token, "bytes")]


def greedy(folder: Path, prompt: str, tokens: int, trust_remote_code: bool = False) -> str:
    """What a folder writes after ``prompt``: always the likeliest token, weights dequantized to float32."""
    import torch
    from transformers import DynamicCache

    model: Any = load(folder, "float32", dequantize=True, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    stop = getattr(model.generation_config, "eos_token_id", None)
    stops = set(stop) if isinstance(stop, (list, tuple)) else {stop, tokenizer.eos_token_id}
    step = tokenizer(prompt, return_tensors="pt").input_ids
    cache, found = DynamicCache(config=model.config), list[int]()
    with torch.inference_mode():
        while len(found) < tokens:
            token = int(model(input_ids=step, cache=cache, use_cache=True).logits[0, -1].argmax())
            if token in stops:
                break
            found.append(token)
            step = torch.tensor([[token]])
    return tokenizer.decode(found, skip_special_tokens=True)


def _layer_errors(manifest: dict[str, Any]) -> dict[str, float]:
    """Relative output error of each linear, from quantkit.json; nothing for folders of other tools."""
    modules = [m for m in manifest.get("modules") or [] if isinstance(m, dict) and "module" in m]
    return {m["module"]: float(m["error"]) for m in modules if isinstance(m.get("error"), (int, float))}


def _note(folder: Folder, manifest: dict[str, Any]) -> str:
    if Path(folder.given).suffix == ".gguf":
        return "GGUF, dequantized to bfloat16 for measuring"
    if not manifest:
        config = Source(folder.path).config
        method = (config.get("quantization_config") or {}).get("quant_method")
        return f"quantized ({method}), not by quantkit" if method else "not quantized"
    parts = [str(manifest.get("format")), f"{manifest.get('bits_per_weight')} bits per quantized weight"]
    if name := (manifest.get("recipe") or {}).get("name"):
        parts.append(f"recipe {name}")
    return ", ".join([*parts, f"quantkit {manifest.get('quantkit')}"])


def _base_model(folders: list[Folder]) -> str | None:
    """What the folders say they were made from, where they agree."""
    found = {(read_manifest(folder.path) or {}).get("base_model") for folder in folders} - {None}
    return str(found.pop()) if len(found) == 1 else None


def _report(variants: list[Variant], title: str | None, tell: Tell) -> Report:
    """Warns where one column would hold numbers of different text."""
    texts: dict[tuple[Any, ...], dict[str, str]] = {}
    for variant in variants:
        for row in variant.rows:
            if row["metric"] == "perplexity" and row.get("data_sha256"):
                key = (row.get("corpus"), row.get("seq_len"))
                texts.setdefault(key, {}).setdefault(row["data_sha256"], variant.name)
    for (corpus, _), seen in texts.items():
        if len(seen) > 1:
            one, two = list(seen.values())[:2]
            tell(f"{one} and {two} were measured on different windows of {corpus}: differences are less sure")
    return Report(title or variants[0].name, variants)
