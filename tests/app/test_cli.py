from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn

from app import cli, demo
from app.adapter_survey import Survey
from app.banner import CLEAR_LINE, Spinner, ready_text
from app.service import Service
from app.settings import Settings, all_keys, load
from punica_core.errors import ConfigError
from punica_core.protocol import Progress


def given_to_serve(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `punica serve ARGUMENTS` hands to settings.load."""
    seen: dict[str, Any] = {}

    def record(command_line: dict[str, Any], environ: object, config_file: object) -> Settings:
        seen.update(command_line, config=config_file)
        raise ConfigError("recorded")

    monkeypatch.setattr(cli.settings, "load", record)
    assert cli.main(["serve", *arguments]) == 1
    return seen


def test_the_command_line_hands_over_only_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_to_serve(["--model", "m", "--max-queue", "5", "--no-prefix-cache"], monkeypatch)
    assert given == {"model": "m", "max_queue": "5", "prefix_cache": False, "config": None}
    del given["config"]
    assert load(given, {}).max_queue == 5


def test_every_key_has_a_flag_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, field in all_keys().items():
        flag = f"--{name.replace('_', '-')}"
        assert flag in text
        assert field.metadata["help"][:30] in text, name


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("punica ")


def test_an_unknown_flag_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--modle", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --modle x. Did you mean --model?" in capsys.readouterr().err


def test_a_flag_cut_short_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--max-que=5"])
    assert ended.value.code == 2
    assert "--max-que=5. Did you mean --max-queue?" in capsys.readouterr().err


def test_a_flag_like_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--zzzzzz"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --zzzzzz.\n")


def test_what_is_wrong_with_another_command_is_told_with_its_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["adapters", "list", "folder", "--adapters", "x"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: punica adapters list ")
    assert told.endswith("unrecognized arguments: --adapters x.\n"), "a flag of serve is no help here"


def test_a_wrong_value_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "eighty"]) == 1
    assert capsys.readouterr().err == "error: --port is 'eighty'; a whole number is expected.\n"


def test_ready_text_has_a_line_for_each_model_and_the_address_that_was_bound() -> None:
    text = ready_text(["base", "it's"], "0.0.0.0", 4711)
    assert text.count("curl -s http://127.0.0.1:4711/v1/chat/completions") == 2
    assert text.startswith("Ready on http://127.0.0.1:4711/v1 with base and 1 adapter. Try:")
    assert 'base_url="http://127.0.0.1:4711/v1"' in text
    curl = next(line for line in text.splitlines() if "it" in line and line.startswith("curl"))
    shell = subprocess.run(["sh", "-c", curl.replace("curl -s", "printf '%s '")], capture_output=True, text=True)
    assert '"model":"it\'s"' in shell.stdout


@pytest.mark.parametrize(
    ("survey", "told"),
    [
        (Survey(frozenset({"old"})), "2 adapters; 1 other is refused, and the log says why. Try:"),
        (Survey(frozenset({"old", "new", "gone"}), complete=False), "1 adapter; at least 2 others are refused, and"),
        (Survey(frozenset({"gone"}), complete=False), "3 adapters. Try:"),
    ],
)
def test_adapters_that_are_refused_are_counted_apart_and_are_no_examples(survey: Survey, told: str) -> None:
    names = ["base", "sql", "old", "new"]
    text = ready_text(names, "127.0.0.1", 1, survey=survey)
    assert text.startswith(f"Ready on http://127.0.0.1:1/v1 with base and {told}")
    assert {name for name in names if f'"model":"{name}"' in text} == set(names) - survey.refused
    assert {name for name in names if f"'{name}'" in text} == set(names) - survey.refused


def test_the_printed_python_is_valid() -> None:
    text = ready_text(["base", "sql"], "::1", 1)
    python = text[text.index("# Python") :]
    compile(python, "snippet", "exec")
    assert f"{sys.executable} -m pip install openai" in python.splitlines()[0]
    assert "http://[::1]:1/v1" in text


def test_lines_to_paste_take_the_key_from_the_environment() -> None:
    text = ready_text([f"model-{index}" for index in range(9)], "127.0.0.1", 1, needs_key=True)
    curl = next(line for line in text.splitlines() if line.startswith("curl"))
    shell = subprocess.run(
        ["sh", "-c", curl.replace("curl -s", "printf '%s\n'")],
        capture_output=True,
        text=True,
        env={"PUNICA_API_KEY": "a-secret", "PATH": "/bin:/usr/bin"},
    )
    assert "authorization: Bearer a-secret\n" in shell.stdout
    assert text.count("$PUNICA_API_KEY") == 9  # eight models, and the list of all
    python = text[text.index("import os") :]
    compile(python, "snippet", "exec")
    assert 'api_key=os.environ["PUNICA_API_KEY"]' in python
    assert "PUNICA_API_KEY" not in ready_text(["base"], "127.0.0.1", 1)


def test_a_long_list_of_models_is_cut() -> None:
    text = ready_text([f"model-{index}" for index in range(500)], "127.0.0.1", 1)
    assert text.count("curl -s http://127.0.0.1:1/v1/chat") == 8
    assert "and 492 more" in text


def test_progress_is_one_line_at_the_start_and_the_end_of_a_step() -> None:
    stream = io.StringIO()
    with Spinner(stream) as spinner:
        for fraction in (0.0, 0.5, 1.0):
            spinner.on_progress(Progress("loading", fraction))
        spinner.on_progress(Progress("warming up"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading ..."
    assert [line.split(" in ")[0] for line in lines[1:]] == ["loading: done", "warming up ...", "warming up: done"]


def failing_start(stream: io.StringIO) -> None:
    with Spinner(stream) as spinner:
        spinner.on_progress(Progress("loading"))
        raise ConfigError("no weights")


def test_a_step_that_an_error_ended_is_not_called_done() -> None:
    stream = io.StringIO()
    with pytest.raises(ConfigError):
        failing_start(stream)
    assert "loading: stopped after" in stream.getvalue()
    assert "done" not in stream.getvalue()


def test_progress_after_the_start_is_left_to_the_log() -> None:
    stream = io.StringIO()
    with Spinner(stream) as spinner:
        spinner.finish()
        spinner.on_progress(Progress("importing torch"))
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    """A terminal that says when `count` texts were written."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count
        self.moved = threading.Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.moved.set()


def test_a_terminal_sees_a_step_move_and_a_log_line_never_follows_it_on_its_line() -> None:
    terminal = Terminal(count=3)
    with Spinner(terminal, period=0.001) as spinner:
        spinner.on_progress(Progress("loading"))
        assert terminal.moved.wait(30)
        terminal.write("a line of the log\n")
    written = terminal.getvalue()
    assert f"{CLEAR_LINE}loading ... 0 s\r" in written
    assert "\ra line of the log\n" in written


def demo_program(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(demo, "_PREPARE", ("sh", "-c", script, "demo"))


def test_without_a_model_the_demo_is_served_with_its_adapters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_program(monkeypatch, 'echo "/models/small$*"')
    monkeypatch.setattr(demo, "_EXAMPLES", tmp_path)
    chosen = demo.with_demo(Settings(cache="/c"))
    assert (chosen.model, chosen.adapters) == ("/models/small--cache /c", str(tmp_path))
    assert capsys.readouterr().err == "The demo model lies in /models/small--cache /c.\n"
    assert demo.with_demo(Settings(adapters="mine")).adapters == "mine"
    monkeypatch.setattr(demo, "_EXAMPLES", tmp_path / "missing")
    assert demo.with_demo(Settings()).adapters == ""


def test_a_demo_that_cannot_be_prepared_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_program(monkeypatch, "exit 1")
    with pytest.raises(ConfigError, match="--model"):
        demo.with_demo(Settings())
    assert "lies in" not in capsys.readouterr().err


def test_connections_of_clients_that_have_vanished_are_closed_by_the_system() -> None:
    with cli._bind(Settings(model="m", port=0, send_timeout=40.0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
            assert [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [20, 5, 40_000]
            alive = [one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for one in (accepted, client)]
            assert alive == [1, 0]


@pytest.mark.parametrize("seconds", [86_400.0, 1e9])
def test_clients_may_have_longer_than_the_system_can_count(seconds: float) -> None:
    with cli._bind(Settings(model="m", port=0, send_timeout=seconds)) as listener:
        options = (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
        assert [listener.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [32_767, 65_534_000]


def test_a_port_is_taken_while_its_server_loads_and_free_afterwards() -> None:
    with cli._bind(Settings(port=0)) as loading:
        chosen = Settings(port=loading.getsockname()[1])
        with pytest.raises(ConfigError, match=r"with --port .* of `make serve` with PORT="):
            cli._bind(chosen)
    cli._bind(chosen).close()


def test_connections_that_linger_do_not_keep_the_next_server_from_its_port() -> None:
    with cli._bind(Settings(port=0)) as listener:
        cli._listen(listener, Settings(), 5)
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            listener.accept()[0].close()  # the side that closes first keeps the address for a while
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(address)
    with cli._bind(Settings(port=address[1])) as listener:
        cli._listen(listener, Settings(), 5)


def test_a_server_that_cannot_listen_is_not_ready() -> None:
    with cli._bind(Settings(port=0)) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        chosen = Settings(port=first.getsockname()[1])
        with cli._bind(chosen) as second:
            cli._listen(first, chosen, 5)
            with pytest.raises(ConfigError, match="Cannot listen on"):
                cli._listen(second, chosen, 5)


async def answer_of_server(ready: Callable[[], Awaitable[str]]) -> int:
    """The status that a server answers with which says what `ready` gives."""

    class Idle:
        async def finish_drain(self) -> None:
            pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    with cli._bind(Settings(port=0)) as listener:
        cli._listen(listener, Settings(), 5)
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        server = cli.Server(config, cast(Service, Idle()), ready)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        server.should_exit = True
        await asyncio.wait_for(serving, 30)
    return answer.status_code


async def test_requests_do_not_wait_for_the_lines_that_say_ready() -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    assert await answer_of_server(never) == 204


@pytest.mark.parametrize("fails", [True, False])
async def test_what_goes_wrong_with_the_lines_that_say_ready_is_in_the_log(
    fails: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ready() -> str:
        if fails:
            raise ValueError("odd")
        return "Ready"

    assert await answer_of_server(ready) == 204
    assert ["ValueError: odd" in (record.exc_text or "") for record in caplog.records] == [True] * fails
    assert capsys.readouterr().out == ("" if fails else "Ready\n")
