"""What this machine and installation can do, and whether the kernels are right: each against the oracle."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.kernels import native
from quantkit.kernels.linear import Request, backends, reference
from quantkit.qweight import QuantWeight
from quantkit.roofline import read_bandwidth
from quantkit.scheme import Scheme

EXTRAS = {"lm_eval": "eval", "matplotlib": "eval", "gguf": "gguf", "compressed_tensors": "interop",
          "bitsandbytes": "bnb", "triton": "gpu"}  # fmt: skip
# Exact kernels differ from the oracle by the order of float32 sums alone.
SCHEMES = (
    Scheme(4, True, 32),
    Scheme(4, False, 64),
    Scheme(8, True, 128),
    Scheme(8, True, 0, activation="int8"),
)
SHAPE = (48, 192)  # small, and no power of two
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One backend on one scheme. error: relative to the largest output of the oracle; None with a refusal."""

    backend: str
    scheme: Scheme
    error: float | None
    refusal: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None or self.error <= TOLERANCE


def check_kernels(device: str = "cpu") -> list[KernelCheck]:
    """Every backend but the oracle, on every scheme of SCHEMES, float32 activations."""
    found = []
    for scheme in SCHEMES:
        weight, x = _problem(scheme)
        request = Request.of(weight, device, torch.float32)
        want = reference.prepare(weight, None, request)(x)
        for name, module in backends().items():
            if name == "reference":
                continue
            reason = module.why_not(request)
            if reason is not None:
                found.append(KernelCheck(name, scheme, None, reason))
                continue
            got = module.prepare(weight, None, request)(x)
            error = float((got.float().cpu() - want.float()).abs().max() / want.abs().max())
            found.append(KernelCheck(name, scheme, error))
    return found


def _problem(scheme: Scheme) -> tuple[QuantWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, columns = SHAPE
    codes = torch.randint(scheme.max_code + 1, SHAPE, generator=generator).to(torch.uint8)
    groups = scheme.groups(columns)
    scale = (0.01 + 0.02 * torch.rand(rows, groups, generator=generator)).to(
        getattr(torch, scheme.scale_dtype)
    )
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(scheme.max_code + 1, (rows, groups), generator=generator).to(torch.uint8)
    return QuantWeight(scheme, codes, scale, zero), torch.randn(5, columns, generator=generator)


def best_bandwidth() -> tuple[float, str]:
    """(bytes a second, how): the better of torch's matrix-vector product and the native reader on huge pages."""
    by_torch = read_bandwidth()
    if native.why_unavailable() is not None:
        return by_torch, "torch matrix-vector product"
    size = 256 << 20
    data = native.aligned_empty(size)
    data.fill_(1)
    by_native = size / min(native.library().qk_read_seconds(data.data_ptr(), size) for _ in range(20))
    if by_native > by_torch:
        return by_native, "native reader, huge pages"
    return by_torch, "torch matrix-vector product"


def packages() -> dict[str, str | None]:
    """Version of what quantkit stands on, and of its extras; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in ("quantkit", "torch", "transformers", "safetensors", "numpy", *EXTRAS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def runtimes_folder() -> Path:
    """Where runtimes have their environments: $QUANTKIT_RUNTIMES or ~/.cache/quantkit/runtimes."""
    return Path(os.environ.get("QUANTKIT_RUNTIMES") or Path.home() / ".cache" / "quantkit" / "runtimes")


def runtimes() -> list[str]:
    """Names of the runtime environments that are there."""
    return sorted(p.parent.parent.name for p in runtimes_folder().glob("*/bin/python"))
