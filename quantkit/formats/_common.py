"""What the file formats share: refusals, exact casts, groups and their order, name patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UserError
from quantkit.qweight import QuantWeight, group_index
from quantkit.scheme import Scheme, SchemeError

# Linears that serving engines fuse when they load a model; patterns must match the fused names too.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # tensor name -> dtype, shape


class CannotStore(UserError):
    """A format cannot hold a weight exactly; the message says why, by how much, and what to do."""


class CannotRead(UserError):
    """Tensors and configuration of a checkpoint contradict each other, or are unknown to quantkit."""


def modules_of(fmt: ModuleType, names: Iterable[str]) -> dict[str, list[str]]:
    """Quantized modules of a checkpoint in the format ``fmt``: module name -> names of its tensors, sorted.

    A tensor belongs to a module when it ends in one of ``fmt.suffixes`` and the module has ``fmt.marker``.
    """
    known = set(names)
    modules = sorted(n.removesuffix(fmt.marker) for n in known if n.endswith(fmt.marker))
    return {m: sorted(m + s for s in fmt.suffixes if m + s in known) for m in modules}


def need(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """``tensors[name]``, or CannotRead that lists what is there."""
    if name not in tensors:
        have = ", ".join(sorted(tensors)) or "nothing"
        raise CannotRead(
            f"tensor {name} is missing (found: {have}); the checkpoint is incomplete, download it again"
        )
    return tensors[name]


def exact_scale(module: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast scales, raising CannotStore with the largest error when that would change a value."""
    out = scale.to(dtype)
    if not torch.equal(out.float(), scale.float()):
        error = (out.float() - scale.float()).abs().max().item()
        raise CannotStore(
            f"{module}: scales in {_short(scale.dtype)} are not exact in {_short(dtype)} "
            f"(largest error {error:.3g}); quantize with scale_dtype {_short(dtype)}"
        )
    return out


def refuse_ragged(scheme: Scheme, columns: int) -> str | None:
    """Why a row of ``columns`` weights does not divide into whole groups, with the group that would."""
    if scheme.group == 0 or columns % scheme.group == 0:
        return None
    fits = next((g for g in (128, 64, 32, 16, 8) if g < scheme.group and columns % g == 0), 0)
    remedy = f"use group {fits} or one scale per row (group 0)" if fits else "use one scale per row (group 0)"
    return f"group {scheme.group} does not divide {columns} columns and loaders expect whole groups; {remedy}"


def checked_group(module: str, columns: int, groups: int, configured: int | None) -> int:
    """The group size of ``groups`` scales over ``columns`` weights; 0 is the whole row.

    configured: what the checkpoint's configuration says (0 or -1: whole row), or None to go by the tensors.
    Raises CannotRead when the tensors say otherwise.
    """
    wanted = None if configured is None else max(configured, 0)
    if wanted is not None:
        expected = 1 if wanted == 0 else -(-columns // wanted)
        if expected == groups:
            return wanted
        says = "one scale per row" if wanted == 0 else f"group size {wanted} ({expected} groups)"
        raise CannotRead(
            f"{module}: the configuration says {says}, but the tensors hold {groups} groups of "
            f"{columns} columns"
            + (f", that is group size {columns // groups}" if columns % groups == 0 else "")
        )
    if groups == 1:
        return 0
    if columns % groups:
        raise CannotRead(
            f"{module}: {groups} groups do not divide {columns} columns, and no group size is given"
        )
    return columns // groups


def is_ordered(qweight: QuantWeight) -> bool:
    """Do groups hold other columns than their neighbours? An order that changes nothing does not count."""
    if qweight.order is None:
        return False
    runs = group_index(qweight.shape[1], qweight.scheme.group)
    return not torch.equal(qweight.columns_to_groups(), runs)


def order_from_index(module: str, g_idx: Tensor, group: int) -> Tensor | None:
    """Column order behind a group index ``g_idx [in]``; None when groups are runs of neighbouring columns."""
    runs = group_index(g_idx.numel(), group)
    index = g_idx.long().cpu()
    if torch.equal(index, runs):
        return None
    order = torch.argsort(index, stable=True)
    if not torch.equal(index[order], runs):
        raise CannotRead(f"{module}: g_idx does not put {group} columns into each group; the file is damaged")
    return order


def make_scheme(module: str, **fields: Any) -> Scheme:
    """A Scheme, with the module named when a foreign checkpoint holds one that quantkit does not have."""
    try:
        return Scheme(**fields)
    except SchemeError as error:
        raise CannotRead(f"{module}: {error}") from None


def scale_dtype_name(module: str, scale: Tensor) -> str:
    name = _short(scale.dtype)
    if name not in ("float16", "bfloat16", "float32"):
        raise CannotRead(f"{module}: scales of dtype {name} are no integer quantization that quantkit reads")
    return name


def with_fused(modules: Iterable[str]) -> list[str]:
    """The names, plus the name of every fused module all of whose parts are among them."""
    names = list(modules)
    parts: dict[tuple[str, str], set[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for fused, members in FUSED.items():
            if leaf in members:
                parts.setdefault((parent, fused), set()).add(leaf)
    extra = [f"{parent}.{fused}" for (parent, fused), seen in parts.items() if seen == set(FUSED[fused])]
    return names + extra


def names_pattern(modules: Iterable[str]) -> str:
    """One anchored regular expression that matches exactly these module names.

    Names that differ only in their first number share a branch::

        layers.0.mlp.up_proj, layers.1.mlp.up_proj -> ^(?:layers\\.(?:0|1)\\.mlp\\.up_proj)$
    """
    numbered: dict[tuple[str, str], list[str]] = {}
    branches: list[str] = []
    for name in modules:
        hit = re.search(r"(?<=\.)\d+(?=\.)", name)
        if hit:
            numbered.setdefault((name[: hit.start()], name[hit.end() :]), []).append(hit.group())
        else:
            branches.append(re.escape(name))
    for (head, tail), numbers in numbered.items():
        middle = numbers[0] if len(numbers) == 1 else f"(?:{'|'.join(numbers)})"
        branches.append(re.escape(head) + middle + re.escape(tail))
    return f"^(?:{'|'.join(branches)})$"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
