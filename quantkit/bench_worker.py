"""The process behind :class:`quantkit.bench.Worker`: JSON lines in, JSON lines out, one model."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from quantkit.errors import UserError


def serve(first: dict[str, Any], say: Any) -> None:
    """Open the model that the first line names, then measure what each further line asks for."""
    from quantkit.decode.loop import generate
    from quantkit.engine import open_engine
    from quantkit.evals.memory import cache_bytes, peak_rss
    from quantkit.evals.speed import random_prompt

    opened = open_engine(first["path"], first["engine"], first["kv"], first["head"], first["capacity"])
    try:
        per_token = cache_bytes(opened.config, 1, opened.cache_bits)
    except UserError as error:
        opened.notes.append(f"cache bytes are counted as 0: {error}")
        per_token = 0.0
    about = {"backend": opened.backend, "weight_bytes": opened.weight_bytes, "notes": opened.notes,
             "cache_bytes_per_token": per_token}  # fmt: skip
    say(about)
    vocab = opened.config.get_text_config().vocab_size
    for line in sys.stdin:
        asked = json.loads(line)
        ids = random_prompt(vocab, asked["context"], seed=asked["seed"])[0].tolist()
        _, clock = generate(opened.engine, [ids], opened.tokenizer, asked["new_tokens"])
        say({"ttft": clock.ttft, "itl": clock.itl, "peak_rss": peak_rss()})


def main() -> int:
    # Libraries print to stdout; answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        serve(json.loads(sys.stdin.readline()), say)
    except UserError as error:
        say({"error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
