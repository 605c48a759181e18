"""A report with invented numbers, for tests of the rendering: nothing in it was measured."""

from __future__ import annotations

import random

from quantkit.evals import row
from quantkit.report import Report, Sample, Variant

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
TEXT = {"corpus": "wikitext2-test", "windows_name": "wikitext2-test, 512 tokens, no BOS, first 8 of 600 windows",
        "seq_len": 512, "data_sha256": "abc"}  # fmt: skip


def variant(name, size, ppl, kl, rate, bits, scale, seed):
    draw = random.Random(seed)
    base = [3.0 + 0.2 * ((7 * i) % 8) for i in range(8)]
    nll = [x + (ppl - 20) / 20 + draw.gauss(0, 0.004) for x in base]
    rows = [
        row("file_bytes", size, "bytes"),
        row("perplexity", ppl, "", 1.9, **TEXT),
        row("nll", sum(nll) / 8, "nats/token", 0.09, per_window=nll, **TEXT),
        *(
            row("cache_bytes", c * 23040 * bits / 16, "bytes", context=c, bits=bits)
            for c in (512, 2048, 8192)
        ),
        row("cache_bytes_per_token", 23040 * bits / 16, "bytes"),
        row("peak_rss", 2 * size + 3e8, "bytes"),
        row("toy/acc", 0.5 - kl / 4, "fraction", 0.02, task="toy", higher_is_better=True),
    ]
    if kl:
        rows += [row("kl", kl, "nats/token", kl / 15, per_window=[kl * (1 + i / 90) for i in range(8)], **TEXT),
                 row("top1_agreement", 1 - kl, "fraction", 0.004, **TEXT)]  # fmt: skip
    for prompt in (128, 1024):
        about = {"prompt_tokens": prompt, "batch": 1}
        rows += [
            row("ttft_median", prompt / rate * 5, "ms", **about),
            row("ttft_p90", prompt / rate * 6, "ms", **about),
            row("itl_median", 1000 / rate, "ms", **about),
            row("itl_p90", 1200 / rate, "ms", **about),
            row("decode_rate", rate * (0.9 if prompt > 500 else 1), "tokens/s", **about),
        ]
    errors = {
        f"model.layers.{b}.{k}": scale * (1 + b / 30) * draw.uniform(0.7, 1.3)
        for b in range(30)
        for k in KINDS
    }
    samples = [Sample("The capital of France is", f" Paris. ({name})\n<b>not bold</b> & so on"),
               Sample("Write a haiku about rivers.", "Water finds its way\nunder stones that do not ask\nwhere the sea may be")]  # fmt: skip
    note = f"{name}: invented for a test"
    return Variant(
        name, rows, errors if scale else {}, samples, note, {"command": "quantkit eval x", "cores": 2}
    )


def report():
    return Report(
        "SmolLM2-135M-Instruct (synthetic)",
        [
            variant("original", 269e6, 20.0, 0, 21, 16, 0, 0),
            variant("W8 rtn", 163e6, 20.02, 0.0009, 33, 16, 0.01, 1),
            variant("W4 gptq g64", 110e6, 20.9, 0.05, 57, 16, 0.06, 2),
            variant("W4 rtn g64", 110e6, 22.5, 0.12, 57, 16, 0.11, 3),
            variant("W4 gptq + KV8", 110e6, 20.95, 0.052, 60, 8.4, 0.06, 4),
        ],
    )
