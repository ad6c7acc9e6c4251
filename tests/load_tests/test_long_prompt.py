"""What a long prompt does to others: the figures are of what was asked, when it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from load_tests import long_prompt
from tests.load_tests.test_load import WHOLE


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[int, int]]

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((len(body["prompt"]), body["max_tokens"]))
        self._send(b"".join(WHOLE) if len(body["prompt"]) != 13 else b"data: cut")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()


def flags(server: ThreadingHTTPServer, tokens: int) -> list[str]:
    url = f"http://127.0.0.1:{server.server_port}"
    return ["--base-url", url, "--tokens", str(tokens), "--repeats", "2", "--delay", "0.01", "--solo-seconds", "0.1"]


def test_every_case_is_asked_and_told(server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_prompt.main(flags(server, 70)) == 0
    short, long, stream = (32, 4), (70, 4), (16, 70)
    turn = [short, long, long, short, *[stream] * 4, long]
    assert Handler.asked == [short, *turn, *turn]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[2].startswith("short prompt, 0.01 s after a long one: first token: ")


def test_an_answer_that_breaks_off_is_no_figure(server: ThreadingHTTPServer) -> None:
    with pytest.raises(RuntimeError, match="truncated"):
        long_prompt.main(flags(server, 13))


def test_another_machine_is_not_asked() -> None:
    with pytest.raises(ValueError, match="loopback"):
        long_prompt.main(["--base-url", "http://a.b"])


def test_figures_are_of_the_time_in_which_the_long_prompt_is_computed() -> None:
    times = [[0.0, 1.0, 5.0, 6.0, 20.0], [2.0, 5.5]]
    assert long_prompt._rate(times, 4.0, 6.0) == 1.0
    assert long_prompt._longest_gap(times, 4.0, 6.0) == 4.0
    assert long_prompt._longest_gap(times, 7.0, 8.0) == 0.0
