"""The OpenAPI document. Routes parse bodies themselves (one envelope, one pass), so their schemas are added here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description that names its body."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> Callable[[], dict[str, Any]]:
    """A function for `app.openapi`: the routes, and the schemas of `bodies`."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REFERENCE)
            built.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = built
        return app.openapi_schema

    return build
