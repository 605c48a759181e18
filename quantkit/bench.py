"""Speed of several models side by side: each in a process of its own, in turns, so that drift meets all alike."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UserError

KEYS = ("engine", "kv", "head")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and how it is run. label: in tables and rows."""

    label: str
    path: str
    engine: str = "auto"
    kv: str = "none"
    head: str | None = None

    @staticmethod
    def parse(text: str) -> Subject:
        """ "PATH" with settings, as in "PATH,engine=native,kv=int8,label=W4". Raises UserError."""
        path, *settings = text.split(",")
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or key not in (*KEYS, "label"):
                raise UserError(
                    f"{setting!r} in {text!r} is no setting; known are {', '.join((*KEYS, 'label'))}=VALUE"
                )
            values[key] = value
        name = path.rstrip("/").rpartition("/")[2]
        words = [name, *(f"{k}={values[k]}" for k in KEYS if k in values)]
        label = values.pop("label", " ".join(words))
        return Subject(label, path, **values)


class Worker:
    """A process that holds one model and answers measurements, so that its peak memory is the model's own."""

    def __init__(self, subject: Subject, capacity: int) -> None:
        self.subject = subject
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quantkit.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self.ask({"path": subject.path, "engine": subject.engine, "kv": subject.kv,
                               "head": subject.head, "capacity": capacity})  # fmt: skip

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One answer. Raises UserError with the worker's reason."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise UserError(
                f"the process that runs {self.subject.label} ended with code {code} (out of memory?); see its "
                "messages above, or measure fewer models at once"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self.subject.label}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def bench(
    subjects: Sequence[Subject],
    bandwidth: float,
    contexts: Sequence[int] = (128, 2048),
    new_tokens: int = 32,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """Rows of every subject: TTFT and ITL percentiles at each prompt length, decode rate, bytes per token and the
    share of the bandwidth limit, peak memory.

    bandwidth: bytes a second that this machine reads, measured before. Subjects take turns in every round.
    """
    from quantkit.evals import row
    from quantkit.evals.speed import Timing

    if len({s.label for s in subjects}) < len(subjects):
        raise UserError("two models have the same label; give each its own with ,label=NAME")
    workers: list[Worker] = []
    found: dict[tuple[str, int], Timing] = {}
    peaks: dict[str, int] = {}
    try:
        for subject in subjects:
            workers.append(Worker(subject, max(contexts) + new_tokens))
        for turn in range(rounds + 1):  # the first round warms up and is not counted
            for context in contexts:
                for worker in workers:
                    answer = worker.ask({"context": context, "new_tokens": new_tokens, "seed": turn})
                    key = (worker.subject.label, context)
                    peaks[worker.subject.label] = answer["peak_rss"]
                    if turn:
                        timing = found.setdefault(key, Timing([], [], context, 1))
                        timing.ttft.append(answer["ttft"])
                        timing.itl.extend(answer["itl"])
    finally:
        for worker in workers:
            worker.close()
    rows = []
    for worker in workers:
        label = worker.subject.label
        about = {"model": label, "engine": worker.about["backend"], "notes": worker.about["notes"]}
        rows.append(row("peak_rss", peaks[label], "bytes", **about))
        for context in contexts:
            timing = found[label, context]
            rows += timing.rows(context=context, **about)
            read = worker.about["weight_bytes"] + context * worker.about["cache_bytes_per_token"]
            limit = bandwidth / read
            more = {"context": context, "batch": 1, **about}
            rows.append(row("bytes_per_token", read, "bytes", **more))
            # the median step, as the limit says what an undisturbed step could reach
            share = 1 / statistics.median(timing.itl) / limit
            rows.append(row("bandwidth_share", share, "fraction", bandwidth=bandwidth, limit=limit, **more))
    return rows
