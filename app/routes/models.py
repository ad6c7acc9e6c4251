"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api_errors import error_response
from app.service import Service
from punica_core.errors import PunicaError

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """The base model and every adapter; listing loads nothing."""
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.model_names()]})


@router.get("/v1/models/{name:path}", response_model=None)
async def retrieve_model(request: Request, name: str) -> Response:
    """One of them; 404 that names close matches otherwise."""
    service: Service = request.app.state.service
    try:
        service.resolve(name)
    except PunicaError as error:
        return error_response(error)
    return JSONResponse(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "punica"}
    is_base = name == service.base_name
    card |= {"root": name if is_base else service.base_name, "parent": None if is_base else service.base_name}
    return card | {"max_model_len": service.layout.max_model_len}
