"""What a quantized KV cache costs, measured in decode mode.

A text is fed through the cache in chunks of 32, next to the full-precision cache fed alike. For quantkit's
caches
whose page and window are multiples of the chunk this equals feeding token by token (tests/kv shows it): a
query sees
a page packed exactly when the page was due before the query's own step. transformers' QuantizedCache
flushes each
128 tokens, a multiple of the chunk, so the same holds for it after its first chunk.

    python -m quantkit.evals.decode_kv MODEL --text BOOK.txt --kv int4 --kv int8 --context 2048 --windows 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from quantkit.kvscheme import KVScheme
from quantkit.nn.quant_cache import QuantCache

CHUNK = 32
CacheMaker = Callable[[Any], Any]  # model config -> empty cache


@dataclass
class Score:
    """Sums over scored positions; ``kl`` in nats per token against the full-precision cache.

    quarters: KL of each quarter of the scored positions, to see errors build up.
    """

    tokens: int = 0
    kl_sum: float = 0.0
    nll_sum: float = 0.0
    ref_nll_sum: float = 0.0
    same_top: int = 0
    worst: float = 0.0
    quarters: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(4)])

    def add(self, reference: Tensor, logits: Tensor, targets: Tensor, place: Tensor) -> None:
        """reference, logits: ``[tokens, vocab]``; targets: ``[tokens]``; place in [0, 1): where in the
        text."""
        ref, new = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
        kl = (ref.exp() * (ref - new)).sum(-1)
        self.tokens += kl.numel()
        self.kl_sum += float(kl.sum())
        self.worst = max(self.worst, float(kl.max()))
        self.nll_sum -= float(new.gather(-1, targets[:, None]).sum())
        self.ref_nll_sum -= float(ref.gather(-1, targets[:, None]).sum())
        self.same_top += int((ref.argmax(-1) == new.argmax(-1)).sum())
        for quarter, value in zip((place * 4).long().clamp(0, 3).tolist(), kl.tolist()):
            self.quarters[quarter][0] += value
            self.quarters[quarter][1] += 1

    def metrics(self) -> dict[str, Any]:
        n = max(self.tokens, 1)
        return {
            "kl": self.kl_sum / n,
            "perplexity": math.exp(self.nll_sum / n),
            "reference_perplexity": math.exp(self.ref_nll_sum / n),
            "top1_agreement": self.same_top / n,
            "worst_token_kl": self.worst,
            "kl_by_quarter": [round(s / c, 7) if c else None for s, c in self.quarters],
            "tokens": self.tokens,
        }


def cache_maker(name: str) -> CacheMaker:
    """A cache by name: a quantkit format (:meth:`KVScheme.parse`), ``"dynamic"``, or a peer.

    Peers are transformers' own QuantizedCache: ``"peer-quanto4"``, ``"peer-hqq4"``, ``"peer-hqq8"``,
    ``"peer-fp8"``
    and so on (group 64, residual 128, their defaults); hqq needs axis 1 as its documentation demands.
    """
    if name == "dynamic":
        return lambda config: DynamicCache(config=config)
    if name == "peer-fp8":
        return lambda config: _peer(config, backend="fp8")
    if name.startswith("peer-"):
        backend, bits = name[5:].rstrip("0123456789"), int(name[-1])
        axis = 1 if backend == "hqq" else 0
        return lambda config: _peer(config, backend=backend, nbits=bits, axis_key=axis, axis_value=axis)
    scheme = KVScheme.parse(name)
    return lambda config: QuantCache(config, scheme)


def _peer(config: Any, **kwargs: Any) -> Any:
    from transformers import QuantizedCache

    return QuantizedCache(config=config, **kwargs)


class SideBySide(Cache):
    """Several caches of one sequence each, run as one batch, so that the model's weights are read once for
    all."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__(layers=caches[0].layers)
        self.caches = caches

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows = [
            cache.update(key_states[i : i + 1], value_states[i : i + 1], layer_idx)
            for i, cache in enumerate(self.caches)
        ]
        return torch.cat([keys for keys, _ in rows]), torch.cat([values for _, values in rows])


@torch.no_grad()
def compare(
    model: Any, windows: list[Tensor], makers: dict[str, CacheMaker], start: int, chunk: int = CHUNK
) -> dict[str, Score]:
    """Feed each window ``[tokens]`` through every cache and the full-precision one in lockstep.

    start: first position whose prediction is scored. chunk: tokens a step; where page and window of a
    format are
    multiples of it, the result is that of true decoding (chunk 1).
    """
    scores = {name: Score() for name in makers}
    for ids in windows:
        cache = SideBySide(
            [DynamicCache(config=model.config), *(make(model.config) for make in makers.values())]
        )
        for begin in range(0, len(ids) - 1, chunk):
            step = ids[None, begin : min(begin + chunk, len(ids) - 1)]
            keep = torch.arange(begin, begin + step.shape[1])
            scored = keep >= start
            wanted = (
                0 if scored.any() else 1
            )  # 0: all logits; the head of a small model costs as much as its body
            logits = model(step.expand(len(makers) + 1, -1), cache=cache, logits_to_keep=wanted).logits
            if scored.any():
                place = (keep[scored] - start) / max(1, len(ids) - 1 - start)
                for got, score in zip(logits[1:], scores.values()):
                    score.add(logits[0][scored], got[scored], ids[keep[scored] + 1], place)
    return scores


@torch.no_grad()
def measured_bytes(config: Any, make: CacheMaker, context: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes that a cache holds after ``context`` tokens of random states of ``dtype``, batch 1, decoded in
    chunks.

    Counted on the storage of its tensors, free slots and window included.
    """
    config = config.get_text_config(decoder=True)
    cache = make(config)
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, context, 128):
        shape = (1, heads, min(128, context - begin), dim)
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            cache.update(k, v, layer)
    if isinstance(cache, QuantCache):
        return cache.nbytes()
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for t in _tensors_in(vars(layer)):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(seen.values())


def _tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    """All plain tensors inside containers and tensor subclasses (quanto keeps codes and scales as
    attributes)."""
    if type(value) is Tensor:
        return [value]
    if not depth:
        return []
    if isinstance(value, Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else list(vars(value))
        return [t for name in names for t in _tensors_in(getattr(value, name), depth - 1)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors_in(v, depth - 1)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors_in(v, depth - 1)]
    return []


@torch.no_grad()
def needle(
    model: Any, tokenizer: Any, make: CacheMaker, haystack: Tensor, depths: tuple[float, ...], seed: int = 0
) -> float:
    """Share of digits recalled, of a five-digit number hidden at each depth of ``haystack [tokens]``.

    The number is asked for by repeating its sentence up to the number, and each digit is scored given the
    true
    ones before it, so a small base model can take part. Compare with the same measure on ``"dynamic"``.
    """
    generator = torch.Generator().manual_seed(seed)
    right = total = 0
    for depth in depths:
        number = "".join(str(int(d)) for d in torch.randint(0, 10, (5,), generator=generator))
        lead = " The secret number of the lighthouse keeper is "
        hidden = tokenizer(f"{lead}{number}.", add_special_tokens=False, return_tensors="pt").input_ids[0]
        ask = tokenizer(lead, add_special_tokens=False, return_tensors="pt").input_ids[0]
        answer = tokenizer(f"{lead}{number}", add_special_tokens=False, return_tensors="pt").input_ids[0][
            len(ask) :
        ]
        cut = max(1, int(depth * len(haystack)))
        ids = torch.cat([haystack[:cut], hidden, haystack[cut:], ask, answer])
        cache, logits = make(model.config), []
        for begin in range(0, len(ids), CHUNK):
            logits.append(model(ids[None, begin : begin + CHUNK], cache=cache).logits[0, -len(answer) - 1 :])
        guess = torch.cat(logits)[-len(answer) - 1 : -1].argmax(-1)
        right += int((guess == answer).sum())
        total += len(answer)
    return right / total


def text_windows(tokenizer: Any, text: str, length: int, count: int) -> list[Tensor]:
    """``count`` windows of ``length`` tokens, spread evenly over the middle 90 % of the text; a BOS token
    in front
    where the tokenizer puts one. Raises ValueError when the text is too short."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    with_special = tokenizer("a").input_ids
    bos = [tokenizer.bos_token_id] if with_special[0] == tokenizer.bos_token_id is not None else []
    first, last = int(0.05 * len(ids)), int(0.95 * len(ids))
    if last - first < length * count:
        raise ValueError(f"the text has {last - first} tokens after trimming, too few for {count} x {length}")
    stride = (last - first) // count
    body = length - len(bos)
    return [
        torch.cat([torch.tensor(bos, dtype=torch.long), ids[o : o + body]])
        for o in range(first, first + stride * count, stride)
    ]


def rows(
    model_name: str, kv: str, context: int, metrics: dict[str, Any], command: str
) -> list[dict[str, Any]]:
    """Result rows: one per metric, each with what is needed to repeat it."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    shared = {
        "command": command,
        "commit": commit,
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "date": datetime.date.today().isoformat(),
        "model": model_name,
        "kv": kv,
        "context": context,
    }
    return [shared | {"metric": metric, "value": value} for metric, value in metrics.items()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="quantkit.evals.decode_kv", description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--kv", action="append", required=True, help="a cache format; may be repeated")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument(
        "--start", type=int, help="first position that is scored (default: half of the context)"
    )
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument(
        "--needle", action="store_true", help="also retrieval of a number hidden at five depths"
    )
    parser.add_argument("--bytes-at", type=int, default=4096, help="context at which bytes are measured")
    parser.add_argument("--out", type=Path, help="append rows to this JSON-lines file")
    args = parser.parse_args(argv)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    windows = text_windows(tokenizer, args.text.read_text(encoding="utf-8"), args.context, args.windows)
    makers = {name: cache_maker(name) for name in args.kv}
    scores = compare(
        model, windows, makers, args.context // 2 if args.start is None else args.start, args.chunk
    )
    plain = measured_bytes(model.config, cache_maker("dynamic"), args.bytes_at)
    words = [Path(a).name if Path(a).exists() else a for a in (argv if argv is not None else sys.argv[1:])]
    command = shlex.join(["python", "-m", "quantkit.evals.decode_kv", *words])
    for name, score in scores.items():
        metrics = score.metrics()
        held = measured_bytes(model.config, makers[name], args.bytes_at)
        metrics |= {
            "bytes_per_token": held / args.bytes_at,
            "bytes_vs_bf16": held / plain,
            "bytes_at": args.bytes_at,
        }
        if args.needle:
            depths = (0.1, 0.3, 0.5, 0.7, 0.9)
            metrics["needle"] = needle(
                model, tokenizer, makers[name], windows[0][: args.context - 64], depths
            )
        shown = [f"{name:>32}  KL {metrics['kl']:.6f}", f"top1 {metrics['top1_agreement']:.4f}"]
        shown.append(f"ppl {metrics['perplexity']:.3f} ({metrics['reference_perplexity']:.3f})")
        shown.append(f"bytes {metrics['bytes_vs_bf16']:.4f} x bf16  quarters {metrics['kl_by_quarter']}")
        if args.needle:
            shown.append(f"needle {metrics['needle']:.2f}")
        print("  ".join(shown), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                for row in rows(Path(args.model).name, name, args.context, metrics, command):
                    out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
