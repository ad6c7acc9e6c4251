"""Request bodies, with a bound on their size."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import ClientDisconnect

from punica_core.errors import InvalidRequest, RequestTooLarge


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises RequestTooLarge as soon as it is known to exceed `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise InvalidRequest("The client left before its request was complete.") from None
    return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body exceeds {max_bytes} bytes. Send less, or raise --max-body-bytes.")
