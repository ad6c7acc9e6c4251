"""What a long prompt does to others: the figures are of what was asked, when it was asked."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from load_tests import long_prompt
from tests.load_tests.test_load import WHOLE
from tests.support.stub_server import StubHandler, serving


class Handler(StubHandler):
    asked: list[tuple[int, int]]
    prompts: list[list[int]]
    models: list[dict[str, str]]

    def do_GET(self) -> None:
        self.send(json.dumps({"data": self.models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((len(body["prompt"]), body["max_tokens"]))
        self.prompts.append(body["prompt"])
        self.send(b"".join(WHOLE) if len(body["prompt"]) != 13 else b"data: cut")


@pytest.fixture
def server() -> Iterator[str]:
    Handler.asked, Handler.prompts, Handler.models = [], [], [{"id": "m"}]
    with serving(Handler) as url:
        yield url


def flags(server: str, tokens: int) -> list[str]:
    return ["--base-url", server, "--tokens", str(tokens), "--repeats", "2", "--delay", "0.01", "--solo-seconds", "0.1"]


def test_every_case_is_asked_and_told(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_prompt.main(flags(server, 70)) == 0
    short, long, stream = (32, 4), (70, 4), (16, 70)
    turn = [short, long, long, short, *[stream] * 4, long]
    assert Handler.asked == [short, *turn, *turn]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[2].startswith("short prompt, 0.01 s after a long one: first token: ")


def test_no_two_runs_send_the_same_prompts_unless_told_to(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a server has in its prefix cache is no long prompt any more."""
    runs = []
    for again in ([], [], ["--seed"]):
        Handler.prompts = []
        seed = capsys.readouterr().out.splitlines()[-1].removeprefix("seed: ") if again else ""
        assert long_prompt.main([*flags(server, 70), *again, *filter(None, [seed])]) == 0
        runs.append(sorted(Handler.prompts))
    assert not {*map(tuple, runs[0])} & {*map(tuple, runs[1])}
    assert runs[1] == runs[2]


def test_an_answer_that_breaks_off_is_no_figure(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_prompt.main(flags(server, 13)) == 1
    assert capsys.readouterr() == ("", "error: a request failed: truncated\n")


def test_a_server_that_serves_nothing_cannot_be_used(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.models = []
    assert long_prompt.main(flags(server, 70)) == 2
    assert "lists no models" in capsys.readouterr().err


def test_no_server_and_no_address_are_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens
        assert long_prompt.main(["--base-url", f"http://127.0.0.1:{held.getsockname()[1]}"]) == 2
    assert long_prompt.main(["--base-url", "localhost:8000"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert [line[:7] for line in err.splitlines()] == ["error: "] * 2


def test_another_machine_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_prompt.main(["--base-url", "http://a.b"]) == 2
    assert "--allow-remote" in capsys.readouterr().err


def test_figures_are_of_the_time_in_which_the_long_prompt_is_computed() -> None:
    times = [[0.0, 1.0, 5.0, 6.0, 20.0], [2.0, 5.5]]
    assert long_prompt._rate(times, 4.0, 6.0) == 1.0
    assert long_prompt._longest_gap(times, 4.0, 6.0) == 4.0
    assert long_prompt._longest_gap(times, 7.0, 8.0) == 0.0
