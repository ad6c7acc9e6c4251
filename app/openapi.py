"""The OpenAPI document. Routes parse bodies and encode answers themselves (one envelope, one pass), so that the schemas
of both are added here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec.json import schema_components

from app import admin_schemas, responses, schemas

_REFERENCE = "#/components/schemas/{name}"
_TYPES = (
    schemas.ChatRequest,
    schemas.CompletionRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
    admin_schemas.LoadAdapter,
    admin_schemas.UnloadAdapter,
    responses.ChatCompletion,
    responses.Completion,
    responses.TokenizeResponse,
    responses.DetokenizeResponse,
    responses.ModelList,
    responses.ModelCard,
    responses.Status,
    responses.Version,
    responses.ErrorResponse,
)
_ERRORS = {
    400: "the request is wrong",
    401: "no valid key",
    403: "the key is not for this",
    404: "no such model",
    408: "the request did not arrive in time",
    413: "the body is too large",
    429: "too much at once; Retry-After says when to try again",
    500: "a fault of the server",
    503: "the engine is away, or the file system of adapters; Retry-After says when to try again",
}
"""Statuses that any route which runs or counts something may answer with."""


def answered_by(
    model: type[msgspec.Struct] | None,
    *,
    body: type[msgspec.Struct] | None = None,
    streams: bool = False,
    errors: tuple[int, ...] = (400, 401, 404, 408, 413, 429, 500, 503),
    also: tuple[int, ...] = (),
) -> dict[str, Any]:
    """A route's description: its answer (None: plain text), its body, and the statuses of its errors.

    streams: the answer may also be server-sent events. also: further statuses with the same answer.
    """
    content = {"text/plain": _TEXT} if model is None else {"application/json": _schema(model)}
    if streams:
        content["text/event-stream"] = _EVENT
    answers = {str(status): {"description": "the answer", "content": content} for status in (200, *also)}
    failures = {
        str(status): {
            "description": _ERRORS[status],
            "content": {"application/json": _schema(responses.ErrorResponse)},
        }
        for status in errors
    }
    described: dict[str, Any] = {"responses": answers | failures}
    return described if body is None else described | body_of(body)


def body_of(model: type[msgspec.Struct]) -> dict[str, Any]:
    """The part of a route's description that names its body."""
    return {"requestBody": {"required": True, "content": {"application/json": _schema(model)}}}


_TEXT: dict[str, Any] = {"schema": {"type": "string"}}
_DATA = {"type": "string", "description": "a chunk as JSON, an error in the envelope, or [DONE]"}
_EVENT: dict[str, Any] = {"schema": {"type": "object", "properties": {"data": _DATA}, "required": ["data"]}}
"""Of one event of a stream."""


def _schema(model: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": _REFERENCE.format(name=model.__name__)}}


def document(app: FastAPI, further: Sequence[type[msgspec.Struct]] = ()) -> Callable[[], dict[str, Any]]:
    """A function for `app.openapi`: the routes as they describe themselves, and the schemas they name.

    further: types that routes name besides those of generation, models and operation.
    """

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in built["paths"].values():
                for operation in path.values():
                    operation["responses"] = _own(operation["responses"])
            _, definitions = schema_components([*_TYPES, *further], ref_template=_REFERENCE)
            built["components"] = {"schemas": definitions}
            if not app.state.service.keys.is_open:
                _say_that_keys_are_needed(built, app.state.service.settings.open_metrics)
            app.openapi_schema = built
        return app.openapi_schema

    return build


def _say_that_keys_are_needed(built: dict[str, Any], open_metrics: bool) -> None:
    built["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    built["security"] = [{"key": []}]
    for path in ("/health", "/ready", *(["/metrics"] if open_metrics else [])):
        built["paths"][path]["get"]["security"] = []


def _own(described: dict[str, Any]) -> dict[str, Any]:
    """Without what FastAPI adds: a 422 that does not occur, and JSON where the route says text."""
    answer = described["200"]
    if "text/plain" in answer.get("content", {}):
        answer["content"].pop("application/json", None)
    return {status: response for status, response in described.items() if status != "422"}
