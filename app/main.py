"""The ASGI application: the one place where the parts are wired."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import Access
from app.api_errors import error_response, plain_error_response
from app.openapi import document
from app.routes import admin, generate, models, ops, tokenization
from app.service import Service, version
from app.settings import Settings
from punica_core.client import EngineClient
from punica_core.errors import InternalError
from punica_core.protocol import Progress

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,128}$")


def create_app(
    settings: Settings,
    connect: Callable[[], EngineClient],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> FastAPI:
    """The server as an ASGI application; its lifespan starts and stops the engine.

    connect: makes a client for one life of the engine (a worker process, or a fake in tests).
    """
    return app_of(Service(settings, connect, on_progress))


def app_of(service: Service) -> FastAPI:
    """The ASGI application of a service, which it starts (unless begun) and stops."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="Punica",
        docs_url=None,  # these pages load scripts from elsewhere; /openapi.json has it all
        redoc_url=None,
        version=version(),
        lifespan=lifespan,
        middleware=[Middleware(RequestEnvelope), Middleware(Access, service=service)],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    app.openapi = document(app)  # type: ignore[method-assign]  # FastAPI's own way
    for routes in (generate, models, ops, tokenization, admin):
        app.include_router(routes.router)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own errors (no such path, wrong method) in our envelope."""
    assert isinstance(error, HTTPException)  # what this handler is registered for
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    if error.status_code == 404:
        message += " GET /v1/models lists what is served, GET /openapi.json what can be asked."
    response = plain_error_response(error.status_code, message)
    response.headers.update(error.headers or {})
    return response


class RequestEnvelope:
    """Around every request: `x-request-id` echoed or made, and an unexpected exception as our envelope. A HEAD is a GET
    to all within; the server keeps the body back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        started = False
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("Request %s failed.", request_id)
            if started:
                raise
            error = InternalError(f"An unexpected error occurred; the log has it under request id {request_id}.")
            await error_response(error)(scope, receive, send_with_id)


def _request_id(given: str | None) -> str:
    return given if given is not None and _REQUEST_ID.match(given) else uuid.uuid4().hex
