"""What a machine can do: memory bandwidth and arithmetic, measured here or from a table of devices.

Decoding one sequence reads every weight and the whole KV cache once a token, so it cannot be faster than
bandwidth / bytes per token. Prefill does 2 x parameters floating-point operations a token and is bound by
arithmetic instead. Comparing a measured speed with these two roofs says what there is to gain
(Williams, Waterman, Patterson 2009, "Roofline").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quantkit.errors import UserError
from quantkit.plugins import suggest

GB = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """memory: bytes. bandwidth: peak read bytes a second. flops: dense 16-bit operations a second.

    0 means not known. These are peaks of data sheets: a measured stream stays below them.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float = 0.0
    source: str = ""


def _device(name: str, memory_gb: float, gb_per_s: float, tflops: float, source: str) -> Device:
    return Device(name, memory_gb * GB, gb_per_s * GB, tflops * 1e12, source)


# From the vendors' data sheets, written down from memory and not checked against the sheets again. Arithmetic
# is dense bfloat16 or float16. GPU memory is the marketed size in GB (10^9 bytes), of which some hundreds of
# MB are never free. For CPUs: bandwidth of all channels of one socket; their memory is the buyer's choice.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _device("H200", 141, 4800, 989, "NVIDIA H200 SXM data sheet"),
        _device("H100-SXM", 80, 3350, 989, "NVIDIA H100 data sheet, SXM5"),
        _device("H100-PCIe", 80, 2039, 756, "NVIDIA H100 data sheet, PCIe"),
        _device("A100-80GB", 80, 2039, 312, "NVIDIA A100 data sheet, SXM4 80 GB"),
        _device("A100-40GB", 40, 1555, 312, "NVIDIA A100 data sheet, 40 GB"),
        _device("L40S", 48, 864, 362, "NVIDIA L40S data sheet"),
        _device("L4", 24, 300, 121, "NVIDIA L4 data sheet"),
        _device("A10G", 24, 600, 70, "NVIDIA A10G (AWS G5), DA-09936"),
        _device("T4", 16, 320, 65, "NVIDIA T4 data sheet (float16)"),
        _device("V100-32GB", 32, 900, 125, "NVIDIA V100 data sheet (float16)"),
        _device(
            "RTX-5090", 32, 1792, 209, "NVIDIA Blackwell architecture paper, RTX 5090, fp32 accumulation"
        ),
        _device("RTX-4090", 24, 1008, 165, "NVIDIA Ada architecture paper, RTX 4090, fp32 accumulation"),
        _device("RTX-3090", 24, 936, 71, "NVIDIA Ampere GA102 paper, RTX 3090, fp32 accumulation"),
        _device("RTX-3060", 12, 360, 25, "NVIDIA GA106, RTX 3060 12 GB, fp32 accumulation"),
        _device("MI300X", 192, 5300, 1307, "AMD Instinct MI300X data sheet"),
        _device("M2-Ultra", 192, 800, 54, "Apple M2 Ultra, largest configuration; GPU float16"),
        _device("M3-Max", 128, 400, 28, "Apple M3 Max, 40-core GPU, largest configuration"),
        _device("DDR4-3200-2ch", 0, 51.2, 0, "JEDEC: 2 channels x 8 bytes x 3200 MT/s"),
        _device("DDR5-5600-2ch", 0, 89.6, 0, "JEDEC: 2 channels x 8 bytes x 5600 MT/s"),
        _device("EPYC-9004", 0, 460.8, 0, "AMD EPYC 9004: 12 channels x 8 bytes x 4800 MT/s"),
        _device("Xeon-SPR", 0, 307.2, 0, "Intel Xeon 4th generation: 8 channels x 8 bytes x 4800 MT/s"),
    )
}


def device(name: str) -> Device:
    """A device of the table, whatever the case. Raises UserError with the nearest names."""
    known = {key.lower(): value for key, value in DEVICES.items()}
    found = known.get(name.lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise UserError(f"unknown device {name!r}: {suggest(name, list(DEVICES))}, or give --memory")
    return found


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured on this machine. bandwidth: bytes a second read. flops: by dtype name, operations a second.

    threads: how many were used; both figures depend on them and on what else the machine does.
    """

    bandwidth: float
    flops: dict[str, float]
    threads: int
    device: str = "cpu"

    @property
    def ridge(self) -> dict[str, float]:
        """Operations per byte from which arithmetic, not memory, is the limit, by dtype."""
        return {name: rate / self.bandwidth for name, rate in self.flops.items()}


def measure(
    device_name: str = "cpu",
    seconds: float = 0.3,
    size: int = 256 << 20,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Roofline:
    """Measure this machine with torch's own kernels, about ``seconds`` for each figure.

    size: bytes of the array that is read; it must exceed the last-level cache several times over, or the
        cache is measured (a server's may hold 100 MB and more).
    """
    flops = {str(d).removeprefix("torch."): matmul_rate(d, device_name, seconds) for d in dtypes}
    return Roofline(read_bandwidth(device_name, size, seconds), flops, torch.get_num_threads(), device_name)


def read_bandwidth(device_name: str = "cpu", size: int = 256 << 20, seconds: float = 0.3) -> float:
    """Bytes a second that a matrix-vector product reads: what decoding does, rather than a bare copy.

    The best of several passes: other processes can only make a pass slower.
    """
    columns = 4096
    matrix = torch.ones(max(1, size // (4 * columns)), columns, device=device_name)
    vector = torch.ones(columns, device=device_name)
    best = _best_time(lambda: torch.mv(matrix, vector), seconds, device_name)
    return matrix.numel() * 4 / best


def matmul_rate(
    dtype: torch.dtype, device_name: str = "cpu", seconds: float = 0.3, width: int = 1024
) -> float:
    """Operations (multiply and add count as two) a second of a square ``F.linear``, the work of a prefill."""
    a = torch.ones(width, width, dtype=dtype, device=device_name)
    best = _best_time(lambda: F.linear(a, a), seconds, device_name)
    return 2 * width**3 / best


def _best_time(work: Callable[[], object], seconds: float, device_name: str) -> float:
    wait = torch.cuda.synchronize if device_name.startswith("cuda") else _nothing
    work(), wait()
    best, end, turns = float("inf"), time.perf_counter() + seconds, 0
    while turns < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work(), wait()
        best = min(best, time.perf_counter() - start)
        turns += 1
    return best


def _nothing() -> None:
    """A CPU has nothing to wait for."""


def bytes_per_step(weight_bytes: float, cache_bytes_per_token: float, context: int, batch: int = 1) -> float:
    """Bytes read by one decoding step: all weights once, and the cache of every sequence.

    weight_bytes: the weights that a step reads. Of an embedding only single rows are read, so an *untied*
    embedding does not count; a tied one does, as the head.
    """
    return weight_bytes + batch * context * cache_bytes_per_token


def decode_rate(bandwidth: float, step_bytes: float, batch: int = 1) -> float:
    """Tokens a second, at most: ``batch * bandwidth / step_bytes``."""
    if step_bytes <= 0:
        raise ValueError(f"a decoding step must read something, not {step_bytes} bytes")
    return batch * bandwidth / step_bytes


def prefill_seconds(flops: float, parameters: float, tokens: int, batch: int = 1) -> float:
    """Seconds of a prefill, at least: 2 operations per parameter and token (attention scores left out)."""
    if flops <= 0:
        raise ValueError("the arithmetic rate of this device is not known")
    return 2 * parameters * tokens * batch / flops


def bound_by(
    roof: Roofline, parameters: float, weight_bytes: float, tokens: int, dtype: str = "float32"
) -> str:
    """Either "arithmetic" or "bandwidth": which roof a pass over ``tokens`` tokens at once meets first."""
    arithmetic = 2 * parameters * tokens / roof.flops[dtype]
    return "arithmetic" if arithmetic > weight_bytes / roof.bandwidth else "bandwidth"
