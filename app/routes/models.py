"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.access import caller
from app.api_errors import error_response
from app.keys import ApiKey
from app.openapi import answered_by
from app.responses import ModelCard, ModelList
from app.service import Service
from punica_core.errors import PunicaError

router = APIRouter()


@router.get("/v1/models", response_model=None, openapi_extra=answered_by(ModelList, errors=(401, 500, 503)))
async def list_models(request: Request) -> Response:
    """The base model and every adapter; listing loads nothing."""
    service: Service = request.app.state.service
    key = caller(request)
    try:
        cards = await _cards(service, await service.model_names(key), key)
    except PunicaError as error:
        return error_response(error)
    return _json({"object": "list", "data": cards})


@router.get(
    "/v1/models/{name:path}",
    response_model=None,
    openapi_extra=answered_by(ModelCard, errors=(400, 401, 404, 500, 503)),
)
async def retrieve_model(request: Request, name: str) -> Response:
    """One of them; 404 that names close matches otherwise."""
    service: Service = request.app.state.service
    key = caller(request)
    try:
        await service.resolve(name, key)
        (card,) = await _cards(service, [name], key)
    except PunicaError as error:
        return error_response(error)
    return _json(card)


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _cards(service: Service, names: list[str], key: ApiKey) -> list[dict[str, Any]]:
    folders = dict[str, str | None]()
    if key.admin:
        folders = await service.adapter_files.run_over_all(
            lambda: {name: service.registry.folder_of(name) for name in names}, "folders"
        )
    return [_card(service, name, folders.get(name)) for name in names]


def _card(service: Service, name: str, folder: str | None) -> dict[str, Any]:
    """root: of an adapter, the base's name; for callers who may load adapters, the folder, as vLLM has it."""
    is_base = name == service.base_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "punica",
        "root": folder or service.base_name,
        "parent": None if is_base else service.base_name,
        "max_model_len": service.layout.max_model_len,
    }
