"""Timing of the native kernels: read bandwidth first, then single linears, then whole decode steps.

``python -m quantkit.bench_kernels [MODEL_FOLDER ...]`` prints one JSON row per measurement. Every row has the
median, the best and the spread: on a shared machine the best says what the code can do, the median what the
neighbours leave.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.decode.native_step import LINEARS, NativeDecoder, quantize_head
from quantkit.kernels import native
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

SHAPES = ((1536, 576), (4096, 4096), (11008, 4096))  # SmolLM2's gate, a 7B attention and MLP
CODES = {"int8": native.INT8, "bf16": native.BF16_DOT, "fp32": native.FP32, "int16": native.INT16}
COLD_BYTES = 256 << 20  # weights cycled through so that none is still in cache: several times any L3 here

Row = dict[str, Any]


def _statistics(seconds: Tensor) -> Row:
    p10, median, p90 = torch.quantile(seconds, torch.tensor([0.1, 0.5, 0.9], dtype=seconds.dtype)).tolist()
    return {
        "best_us": seconds.min().item() * 1e6,
        "p10_us": p10 * 1e6,
        "median_us": median * 1e6,
        "p90_us": p90 * 1e6,
        "samples": len(seconds),
    }


def machine() -> Row:
    """What ran: instruction set, threads, processor."""
    return {
        "isa": native.isa(),
        "threads": native.library().qk_threads(),
        "machine": platform.processor() or platform.machine(),
    }


def read_bandwidth(repeats: int = 20) -> Row:
    """GB/s of all threads reading 256 MiB on huge pages."""
    data = native.aligned_empty(COLD_BYTES)
    data.fill_(1)
    seconds = torch.tensor(
        [native.library().qk_read_seconds(data.data_ptr(), COLD_BYTES) for _ in range(repeats)],
        dtype=torch.float64,
    )
    return {
        "metric": "read_bandwidth",
        "bytes": COLD_BYTES,
        "best_gb_s": COLD_BYTES / seconds.min().item() / 1e9,
        "median_gb_s": COLD_BYTES / seconds.median().item() / 1e9,
        **_statistics(seconds),
    }


def _random_weight(rows: int, cols: int, bits: int, group: int) -> QuantWeight:
    scheme = Scheme(bits, True, group, "float16")
    codes = torch.randint(0, scheme.max_code + 1, (rows, cols), dtype=torch.uint8)
    scale = (torch.rand(rows, scheme.groups(cols)) * 0.01 + 0.001).to(torch.float16)
    return QuantWeight(scheme, codes, scale)


def time_linear(
    rows: int,
    cols: int,
    bits: int,
    group: int,
    precision: str,
    tokens: int,
    bandwidth: float,
    budget: float = 1.0,
) -> Row:
    """One linear over cold weights. bandwidth: GB/s to compare with; budget: seconds to spend, about."""
    first = native.pack(_random_weight(rows, cols, bits, group))
    nbytes = first.data.numel()
    count = max(2, COLD_BYTES // nbytes)
    arena = native.aligned_empty(count * nbytes)
    arena.view(count, nbytes).copy_(first.data)
    weights = (native.CWeight * count)()
    for i in range(count):
        weights[i] = native.CWeight(first.c_weight().shape, arena.data_ptr() + i * nbytes)
    x, y = torch.randn(tokens, cols), torch.empty(tokens, rows)

    def measure(repeats: int) -> Tensor:
        seconds = torch.empty(repeats, dtype=torch.float64)
        arguments = (count, x.data_ptr(), y.data_ptr(), tokens, CODES[precision], repeats, seconds.data_ptr())
        native.check(native.library().qk_time_linear(weights, *arguments))
        return seconds

    guess = measure(5).median().item()
    seconds = measure(int(min(2000, max(20, budget / guess))))
    best, median = seconds.min().item(), seconds.median().item()
    return {
        "metric": "linear",
        "rows": rows,
        "cols": cols,
        "bits": bits,
        "group": group,
        "activations": precision,
        "tokens": tokens,
        "bytes": nbytes,
        "best_gb_s": nbytes / best / 1e9,
        "median_gb_s": nbytes / median / 1e9,
        "best_percent_of_bandwidth": 100 * nbytes / best / 1e9 / bandwidth,
        "best_gmac_s": rows * cols * tokens / best / 1e9,
        **_statistics(seconds),
    }


def rtn_weights(folder: str | Path, scheme: Scheme) -> tuple[Any, dict[str, QuantWeight | Tensor]]:
    """A Hugging Face folder with its block linears rounded to nearest: (config, weights by name)."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights: dict[str, QuantWeight | Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            linear = any(name.endswith(f"{part}.weight") for part in LINEARS.values())
            weights[name] = quantize_head(tensor, scheme) if linear else tensor
    return AutoConfig.from_pretrained(folder), weights


def time_decoder(
    decoder: NativeDecoder, bandwidth: float, contexts: Sequence[int] = (128, 512, 2048), steps: int = 128
) -> Iterator[Row]:
    """Prefill and greedy decode at several contexts, on random tokens (the speed does not depend on them)."""
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        ids = torch.randint(0, decoder.vocab, (context,), generator=generator)
        prefill = []
        for _ in range(2):
            decoder.reset()
            start = time.perf_counter()
            decoder.prefill(ids)
            prefill.append(time.perf_counter() - start)
        times: list[float] = []
        for _ in range(3):
            decoder.crop(context - 1)
            decoder.generate_greedy(ids[-1:], steps // 3 + 1, seconds=times)
        seconds = torch.tensor(times, dtype=torch.float64)
        best, median = seconds.min().item(), seconds.median().item()
        nbytes = decoder.bytes_per_token + decoder.cache_bytes * context // decoder.capacity
        yield {
            "metric": "decode",
            "context": context,
            "bytes_per_token": nbytes,
            "best_tok_s": 1 / best,
            "median_tok_s": 1 / median,
            "best_percent_of_bandwidth": 100 * nbytes / best / 1e9 / bandwidth,
            "prefill_tok_s": context / min(prefill),
            **_statistics(seconds),
        }


def run(
    models: Sequence[str | Path] = (), scheme: Scheme | None = None, precision: str = "exact"
) -> Iterator[Row]:
    """Bandwidth, then kernels (no models given) or decoders. Yields rows as they are measured."""
    about = machine()
    bandwidth = read_bandwidth()
    yield {**about, **bandwidth}
    best = bandwidth["best_gb_s"]
    if not models:
        for rows, cols in SHAPES:
            for bits in (4, 8):
                for activations in CODES:
                    yield {**about, **time_linear(rows, cols, bits, 64, activations, 1, best)}
            for tokens in (8, 64):
                for activations in ("int8", "int16", "bf16"):
                    yield {**about, **time_linear(rows, cols, 4, 64, activations, tokens, best)}
    scheme = scheme or Scheme(4, True, 64, "float16")
    for folder in models:
        config, weights = rtn_weights(folder, scheme)
        decoder = NativeDecoder(config, weights, precision=precision, capacity=2304)
        named = {"model": Path(folder).name, "weights": str(scheme), "precision": precision}
        for row in time_decoder(decoder, best):
            yield {**about, **named, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", help="Hugging Face folders; kernels alone are timed when there is none"
    )
    parser.add_argument(
        "--precision", default="exact", help="activations of the decoder: exact, bf16, fp32, int8"
    )
    arguments = parser.parse_args()
    for row in run(arguments.models, precision=arguments.precision):
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
