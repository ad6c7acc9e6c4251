"""A server on a fake engine behind a real socket, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from app.http_protocol import http_protocol
from app.main import create_app
from app.settings import Settings
from tests.support.fake_engine import FakeEngine


@contextlib.contextmanager
def serving(settings: Settings, connect: Callable[[], FakeEngine]) -> Iterator[str]:
    """The server's URL; it stops with the block."""
    config = uvicorn.Config(
        create_app(settings, connect),
        http=http_protocol(request_timeout=60, send_timeout=60, max_connections=100),
        log_config=None,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"  # the kernel queues connections until it listens
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()
