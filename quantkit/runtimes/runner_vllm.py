"""Log-probabilities and a greedy continuation from vLLM, as JSON. Runs inside vLLM's own environment.

    runner_vllm.py FOLDER PROMPTS.json [--tokens 16] [--kv-cache auto|fp8] [--dtype bfloat16]

PROMPTS.json: a list of lists of token ids. Output (the last line of stdout): {"runtime", "version",
"prompts": [{"logprobs": [...], "top": [...], "ids": [[...]], "values": [[...]], "continuation": [...]}]}.
``logprobs[i]`` is log p(token i+1 | tokens 0..i), in nats, ``top[i]`` the likeliest next token there;
``ids[i]`` and ``values[i]`` are the LIKELIEST tokens and their log-probabilities. A refusal prints {"error":
"..."} with vLLM's own words and exits 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback

LIKELIEST = 64  # tokens a position: enough to hold nearly all probability

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{max(0, (os.cpu_count() or 1) - 1)}",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def run(folder: str, prompts: list[list[int]], tokens: int, kv_cache: str, dtype: str) -> dict:
    import vllm

    longest = max(map(len, prompts)) + tokens
    model = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=max(64, longest + 1),
        enforce_eager=True,
        max_num_seqs=4,
        enable_prefix_caching=False,
        kv_cache_dtype=kv_cache,
        skip_tokenizer_init=True,
        max_logprobs=LIKELIEST,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=tokens, prompt_logprobs=LIKELIEST, detokenize=False
    )
    results = model.generate([{"prompt_token_ids": p} for p in prompts], sampling)
    return {
        "runtime": "vllm",
        "version": vllm.__version__,
        "prompts": [one(p, r) for p, r in zip(prompts, results)],
    }


def one(prompt: list[int], result) -> dict:
    """vLLM gives for each position the entries of the likeliest tokens and of the prompt's own."""
    logprobs, top, ids, values = [], [], [], []
    for token, entries in zip(prompt[1:], result.prompt_logprobs[1:]):
        logprobs.append(entries[token].logprob)
        top.append(min(entries, key=lambda t: entries[t].rank))
        ids.append(list(entries))
        values.append([entries[t].logprob for t in entries])
    continuation = list(result.outputs[0].token_ids)
    return {"logprobs": logprobs, "top": top, "ids": ids, "values": values, "continuation": continuation}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("prompts")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    with open(args.prompts, encoding="utf-8") as file:
        prompts = json.load(file)
    try:
        out = run(args.folder, prompts, args.tokens, args.kv_cache, args.dtype)
    except Exception as error:  # whatever vLLM says is the result
        traceback.print_exc(file=sys.stderr)
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
