"""Quantized linear layers: one operation, several backends, each a module of this folder.

A backend module has ``PRIORITY`` (the highest that does not refuse is taken), ``why_not(request)`` (None, or
the sentence that says why not) and ``prepare(weight, bias, request)``, which repacks a QuantWeight for its
kernels and returns a callable ``x [..., in] -> y [..., out]``. Modules without ``why_not`` are helpers.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from quantkit.plugins import suggest
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

CPU = torch.device("cpu")
PRECISIONS = ("exact", "int16", "bf16", "int8")


class NoBackend(RuntimeError):
    """Every backend refused; the message lists their reasons."""


@dataclass(frozen=True)
class Request:
    """What a linear layer is asked to do.

    scheme, rows (out), cols (in), has_order: the weight. device, dtype: of the activations.
    precision: "exact" (the products lose nothing: bf16 dot for bf16 activations, else fp32), "int16"
        (activations rounded to 2^-16 of the largest in their group: the fastest on CPUs at nearly fp32's
        accuracy), "bf16" (rounded to bf16), or "int8" (rounded to int8, one scale per group). A scheme with
        int8 activations is always computed with one int8 scale per token, as its name says.
    """

    scheme: Scheme
    rows: int
    cols: int
    has_order: bool = False
    device: torch.device = CPU
    dtype: torch.dtype = torch.bfloat16
    precision: str = "exact"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"unknown precision {self.precision!r}: {suggest(self.precision, list(PRECISIONS))}"
            )

    @staticmethod
    def of(
        weight: QuantWeight,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        precision: str = "exact",
    ) -> Request:
        rows, cols = weight.shape
        return Request(
            weight.scheme, rows, cols, weight.order is not None, torch.device(device), dtype, precision
        )


@dataclass(frozen=True)
class Choice:
    """The backend taken, and the reason of each that refused."""

    backend: str
    refusals: dict[str, str] = field(default_factory=dict)


@functools.cache
def backends() -> dict[str, ModuleType]:
    """Backend modules by name, most preferred first."""
    modules = {
        m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    }
    offered = {name: module for name, module in modules.items() if hasattr(module, "why_not")}
    return dict(sorted(offered.items(), key=lambda item: -item[1].PRIORITY))


def choose(request: Request, backend: str | None = None) -> Choice:
    """The best backend for a request, or the named one.

    Raises NoBackend when all refuse (or the named one does), LookupError when there is no such name.
    """
    known = backends()
    if backend is not None and backend not in known:
        raise LookupError(f"unknown kernel backend {backend!r}: {suggest(backend, list(known))}")
    refusals: dict[str, str] = {}
    for name in known if backend is None else [backend]:
        reason = known[name].why_not(request)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NoBackend(
        f"no kernel for {request.scheme} {request.rows}x{request.cols} on {request.device}: {reasons}"
    )


def prepare(
    weight: QuantWeight, bias: Tensor | None, request: Request, backend: str | None = None
) -> Callable[[Tensor], Tensor]:
    """Repack a weight for the chosen backend; returns ``x [..., in] -> y [..., out]`` in x's dtype.

    bias: ``[out]`` or None. Raises as :func:`choose` does.
    """
    return backends()[choose(request, backend).backend].prepare(weight, bias, request)
