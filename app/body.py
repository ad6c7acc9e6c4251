"""Request bodies in memory, with a bound on each and on all of them together.

    with bodies.begin() as body:
        parse(await body.read(request, max_bytes))
        ...                             # until nothing is left of it but what the engine was given

A body counts from its first byte until its request was admitted or refused. When there is no room for the next bytes,
the body that has been arriving longest makes room if it has taken more than PATIENCE seconds: clients that send slowly
on purpose take memory from each other, not from those whose requests come at once. If all are young or complete, the
one that wants more is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import Request
from starlette.requests import ClientDisconnect

from punica_core.errors import InvalidRequest, QueueFull, RequestTooLarge

PATIENCE = 5.0
"""Seconds in which a body may arrive undisturbed."""


class Bodies:
    """All bodies of a server. capacity: bytes of them; used: bytes now. clock: monotonic seconds."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.used = 0
        self._clock = clock
        self._arriving: dict[Body, float] = {}  # and when they began, the oldest first

    def begin(self) -> Body:
        """A body that is about to arrive."""
        return Body(self)

    def _make_room(self, body: Body, nbytes: int) -> None:
        """Raise QueueFull if there is no room for more of a body."""
        now = self._clock()
        self._arriving.setdefault(body, now)
        while self.used + nbytes > self.capacity:
            oldest, since = next(iter(self._arriving.items()))
            if oldest is body or now - since <= PATIENCE:
                raise QueueFull(
                    f"The bodies of other requests take {self.used - body.size} of {self.capacity} bytes. Try again "
                    "later, or raise --max-total-body-bytes."
                )
            oldest.give_way()


class Body:
    """One request's body. size: bytes that are kept of it, until `end` or the end of a `with`."""

    def __init__(self, bodies: Bodies) -> None:
        self.size = 0
        self._bodies = bodies
        self._chunks: list[bytes] = []
        self._patience = asyncio.timeout(None)
        self._gave_way = False

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    async def read(self, request: Request, max_bytes: int) -> bytes:
        """All of it. Raises RequestTooLarge as soon as it is known to exceed `max_bytes`, QueueFull if there is no
        room for it, InvalidRequest if the client leaves."""
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with self._patience:
                async for chunk in request.stream():
                    self._take(chunk, max_bytes)
        except ClientDisconnect:
            raise InvalidRequest("The client left before its request was complete.") from None
        except TimeoutError:
            pass  # see below: it may have given way when it was all there
        finally:
            self._bodies._arriving.pop(self, None)
        if self._gave_way:
            raise QueueFull(
                f"The request took more than {PATIENCE:g} s to arrive, and others needed the memory. Try again later."
            )
        whole = b"".join(self._chunks)
        self._chunks.clear()
        return whole

    def _take(self, chunk: bytes, max_bytes: int) -> None:
        if self._gave_way:
            return
        if self.size + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        self._bodies._make_room(self, len(chunk))
        self._chunks.append(chunk)
        self.size += len(chunk)
        self._bodies.used += len(chunk)

    def give_way(self) -> None:
        """Give the memory back now and stop reading."""
        self._gave_way = True
        self._bodies._arriving.pop(self, None)
        self.end()
        self._patience.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Nothing of it is kept any more. Idempotent."""
        self._chunks.clear()
        self._bodies.used -= self.size
        self.size = 0


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body exceeds {max_bytes} bytes. Send less, or raise --max-body-bytes.")
