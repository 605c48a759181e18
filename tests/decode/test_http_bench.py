"""The load generator against a tiny streaming server with known waits and known failures."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quantkit.decode.http_bench import Endpoint, run
from quantkit.errors import UserError

FIRST, GAP, TOKENS = 0.06, 0.02, 5


class Handler(BaseHTTPRequestHandler):
    alive, most, lock = 0, 0, threading.Lock()

    def log_message(self, *args):
        """Tests print nothing."""

    def _send(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._send(200, b'{"data": [{"id": "tiny"}]}' if self.path == "/v1/models" else b"nothing")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "refuse" in asked["prompt"]:
            return self._send(503, b"busy")
        with self.lock:
            Handler.alive += 1
            Handler.most = max(Handler.most, Handler.alive)
        self.send_response(200)
        self.end_headers()
        time.sleep(FIRST)
        for i in range(TOKENS):
            if i:
                time.sleep(GAP)
            if "cut" in asked["prompt"] and i == 2:
                break
            self._event({"choices": [{"text": f" w{i}"}]})
        # before the last bytes: the client may send its next request as soon as it has them
        with self.lock:
            Handler.alive -= 1
        if "cut" not in asked["prompt"]:
            self._event({"choices": [], "usage": {"completion_tokens": TOKENS + 1}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def url():
    Handler.alive = Handler.most = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_known_waits_come_back(url, concurrency):
    load = run(url, concurrency, ["hello"] * 8)
    rows = {r["metric"]: r["value"] for r in load.rows()}
    assert rows["lost_requests"] == 0 and Handler.most == concurrency
    # the server's sleeps are lower bounds; how much later a busy machine answers is not tested
    assert rows["ttft_p50"] >= 1000 * FIRST and rows["itl_p50"] > 0
    assert all(len(r.gaps) == TOKENS - 1 and r.tokens == TOKENS + 1 for r in load.requests)
    assert rows["throughput"] == pytest.approx(8 * (TOKENS + 1) / load.seconds)
    assert load.seconds >= 8 / concurrency * (FIRST + (TOKENS - 1) * GAP)


def test_lost_requests_are_counted_and_say_why(url):
    load = run(url, 2, ["hello", "refuse", "cut", "hello"])
    assert [bool(r.error) for r in load.requests] == [False, True, True, False]
    assert "status 503: busy" in load.requests[1].error and "before [DONE]" in load.requests[2].error
    rows = {r["metric"]: r["value"] for r in load.rows()}
    assert rows["lost_requests"] == 2


def test_wrong_addresses(url):
    with pytest.raises(UserError, match="no address of a server"):
        run("localhost:8000", 1, ["x"])
    with pytest.raises(UserError, match="no server answers"):
        run("http://127.0.0.1:9", 1, ["x"])
    with pytest.raises(UserError, match="lists no model"):
        run(f"{url}/other", 1, ["x"])
    assert Endpoint.parse("https://host/v1/").path == "/v1" and Endpoint.parse("https://host").port == 443
