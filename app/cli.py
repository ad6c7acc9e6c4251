"""`punica serve …`: the command line, and the life of the server process."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType
from typing import Any, Literal, get_args, get_origin

import uvicorn
import uvloop

from app import adapters_command, demo, keys_command, settings
from app.adapter_survey import SurveyThread
from app.banner import Spinner, ready_text, say
from app.file_threads import on_daemon_thread
from app.service import Service, version
from app.settings import Settings
from app.start_watch import StartWatch, call_watched
from punica_core.client import EngineClient, WorkerClient
from punica_core.errors import ConfigError, PunicaError
from punica_core.protocol import Progress
from punica_core.stdout import until_unread

log = logging.getLogger("app.cli")  # also where this is the program

_UNSET: Any = object()
_KEEP_ALIVE_SECONDS = 75
"""Idle connections live longer here than in any client's pool, which would else use one that is just being closed."""


Connect = Callable[[], EngineClient]


def main(arguments: Sequence[str] | None = None, connect: Connect = WorkerClient) -> int:
    """Entry point. Exit codes: 0 after a drain, 1 if it cannot start, 2 for a wrong command line, 130 on Ctrl-C, 141 if
    nobody reads what is printed.

    connect: makes a client for one life of the engine.
    """
    return until_unread(lambda: _main(arguments, connect))


def _main(arguments: Sequence[str] | None, connect: Connect) -> int:
    parser = _parser(connect)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0].removeprefix("--")
        hint = "" if options.parser else settings.did_you_mean(name, settings.flag)  # the settings are flags of serve
        (options.parser or parser).error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    try:
        return int(options.run(options))
    except PunicaError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(connect: Connect) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="punica", description="Serve many LoRA adapters of one base model.")
    parser.add_argument("--version", action="version", version=f"punica {version()}")
    parser.set_defaults(parser=None)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_serve(commands, connect)
    _add_bench(commands)
    keys_command.add_to(commands)
    adapters_command.add_to(commands)
    return parser


def _add_serve(commands: Any, connect: Connect) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model and its adapters over the OpenAI API",
        allow_abbrev=False,  # a cut or mistyped flag is an error here as it is in a file
        epilog="Each key can also be a variable (PUNICA_MAX_QUEUE=5) or a line of the file (max_queue: 5). "
        "Precedence: command line, variable, file, default.",
    )
    serve.add_argument("--config", metavar="FILE", help="YAML file with any of these keys")
    for name, field in settings.all_keys().items():
        _add_key(serve, name, field.default, field.metadata["help"])
    serve.set_defaults(run=lambda options: _serve(options, connect))


def _add_bench(commands: Any) -> None:
    # its own parser knows the names and their flags, --help too
    bench = commands.add_parser(
        "bench", help="measure this installation on this machine", add_help=False, prefix_chars="\0"
    )
    bench.add_argument("arguments", nargs="*", help="a benchmark's name and flags")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from app.bench.command import main as bench  # what only benchmarks need does not slow a server's start

    return bench(options.arguments)


def _add_key(parser: argparse.ArgumentParser, name: str, default: Any, help_text: str) -> None:
    flag, kind = settings.flag(name), settings.key_type(name)
    shown = (help_text if default == "" else f"{help_text} (default: {default})").replace("%", "%%")
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=_UNSET, help=shown)
        return
    metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else name.rsplit("_", 1)[-1].upper()
    parser.add_argument(flag, default=_UNSET, metavar=metavar, help=shown)


def _serve(options: argparse.Namespace, connect: Connect) -> int:
    given = {name: value for name in settings.all_keys() if (value := getattr(options, name)) is not _UNSET}
    chosen = call_watched(
        lambda: settings.load(given, os.environ, options.config),
        settings.START_TIMEOUT,
        "reading the settings and looking at the folders that they name",
    )
    logging.basicConfig(level=chosen.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))  # our own lines say it
    with _bind(chosen) as listener:
        chosen = demo.with_demo(chosen) if not chosen.model else chosen
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(chosen, listener, connect))
    log.info("Stopped.")
    return 0


_MAX_KEEPALIVE = 32_767
"""Seconds that Linux takes for either of its two keep-alive times."""


def _bind(chosen: Settings) -> socket.socket:
    """The server's socket, bound before the model is loaded: a port in use is known at once, also one of a server that
    is still loading. Until the server listens, connections are refused. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in chosen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    _notice_vanished_clients(listener, chosen.send_timeout)
    try:
        try:
            listener.bind((chosen.host, chosen.port))
        except OSError:  # it may only be connections of a server that has ended
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((chosen.host, chosen.port))
    except OSError as error:
        listener.close()
        raise _port_error(chosen, error) from None
    return listener


def _listen(listener: socket.socket, chosen: Settings, backlog: int) -> None:
    """Take connections from now on. The event loop would ask for the same, and not tell if it is refused. Raises
    ConfigError."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections inherit it: the next server may bind
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _port_error(chosen, error) from None


def _port_error(chosen: Settings, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot listen on {chosen.host}:{chosen.port} ({error.strerror}). Stop what uses the port, or choose another "
        "with --port (0 takes a free one), of `make serve` with PORT=.",
        param="port",
    )


def _notice_vanished_clients(listener: socket.socket, seconds: float) -> None:
    """Have the system close connections, which inherit this, whose client's machine has said nothing for so long: one
    that was switched off or unplugged closes nothing, and its requests would keep their seats."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        seconds = min(seconds, 2 * _MAX_KEEPALIVE)  # longer would be refused
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 8)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))


async def _run(chosen: Settings, listener: socket.socket, connect: Connect) -> None:
    host, port = listener.getsockname()[:2]
    with Spinner() as spinner:
        surveying = SurveyThread(chosen.max_lora_rank)

        def on_progress(progress: Progress) -> None:
            spinner.on_progress(progress)
            surveying.on_progress(progress)

        watch = StartWatch(chosen.start_timeout, "looking at the files and folders that the settings name")
        service = await watch.wait_for(on_daemon_thread(lambda: Service(chosen, connect, on_progress)))
        service.begin_start()
        surveying.begin(service.registry)
        # Importing FastAPI takes a second or two: the worker imports torch meanwhile.
        main_module = await asyncio.to_thread(importlib.import_module, "app.main")
        from app.http_protocol import http_protocol  # imports what FastAPI has imported by now
        from app.open_files import max_connections

        app = main_module.app_of(service)
        async with app.router.lifespan_context(app):
            spinner.finish()
            config = uvicorn.Config(
                app,
                http=http_protocol(
                    request_timeout=chosen.request_timeout,
                    send_timeout=chosen.send_timeout,
                    max_connections=max_connections(),
                ),
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(chosen.drain_timeout) + 5,
            )

            async def ready() -> str:
                survey = await asyncio.to_thread(surveying.result)
                names, needs_key = await service.all_names(), not service.keys.is_open
                return ready_text(names, host, port, needs_key=needs_key, survey=survey)

            server = Server(config, service, ready)
            if chosen.api_keys_file:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.keys.ask_reload)
            elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.handle_exit, signal.SIGHUP, None)
            _listen(listener, chosen, config.backlog)
            await server.serve(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn, with our drain: on SIGTERM, SIGINT or the end of its terminal (SIGHUP, unless that has the keys read
    again) no new work is taken, and what runs ends within drain_timeout.

    A second signal ends it at once. The process's exit code is 0 after a drain: signals are not raised again.
    ready: gives what is printed once connections are accepted, and may take a while.
    """

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], Awaitable[str]]) -> None:
        super().__init__(config)
        self._service = service
        self._ready = ready
        self._saying: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._saying = asyncio.create_task(self._say_ready(), name="ready")

    async def _say_ready(self) -> None:
        try:
            say(await self._ready())
        except Exception:  # nobody awaits this task; requests are served all the same
            log.exception("The server is ready, but the lines that say so could not be printed.")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._saying is not None:
            self._saying.cancel()
        self._drain = asyncio.create_task(self._service.finish_drain())
        await super().shutdown(sockets)
        self._drain.cancel()


if __name__ == "__main__":
    raise SystemExit(main())
