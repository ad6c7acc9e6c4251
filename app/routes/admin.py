"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from app.access import LOAD_ROUTE, UNLOAD_ROUTE, caller, check_admin
from app.admin_schemas import LoadAdapter, UnloadAdapter
from app.api_errors import error_response
from app.openapi import answered_by
from app.parsing import StructT, parse
from app.service import Service
from punica_core.errors import InvalidRequest, PunicaError

_ERRORS = (400, 401, 403, 404, 408, 413, 429, 500, 503)

router = APIRouter()


@router.post(LOAD_ROUTE, response_model=None, openapi_extra=answered_by(None, body=LoadAdapter, errors=_ERRORS))
async def load_adapter(request: Request) -> Response:
    """Serve the adapter in a folder under a name; answers when all of it has been read and checked."""
    service: Service = request.app.state.service
    try:
        body = await _read(request, LoadAdapter)
        if body.is_3d_lora_weight:
            raise InvalidRequest("is_3d_lora_weight is not supported.", param="is_3d_lora_weight")
        await service.loader.load(body.lora_name, body.lora_path, replace=bool(body.load_inplace))
    except PunicaError as error:
        return error_response(error, retry_after=service.supervisor.retry_after)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(UNLOAD_ROUTE, response_model=None, openapi_extra=answered_by(None, body=UnloadAdapter, errors=_ERRORS))
async def unload_adapter(request: Request) -> Response:
    """Take an adapter's name away; what has begun goes on, then its memory is given back."""
    service: Service = request.app.state.service
    try:
        body = await _read(request, UnloadAdapter)
        await service.loader.unload(body.lora_name)
    except PunicaError as error:
        return error_response(error)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _read(request: Request, kind: type[StructT]) -> StructT:
    check_admin(caller(request))
    service: Service = request.app.state.service
    with service.bodies.begin() as body:
        return parse(kind, await body.read(request, service.settings.max_body_bytes), on_unknown=service.note_unknown)
