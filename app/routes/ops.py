"""GET /health, /ready, /version, /metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.access import caller, check_metrics
from app.api_errors import error_response
from app.metrics import CONTENT_TYPE
from app.openapi import answered_by
from app.responses import Status, Version
from app.service import Service
from punica_core.errors import PunicaError

router = APIRouter()


@router.get("/health", response_model=None, openapi_extra=answered_by(Status, errors=(), also=(503,)))
async def health(request: Request) -> Response:
    """200 while the engine lives; 503 from a noticed stall or loss until a new engine is ready."""
    service: Service = request.app.state.service
    return JSONResponse({"status": service.supervisor.state.value}, status_code=200 if service.is_healthy else 503)


@router.get("/ready", response_model=None, openapi_extra=answered_by(Status, errors=(), also=(503,)))
async def ready(request: Request) -> Response:
    """200 while new work is taken; 503 while the engine is away or the server drains."""
    service: Service = request.app.state.service
    state = "draining" if service.batcher.draining else service.supervisor.state.value
    return JSONResponse({"status": state}, status_code=200 if service.is_ready else 503)


@router.get("/version", response_model=None, openapi_extra=answered_by(Version, errors=(401, 500)))
async def show_version(request: Request) -> Response:
    """Versions of what answers here."""
    service: Service = request.app.state.service
    layout = service.layout
    return JSONResponse(
        {
            "version": service.version,
            "model": service.base_name,
            "architecture": layout.architecture,
            "device": layout.device,
            "dtype": layout.dtype,
            "torch": layout.torch_version,
            "transformers": layout.transformers_version,
        }
    )


@router.get("/metrics", response_model=None, openapi_extra=answered_by(None, errors=(401, 500)))
async def metrics(request: Request) -> Response:
    """Prometheus text exposition. Hundreds of adapters are tens of thousands of lines: streams go on meanwhile."""
    service: Service = request.app.state.service
    try:
        check_metrics(caller(request))
        names = await service.all_names()
    except PunicaError as error:
        return error_response(error)
    return Response(await asyncio.to_thread(service.metrics.render, names), media_type=CONTENT_TYPE)
