"""Before any route: who is asking, and whether that key has requests left. Plain ASGI, around the whole application.

Routes find the caller with `caller(request)`. Every POST counts as a request of its key, whatever becomes of it, except
those of administration; its response carries `x-ratelimit-*`.
"""

from __future__ import annotations

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api_errors import error_response, plain_error_response
from app.keys import ApiKey
from app.limits import KeyUsage
from app.service import Service
from punica_core.errors import PermissionDenied, PunicaError

LOAD_ROUTE = "/v1/load_lora_adapter"
UNLOAD_ROUTE = "/v1/unload_lora_adapter"

_WITHOUT_KEY = frozenset({"/health", "/ready"})
_ADMIN_ROUTES = frozenset({LOAD_ROUTE, UNLOAD_ROUTE})


class Access:
    """Finds the caller of every request, or answers 401; counts it, or answers 429."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service
        self._anybody = ApiKey("", adapters=(), base=False, metrics=True)
        self._open_paths = _WITHOUT_KEY | ({"/metrics"} if service.settings.open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, state = scope["path"], scope.setdefault("state", {})
        if path in self._open_paths:
            state["key"] = self._anybody
            await self._app(scope, receive, send)
            return
        try:
            key = self._service.keys.find([value for name, value in scope["headers"] if name == b"authorization"])
        except PunicaError as error:
            await error_response(error)(scope, receive, send)
            return
        if path in _ADMIN_ROUTES and self._service.keys.is_open and not key.admin:
            message = f"{scope['method']} {path}: Not Found. Adapters can be loaded over HTTP with --enable-admin."
            await plain_error_response(404, message)(scope, receive, send)
            return
        state["key"] = key
        await self._admit(key, scope, receive, send)

    async def _admit(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        usage = self._service.usages.of(key)
        counts = scope["method"] == "POST" and scope["path"] not in _ADMIN_ROUTES
        watched = _watched(send, usage, with_headers=counts)
        try:
            if counts:
                usage.take_request()
        except PunicaError as error:
            await error_response(error)(scope, receive, watched)
        else:
            await self._app(scope, receive, watched)


def _watched(send: Send, usage: KeyUsage, *, with_headers: bool) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            usage.responses[message["status"]] += 1
            if with_headers:
                MutableHeaders(scope=message).raw.extend(usage.headers())
        await send(message)

    return watched


def caller(request: Request) -> ApiKey:
    """Who asks; on open routes somebody who may do nothing else."""
    key: ApiKey = request.state.key
    return key


def check_metrics(key: ApiKey) -> None:
    """Raise PermissionDenied unless the caller may read what everybody does."""
    if not key.metrics:
        raise PermissionDenied(
            f"The key {key.name!r} may not read /metrics, which names all adapters and keys; `metrics: true` allows it."
        )


def check_admin(key: ApiKey) -> None:
    """Raise PermissionDenied unless the caller may load and unload adapters."""
    if not key.admin:
        raise PermissionDenied(f"The key {key.name!r} may not load or unload adapters; `admin: true` allows it.")
