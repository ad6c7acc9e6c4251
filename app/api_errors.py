"""Errors as HTTP: one table from error code to status and type, one envelope.

`{"error": {"message", "type", "param", "code"}}`, always; SDKs show users nothing but `message`, and retry 408, 409,
429 and every 5xx, so whatever would fail again the same way is a 400 or 404.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from punica_core.errors import (
    AdapterChanged,
    AdapterError,
    AdapterLoadTimeout,
    CapacityError,
    ContextLengthExceeded,
    Draining,
    EngineError,
    EngineRestarting,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    PunicaError,
    QueueFull,
    RateLimited,
    RequestError,
    RequestTooLarge,
    WorkerLost,
)

STATUS_BY_CODE: dict[str, int] = {
    RequestError.code: 400,
    InvalidRequest.code: 400,
    RequestTooLarge.code: 413,
    ContextLengthExceeded.code: 400,
    ModelNotFound.code: 404,
    InvalidApiKey.code: 401,
    PermissionDenied.code: 403,
    AdapterError.code: 400,
    **{kind.code: 400 for kind in AdapterError.__subclasses__()},
    AdapterChanged.code: 503,  # what may be over at the next attempt is what SDKs should retry
    AdapterLoadTimeout.code: 503,
    CapacityError.code: 503,
    QueueFull.code: 429,
    RateLimited.code: 429,
    Draining.code: 503,
    EngineRestarting.code: 503,
    EngineError.code: 500,
    WorkerLost.code: 503,
    InternalError.code: 500,
}
"""Statuses of the error tree; a code that is missing here is a 500."""

_TYPE_BY_STATUS = {403: "permission_error", 404: "not_found_error"}
_TYPE_BY_STATUS |= {429: "rate_limit_error", 503: "service_unavailable_error"}
_MAX_MESSAGE = 2000


def envelope(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error response or of an error event in a stream."""
    kind = _TYPE_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 1] + "…"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: PunicaError) -> bytes:
    """The envelope of `error` as JSON."""
    status = STATUS_BY_CODE.get(error.code, 500)
    return msgspec.json.encode(envelope(error.message, status=status, param=error.param, code=error.code))


def error_response(error: PunicaError, *, retry_after: int = 1) -> Response:
    """The response for `error`; 429 and 503 carry `Retry-After` (seconds), 401 `WWW-Authenticate`."""
    status = STATUS_BY_CODE.get(error.code, 500)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        seconds = math.ceil(error.retry_after) if isinstance(error, RateLimited) else retry_after
        headers["retry-after"] = str(max(1, seconds))
    return Response(error_body(error), status_code=status, media_type="application/json", headers=headers)


def plain_error_response(status: int, message: str, code: str | None = None) -> Response:
    """The envelope for errors that HTTP itself has: no such route, wrong method, too large a body."""
    body = msgspec.json.encode(envelope(message, status=status, code=code))
    return Response(body, status_code=status, media_type="application/json")
