"""TTFT, time between tokens and throughput of any OpenAI-compatible streaming endpoint, at given concurrency.

Threads with ``http.client``: no dependency, and a thread that waits on a socket takes no processor time.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from quantkit.errors import UserError


@dataclass(slots=True)
class Request:
    """What came back. ttft: seconds to the first text, None if there was none. gaps: between later pieces.

    tokens: the server's own count where it sends one ("usage"), else the number of pieces. error: "" or why the
    request counts as lost.
    """

    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Load:
    """All requests of one concurrency; seconds: wall clock from the first sent to the last answered."""

    concurrency: int
    requests: list[Request]
    seconds: float

    @property
    def lost(self) -> list[Request]:
        return [r for r in self.requests if r.error]

    def rows(self) -> list[dict[str, Any]]:
        """Percentiles of TTFT and ITL in ms, tokens a second of all requests, and how many were lost."""
        about = {"concurrency": self.concurrency, "requests": len(self.requests)}
        done = [r for r in self.requests if not r.error]
        rows = [{"metric": "lost_requests", "value": len(self.lost), "unit": "requests", **about}]
        for name, values in (
            ("ttft", [r.ttft for r in done if r.ttft is not None]),
            ("itl", [g for r in done for g in r.gaps]),
        ):
            rows += [
                {
                    "metric": f"{name}_p{p}",
                    "value": 1000 * float(np.percentile(values, p)),
                    "unit": "ms",
                    **about,
                }
                for p in (50, 90, 99)
                if values
            ]
        total = sum(r.tokens for r in done)
        rows.append({"metric": "throughput", "value": total / self.seconds, "unit": "tokens/s", **about})
        return rows


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address such as http://host:8000 (with or without /v1)."""

    https: bool
    host: str
    port: int
    path: str

    @staticmethod
    def parse(url: str) -> Endpoint:
        """Raises UserError for what is no http address."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError(f"{url!r} is no address of a server; write for example http://localhost:8000")
        path = parts.path.rstrip("/")
        if not path.endswith("/v1"):
            path += "/v1"
        https = parts.scheme == "https"
        return Endpoint(https, parts.hostname, port or (443 if https else 80), path)

    def open(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.https else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)

    def model(self, timeout: float = 10.0) -> str:
        """The first model that the server offers. Raises UserError when it does not answer."""
        connection = self.open(timeout)
        try:
            connection.request("GET", f"{self.path}/models")
            answer = connection.getresponse()
            body = answer.read()
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"no server answers at {self.host}:{self.port} ({error}); start one with `quantkit serve`, or "
                "give another --url"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self.host}:{self.port} lists no model at {self.path}/models, so it is no OpenAI-compatible "
                "server; give --model if it has a name"
            ) from error
        finally:
            connection.close()


def stream_one(
    endpoint: Endpoint, model: str, prompt: str, max_tokens: int, timeout: float = 300.0
) -> Request:
    """One greedy streamed completion. Never raises for a failing server: the request is marked as lost."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    result, pieces, finished = Request(), 0, False
    connection = endpoint.open(timeout)
    last = start = time.perf_counter()
    try:
        connection.request(
            "POST", f"{endpoint.path}/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            result.error = f"status {answer.status}: {answer.read(300).decode(errors='replace')}"
            return result
        for event in events(answer):
            now = time.perf_counter()
            if event == "[DONE]":
                finished = True
                break
            data = json.loads(event)
            if "error" in data:
                result.error = str(data["error"])
                return result
            if data.get("usage"):
                result.tokens = int(data["usage"]["completion_tokens"])
            if not any(choice.get("text") for choice in data.get("choices", [])):
                continue
            pieces += 1
            if pieces == 1:
                result.ttft = now - start
            else:
                result.gaps.append(now - last)
            last = now
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        result.error = f"{type(error).__name__}: {error}"
        return result
    finally:
        connection.close()
    result.tokens = result.tokens or pieces
    if not finished:
        result.error = "the stream ended before [DONE]"
    elif result.ttft is None:
        result.error = "the stream held no text"
    return result


def events(answer: Any) -> Iterator[str]:
    """Data of server-sent events, one a line."""
    for line in answer:
        text = line.decode("utf-8", errors="replace").strip()
        if text.startswith("data:"):
            yield text[5:].strip()


def run(
    url: str, concurrency: int, prompts: list[str], max_tokens: int = 64, model: str | None = None
) -> Load:
    """Send every prompt, at most ``concurrency`` at a time. Raises UserError when no server answers."""
    if concurrency < 1 or not prompts:
        raise UserError("a load needs at least one prompt and a concurrency of at least 1")
    endpoint = Endpoint.parse(url)
    name = model or endpoint.model()
    results: list[Request | None] = [None] * len(prompts)
    todo, lock = iter(range(len(prompts))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(todo, None)
            if index is None:
                return
            results[index] = stream_one(endpoint, name, prompts[index], max_tokens)

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return Load(concurrency, [r or Request(error="never sent") for r in results], seconds)
