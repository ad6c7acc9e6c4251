"""Loading and unloading adapters by name while the server runs.

An adapter is loaded by using it: one token is generated with it, before its name exists. So the worker has read and
checked every byte of it against the base model when the answer is given, or has said why not; and the name's first user
finds it in memory. Unloading takes the name away at once; what runs goes on, and then the worker forgets the adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.adapter_files import AdapterFiles
from app.batcher import Batcher
from app.flight import SequenceRequest
from app.metrics import ModelMetrics
from punica_core.adapters.registry import AdapterRegistry
from punica_core.errors import AdapterError, AdapterLoadTimeout, InvalidRequest
from punica_core.protocol import AdapterRef, SamplingParams

log = logging.getLogger(__name__)

TENANT = ":loading"
"""Of the requests that try an adapter: no key has such a name, so nobody's turn is taken and no cache is shared."""

_TRIAL = SequenceRequest([0], SamplingParams(max_tokens=1, ignore_eos=True))


class AdapterLoader:
    """forget: tells the worker about folders that nobody will ask for. timeout: seconds that a load may take.
    check_template: raises AdapterError if the adapter's own chat template is used and cannot be.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        files: AdapterFiles,
        batcher: Batcher,
        forget: Callable[[list[str]], None],
        *,
        timeout: float,
        check_template: Callable[[AdapterRef], Awaitable[object]],
    ) -> None:
        self._registry = registry
        self._files = files
        self._batcher = batcher
        self._forget = forget
        self._timeout = timeout
        self._check_template = check_template
        self._loading: set[str] = set()
        self._drains: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Serve the adapter at `path` as `name`. replace: also if the name is taken, which until then stays as it is.

        Raises InvalidRequest, ModelNotFound, an AdapterError with the reason for which it cannot be served, or a
        CapacityError; then nothing has changed.
        """
        if name in self._loading:
            raise InvalidRequest(f"The adapter {name!r} is being loaded by another request.", param="lora_name")
        self._loading.add(name)
        try:
            ref = await self._files.run(lambda: self._locate(name, path, replace), name)
            await self._check_template(ref)
            await self._try(ref)
            before = await self._files.run(lambda: self._registry.folder_of(name), name)
            self._registry.add(ref)
            self._files.forget(name)
        except AdapterError as error:
            error.param = "lora_path"
            raise
        finally:
            self._loading.discard(name)
        log.info("Adapter %r was loaded from %s.", name, ref.path)
        if before is not None:
            self._drain(before)

    async def unload(self, name: str) -> None:
        """Take the name away. Raises ModelNotFound, InvalidRequest for the base model, or AdapterLoadTimeout; then
        nothing has changed."""
        folder, is_listed = await self._files.run(lambda: self._registry.removable(name), name)
        self._registry.remove(name, is_listed)
        self._files.forget(name)
        log.info("Adapter %r was unloaded; it serves what it has begun.", name)
        self._drain(folder)

    async def stop(self) -> None:
        """Wait for nothing any more."""
        for drain in self._drains:
            drain.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)

    def _locate(self, name: str, path: str, replace: bool) -> AdapterRef:
        ref = self._registry.locate(name, path)
        if self._registry.exists(name) and not replace:
            raise InvalidRequest(
                f"The name {name!r} is taken. Unload it first, choose another, or send `load_inplace: true`.",
                param="lora_name",
            )
        return ref

    async def _try(self, ref: AdapterRef) -> None:
        flight = self._batcher.open([_TRIAL], ModelMetrics(), adapter=ref, tenant=TENANT, eager=False)
        try:
            async with asyncio.timeout(self._timeout):
                (sequence,) = await flight.changed()
        except TimeoutError:
            raise AdapterLoadTimeout(
                f"Adapter {ref.name!r} was not loaded within {self._timeout:g} seconds: its files are slow, or there "
                "is no room for it yet. Try again later."
            ) from None
        finally:
            flight.close()
        if sequence.error is not None:
            raise sequence.error

    def _drain(self, folder: str) -> None:
        task = asyncio.get_running_loop().create_task(self._forget_when_unused(folder), name="adapter-drain")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _forget_when_unused(self, folder: str) -> None:
        await self._batcher.wait_unused(folder)
        try:
            is_served = await self._files.run(lambda: self._registry.serves(folder), key=folder)
        except AdapterLoadTimeout:
            return  # nobody knows; it leaves when its room is needed
        if not is_served:  # it may have a name again, or another one
            self._forget([folder])
