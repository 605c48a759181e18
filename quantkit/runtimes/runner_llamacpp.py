"""Log-probabilities and a greedy continuation from llama.cpp, as JSON. Runs inside its own environment.

    runner_llamacpp.py MODEL.gguf PROMPTS.json [--tokens 16] [--kv-cache f16|q8_0|q4_0]

PROMPTS.json: a list of lists of token ids. Output (the last line of stdout): {"runtime", "version",
"prompts": [{"logprobs": [...], "top": [...], "ids": [[...]], "values": [[...]], "continuation": [...]}]}.
``logprobs[i]`` is log p(token i+1 | tokens 0..i), in nats, ``top[i]`` the likeliest next token there;
``ids[i]`` and ``values[i]`` are the LIKELIEST tokens and their log-probabilities. A refusal prints {"error":
"..."} and exits 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback

LIKELIEST = 64  # tokens a position: enough to hold nearly all probability


def run(path: str, prompts: list[list[int]], tokens: int, kv_cache: str) -> dict:
    import llama_cpp
    import numpy as np

    kinds = {
        "f16": llama_cpp.GGML_TYPE_F16,
        "q8_0": llama_cpp.GGML_TYPE_Q8_0,
        "q4_0": llama_cpp.GGML_TYPE_Q4_0,
    }
    longest = max(map(len, prompts)) + tokens + 1
    model = llama_cpp.Llama(
        model_path=path,
        n_ctx=longest,
        n_batch=longest,
        n_threads=os.cpu_count(),
        logits_all=True,
        verbose=False,
        type_k=kinds[kv_cache],
        type_v=kinds[kv_cache],
        flash_attn=kv_cache != "f16",
    )
    out = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        scores = np.array(model.scores[: len(prompt)], dtype=np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        continuation = []
        for _ in range(tokens):
            token = int(np.argmax(model.scores[model.n_tokens - 1]))
            continuation.append(token)
            model.eval([token])
        rows = np.arange(len(prompt) - 1)
        ids = np.argsort(-log_p[:-1], axis=1)[:, :LIKELIEST]
        out.append(
            {
                "logprobs": log_p[rows, prompt[1:]].tolist(),
                "top": log_p[:-1].argmax(axis=1).tolist(),
                "ids": ids.tolist(),
                "values": np.take_along_axis(log_p[:-1], ids, axis=1).tolist(),
                "continuation": continuation,
            }
        )
    return {"runtime": "llama.cpp", "version": llama_cpp.__version__, "prompts": out}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--kv-cache", default="f16", choices=["f16", "q8_0", "q4_0"])
    args = parser.parse_args()
    with open(args.prompts, encoding="utf-8") as file:
        prompts = json.load(file)
    try:
        out = run(args.model, prompts, args.tokens, args.kv_cache)
    except Exception as error:  # whatever llama.cpp says is the result
        traceback.print_exc(file=sys.stderr)
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
