"""What can be wrong with a checkpoint on disk, found without running it; shared by verify and repair.

Each finding has a code by which repair knows its remedy, a sentence that names the culprit, and facts for the
remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint import Source, TensorInfo, file_hash, read_manifest, read_tensor, tensor_hash
from quantkit.errors import UserError
from quantkit.formats import compressed_tensors, gptq
from quantkit.load import format_of, load_config, load_tokenizer, quantized_modules, read_module
from quantkit.modelspec import ModelSpec, spec_for
from quantkit.plan import Names
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme
from quantkit.skeleton import build_skeleton, has_tied_head

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class Finding:
    """code: short and stable ("zero-points"). message: what is wrong, with the culprit's name. severe:
    whether the folder is unfit because of it. facts: for the remedy."""

    code: str
    message: str
    severe: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Model:
    """An opened folder with its empty model: names, shapes and what the architecture says of them."""

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self.source = Source(folder)
        self.config = load_config(self.source, trust_remote_code)
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config
        self.skeleton: nn.Module = build_skeleton(self.config, trust_remote_code=trust_remote_code)
        self.spec: ModelSpec = spec_for(self.config, self.skeleton)
        self.names = Names(self.source, self.spec)

    def stored(self, module: str, marker: str) -> str:
        """A module's name in the checkpoint."""
        return self.names.tensor(module + marker).removesuffix(marker)


def check(folder: Path, trust_remote_code: bool = False) -> list[Finding]:
    """All findings of a folder; [] when it is sound. A folder that cannot be opened gives one finding."""
    try:
        manifest = read_manifest(folder)
        source = Source(folder)
    except UserError as e:
        return [Finding("files", str(e)), *_hashes_of_files(folder)]
    found = list(_against_manifest(source, manifest)) if manifest else []
    try:
        fmt = format_of(source.config)
        model = Model(folder, trust_remote_code)
    except UserError as e:
        return [*found, Finding("config", str(e))]
    stored = {} if fmt is None else quantized_modules(source, fmt)
    if fmt is not None:
        if not stored:
            found.append(Finding("files", f"config.json says {fmt.NAME}, but no tensor ends in {fmt.marker}"))
        found += group_sizes(source, fmt, stored)
        found += zero_points(source, fmt, stored)
        found += _weights(model, fmt, stored, skip=bool(found))
        found += ignore_list(source, fmt, stored)
        if manifest:
            found += _against_plan(model, fmt, stored, manifest)
    found += tie_flag(model, stored)
    found += _missing(model, stored, bool([f for f in found if f.code == "tie-flag"]))
    found += _tokenizer(folder, source, trust_remote_code)
    return found


# -------------------------------------------------------------------------------- against the manifest


def _hashes_of_files(folder: Path) -> list[Finding]:
    """Which files a manifest promises and are not there or changed, for a folder that does not open."""
    try:
        manifest = read_manifest(folder) or {}
    except UserError:
        return []
    promised = {**manifest.get("sha256", {}), **manifest.get("side_files", {})}
    return [
        Finding("files", f"{name} is promised by quantkit.json and is not there")
        for name in promised
        if not (folder / name).is_file()
    ]


def _against_manifest(source: Source, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    folder = source.folder
    for name, expected in manifest.get("side_files", {}).items():
        file = folder / name
        if not file.is_file():
            code = "chat-template" if name == "chat_template.jinja" else "side-files"
            yield Finding(code, f"{name} is promised by quantkit.json and is not there", facts={"file": name})
        elif file_hash(file) != expected:
            yield Finding(
                "side-files",
                f"{name} was changed after it was written (its sha256 is not the manifest's)",
                facts={"file": name},
            )
    changed = [
        name
        for name, expected in manifest.get("sha256", {}).items()
        if not (folder / name).is_file() or file_hash(folder / name) != expected
    ]
    if not changed:
        return
    promised = manifest.get("tensors", {})
    culprits = 0
    for name, expected in promised.items():
        info = source.tensors.get(name)
        if info is None:
            yield Finding("tensors", f"tensor {name} is promised by quantkit.json and is in no weight file")
            culprits += 1
        elif tensor_hash(info) != expected:
            how, code = explain(name, info, expected)
            yield Finding(
                code,
                f"tensor {name} was changed after it was written: {how}",
                facts={"tensor": name, "how": how},
            )
            culprits += 1
    for name in sorted(set(source.tensors) - set(promised)) if promised else []:
        yield Finding("tensors", f"tensor {name} is in the files and not in quantkit.json")
        culprits += 1
    if not culprits:
        yield Finding(
            "tensors", f"{changed[0]} is not the file that was written (its sha256 is not the manifest's)"
        )


def explain(name: str, info: TensorInfo, expected: str) -> tuple[str, str]:
    """How a changed tensor differs from the one that was hashed, where it is a known accident; and the
    code."""
    import hashlib

    def hashed(t: Tensor) -> str:
        return hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

    now = read_tensor(info)
    if now.numel() and hashed(swap_nibbles(now)) == expected:
        return "the two nibbles of every byte are exchanged", "nibbles"
    if name.endswith(".qzeros"):
        for bits in (4, 8, 2):
            ones = sum(1 << shift for shift in range(0, 32, bits))
            for sign, says in ((1, "v1 (zero - 1) instead of v2"), (-1, "v2 instead of v1 (zero - 1)")):
                if hashed(_add_words(now, sign * ones)) == expected:
                    return f"its zero points are stored in the convention of GPTQ {says}", "zero-points"
    return "its bytes differ", "tensors"


def swap_nibbles(tensor: Tensor) -> Tensor:
    """The same tensor with the halves of every byte exchanged."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return ((raw >> 4) | (raw << 4)).view(tensor.dtype).reshape(tensor.shape)


def _add_words(words: Tensor, value: int) -> Tensor:
    wrapped = (words.long() + value) & 0xFFFFFFFF
    return torch.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped).to(torch.int32)


def _against_plan(
    model: Model, fmt: ModuleType, stored: Mapping[str, list[str]], manifest: Mapping[str, Any]
) -> list[Finding]:
    """The quantized set equals the plan's, module by module, with its scheme."""
    planned = {model.stored(m["module"], fmt.marker): m for m in manifest["plan"] if m["scheme"] is not None}
    out = [
        Finding("plan", f"{m} is quantized by the plan and not in the files")
        for m in sorted(set(planned) - set(stored))
    ]
    out += [
        Finding("plan", f"{m} is quantized in the files and not by the plan")
        for m in sorted(set(stored) - set(planned))
    ]
    for module in sorted(set(planned) & set(stored)):
        want = Scheme(**planned[module]["scheme"])
        try:
            value = read_module(model.source, fmt, module, stored[module])
        except UserError:
            continue  # already a finding of the weights themselves
        if not isinstance(value, QuantWeight):
            continue
        have = value.scheme.with_(scale_dtype=want.scale_dtype)
        if have != want or list(value.shape) != planned[module]["shape"]:
            out.append(
                Finding(
                    "plan",
                    f"{module} is {value.scheme} {value.shape} in the files and {want} "
                    f"{planned[module]['shape']} in the plan",
                )
            )
    return out


# ---------------------------------------------------------------------------------- weights and config


def configured_group(source: Source, fmt: ModuleType, module: str) -> int | None:
    """What the configuration says of a module's group size: 0 a whole row, None nothing."""
    quantization = source.config["quantization_config"]
    if fmt is compressed_tensors:
        args = compressed_tensors.group_for(module, quantization)["weights"]
        return 0 if args.get("strategy") in ("channel", "tensor") else args.get("group_size")
    if fmt is gptq:
        size = gptq.settings_for(module, quantization).get("group_size")
    else:
        size = quantization.get("group_size")
    return None if size is None else max(int(size), 0)


def stored_group(source: Source, fmt: ModuleType, module: str) -> tuple[int, int] | None:
    """(columns, groups) of a module by its tensors' shapes, or None where the format is not known here."""
    quantization, tensors = source.config["quantization_config"], source.tensors
    if fmt is compressed_tensors:
        groups = tensors[f"{module}.weight_scale"].shape[-1] if tensors[f"{module}.weight_scale"].shape else 1
        if f"{module}.weight_shape" in tensors:
            return int(source.tensor(f"{module}.weight_shape")[1]), groups
        info = tensors.get(f"{module}.weight")
        return None if info is None else (info.shape[1], groups)
    if f"{module}.scales" not in tensors:
        return None
    groups = tensors[f"{module}.scales"].shape[0]
    if fmt is gptq:
        if f"{module}.g_idx" in tensors:
            return tensors[f"{module}.g_idx"].shape[0], groups
        bits = gptq.settings_for(module, quantization)["bits"]
        return tensors[f"{module}.qweight"].shape[0] * 32 // bits, groups
    if quantization.get("version", "gemm") == "gemm":
        return tensors[f"{module}.qweight"].shape[0], groups
    return None


def group_sizes(source: Source, fmt: ModuleType, stored: Mapping[str, list[str]]) -> list[Finding]:
    """Modules whose number of scales contradicts the configured group size, one finding for each right
    size."""
    wrong: dict[tuple[int, int], list[str]] = {}
    for module in stored:
        try:
            said, held = configured_group(source, fmt, module), stored_group(source, fmt, module)
        except UserError:
            continue  # the configuration does not describe this module at all; reading it says so
        if said is None or held is None:
            continue
        columns, groups = held
        expected = 1 if said == 0 else -(-columns // said)
        if expected != groups and columns % groups == 0:
            wrong.setdefault((said, 0 if groups == 1 else columns // groups), []).append(module)
    return [
        Finding(
            "group-size",
            f"the configuration says group size {said or 'one per row'}, but {modules[0]} and "
            f"{len(modules) - 1} more hold "
            f"scales for groups of {held or 'a whole row'}",
            facts={"said": said, "held": held, "modules": modules},
        )
        for (said, held), modules in wrong.items()
    ]


def zero_points(source: Source, fmt: ModuleType, stored: Mapping[str, list[str]]) -> list[Finding]:
    """GPTQ files whose zero points make sense only in the other convention (v1 stores zero - 1, v2 the zero).

    Symmetric weights: all zeros are the midpoint in one reading only. Asymmetric ones: trained weights are
    centred about zero, so the mean of (code - zero) over all groups is near 0 in the right reading and near 1
    in the wrong.
    """
    if fmt is not gptq or not stored:
        return []
    said = _convention(source)
    if said is None:
        return []
    other = gptq.V1 if said == gptq.V2 else gptq.V2
    shifts = {v: [] for v in (said, other)}  # type: dict[str, list[float]]
    midpoints = {said: True, other: True}
    symmetric = False
    quantization = source.config["quantization_config"]
    for module in list(stored)[:: max(1, len(stored) // 12)]:
        try:
            settings = gptq.settings_for(module, quantization)
            for version in (said, other):
                zero, mean = _zeros_and_codes(source, module, settings["bits"], version)
                midpoints[version] &= not bool((zero != 2 ** (settings["bits"] - 1)).any())
                shifts[version].append(float((mean - zero.float()).mean()))
            symmetric |= bool(settings.get("sym", False))
        except (UserError, RuntimeError, KeyError):
            return []  # tensors that do not unpack are named by the reading of the weights
    facts = {"said": said, "right": other}
    if midpoints[other] and not midpoints[said] and symmetric:
        return [
            Finding(
                "zero-points",
                f"read as checkpoint_format {said!r} no symmetric zero point is the "
                "midpoint, read as "
                f"{other!r} all are",
                facts=facts,
            )
        ]
    if symmetric or midpoints[said]:
        return []
    mine, theirs = (abs(sum(shifts[v]) / len(shifts[v])) for v in (said, other))
    if mine > 0.6 and theirs < 0.4:
        return [
            Finding(
                "zero-points",
                f"read as checkpoint_format {said!r} the weights lie {mine:.2f} "
                "steps off zero on average, read "
                f"as {other!r} {theirs:.2f}",
                facts=facts,
            )
        ]
    return []


def _convention(source: Source) -> str | None:
    quantization = source.config["quantization_config"]
    if quantization.get("quant_method") != "gptq":
        return None
    version = quantization.get("checkpoint_format") or quantization.get("format") or gptq.V1
    return version if version in (gptq.V1, gptq.V2) else None


def _zeros_and_codes(source: Source, module: str, bits: int, version: str) -> tuple[Tensor, Tensor]:
    """Zero points and mean codes, both ``[groups, out]``."""
    from quantkit import packing

    scales = source.tensors[f"{module}.scales"].shape
    zero = gptq.read_zeros(source.tensor(f"{module}.qzeros"), bits, scales[1], version)
    columns = source.tensors[f"{module}.qweight"].shape[0] * 32 // bits
    codes = packing.unpack(
        source.tensor(f"{module}.qweight").T.contiguous(), bits, columns
    ).T.float()  # [in, out]
    if f"{module}.g_idx" in source:
        index = source.tensor(f"{module}.g_idx").long()
    else:
        index = torch.arange(columns) // -(-columns // scales[0])
    counts = torch.bincount(index, minlength=scales[0])[:, None]
    return zero, torch.zeros(scales).index_add_(0, index, codes) / counts


def _weights(model: Model, fmt: ModuleType, stored: Mapping[str, list[str]], skip: bool) -> list[Finding]:
    """Every module unpacks, has the model's shape and finite scales. skip: leave out what a cause already
    named."""
    out: list[Finding] = []
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in model.skeleton.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            rows, columns = weight.shape
            stored_name = model.stored(name, fmt.marker)
            shapes[stored_name] = (
                (rows, columns) if isinstance(module, nn.Linear | nn.Embedding) else (columns, rows)
            )
    failures: list[tuple[str, str]] = []
    for module_name, tensors in stored.items():
        try:
            value = read_module(model.source, fmt, module_name, tensors, shapes.get(module_name))
        except UserError as e:
            failures.append((module_name, str(e)))
            continue
        except (RuntimeError, IndexError, ValueError) as e:  # shapes that do not fit one another
            failures.append((module_name, f"{module_name} does not unpack: {e}"))
            continue
        scale = value.scale if isinstance(value, QuantWeight) else value
        if not bool(torch.isfinite(scale.float()).all()):
            out.append(Finding("tensors", f"{module_name} has scales that are NaN or infinite"))
    if failures and not skip:
        more = f" ({len(failures)} modules fail)" if len(failures) > 1 else ""
        out.append(Finding("weights", failures[0][1] + more))
    return out


def excluded(fmt: ModuleType, quantization: Mapping[str, Any], module: str) -> bool:
    """Whether the configuration tells loaders that this linear is not quantized."""
    head = module.rpartition(".")[2] == "lm_head"
    if fmt is compressed_tensors:
        return any(
            i == module or (i.startswith("re:") and re.match(i[3:], module))
            for i in quantization.get("ignore") or []
        ) or not any(
            t == module or "." not in t or (t.startswith("re:") and re.match(t[3:], module))
            for g in quantization.get("config_groups", {}).values()
            for t in g["targets"]
        )
    if fmt is gptq:
        listed = [
            n
            for block in quantization.get("modules_in_block_to_quantize") or []
            for n in ([block] if isinstance(block, str) else block)
        ]
        if head or (listed and not any(module.endswith(n) for n in listed)):
            return True
        return any(p.startswith("-:") and re.match(p[2:], module) for p in quantization.get("dynamic") or {})
    return head or any(n in module for n in quantization.get("modules_to_not_convert") or [])


def ignore_list(source: Source, fmt: ModuleType, stored: Mapping[str, list[str]]) -> list[Finding]:
    """Float linears that the configuration does not exclude: loaders look for packed tensors in vain."""
    quantization = source.config["quantization_config"]
    if fmt.NAME not in ("compressed-tensors", "gptq", "awq"):
        return []
    taken = {t for tensors in stored.values() for t in tensors}
    floats = [
        n.removesuffix(".weight")
        for n, info in source.tensors.items()
        if n.endswith(".weight")
        and n not in taken
        and len(info.shape) == 2
        and info.dtype.is_floating_point
        and not any(part in n for part in ("embed", "wte", "wpe"))
    ]
    absent = [m for m in floats if not excluded(fmt, quantization, m)]
    if not absent:
        return []
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return [
        Finding(
            "ignore-list",
            f"{absent[0]}{more} is not quantized in the files, but the configuration does not exclude it",
            facts={"modules": absent, "quantized": list(stored)},
        )
    ]


def tie_flag(model: Model, stored: Mapping[str, list[str]]) -> list[Finding]:
    """tie_word_embeddings against the head that is, or is not, in the files."""
    source, spec = model.source, model.spec
    tied = bool(getattr(model.config, "tie_word_embeddings", False)) and has_tied_head(model.skeleton)
    head, embed = model.names.tensor(f"{spec.head}.weight"), model.names.tensor(f"{spec.embed}.weight")
    own = head in source or spec.head in stored
    if not tied and not own:
        return [
            Finding(
                "tie-flag",
                f"tie_word_embeddings is false, but there is no {spec.head}.weight: the head would be random",
                facts={"right": True},
            )
        ]
    if not tied or not own:
        return []
    if spec.head in stored:
        return [
            Finding(
                "tie-flag",
                f"tie_word_embeddings is true, but {spec.head} is quantized on its own",
                facts={"right": False},
            )
        ]
    a, b = source.tensors[head], source.tensors.get(embed)
    if b is not None and (
        a.shape != b.shape or not torch.equal(source.tensor(head).float(), source.tensor(embed).float())
    ):
        return [
            Finding(
                "tie-flag",
                f"tie_word_embeddings is true, but {head} differs from {embed}: loaders would drop it",
                facts={"right": False},
            )
        ]
    return []


def _missing(model: Model, stored: Mapping[str, list[str]], tie_is_wrong: bool) -> list[Finding]:
    """Parameters of the model that are in no file."""
    absent = []
    prefix = f"{model.spec.blocks}."
    for name, _ in model.skeleton.named_parameters():
        module = name.removesuffix(".weight")
        tensor = model.names.tensor(name)
        if tensor in model.source or module in stored or tensor.removesuffix(".weight") in stored:
            continue
        base = model.spec.blocks.split(".")[0] + "."
        if module.removeprefix(base) in stored:
            continue
        if name == f"{model.spec.head}.weight" and (tie_is_wrong or has_tied_head(model.skeleton)):
            continue
        index, _, local = name.removeprefix(prefix).partition(".")
        pieces = getattr(model.spec, "checkpoint", {}).get(local) if name.startswith(prefix) else None
        if pieces:
            first = f"{prefix}{index}.{pieces[0]}".replace("{expert}", "0")
            if first in model.source or first.removesuffix(".weight") in stored:
                continue
        absent.append(name)
    if not absent:
        return []
    more = f" and {len(absent) - 1} more tensors" if len(absent) > 1 else ""
    return [
        Finding(
            "tensors",
            f"{absent[0]}{more} of the model are in no weight file; is a shard missing?",
            facts={"tensors": absent},
        )
    ]


# ------------------------------------------------------------------------------------------ side files


def chat_template(folder: Path) -> str | None:
    """The folder's chat template: chat_template.jinja, or the one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except ValueError:
        return None


def _tokenizer(folder: Path, source: Source, trust_remote_code: bool) -> list[Finding]:
    if not any((folder / n).is_file() for n in TOKENIZER_FILES):
        return [
            Finding(
                "side-files",
                "there is no tokenizer (tokenizer.json or tokenizer.model)",
                facts={"file": "tokenizer.json"},
            )
        ]
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code)
    except UserError as e:
        return [Finding("side-files", str(e), facts={"file": "tokenizer_config.json"})]
    out = []
    vocabulary = source.config.get("vocab_size")
    if vocabulary and len(tokenizer) > vocabulary:
        out.append(
            Finding(
                "tokenizer",
                f"the tokenizer has {len(tokenizer)} tokens and the model {vocabulary} rows for them",
                severe=False,
            )
        )
    if chat_template(folder) is None:
        out.append(
            Finding(
                "chat-template",
                "there is no chat template, so chat clients cannot format messages",
                severe=False,
            )
        )
    return out
