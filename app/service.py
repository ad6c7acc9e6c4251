"""The parts of a running server, wired: what routes work with."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from app.adapter_files import AdapterFiles
from app.adapter_loading import AdapterLoader
from app.adapter_templates import AdapterTemplates
from app.batcher import Batcher
from app.body import Bodies
from app.budget import Budget
from app.file_threads import on_daemon_thread
from app.formats import Head
from app.keys import ApiKey, KeyStore
from app.limits import KeyUsages
from app.metrics import Metrics
from app.settings import Settings
from app.start_watch import StartWatch
from app.supervisor import State, Supervisor
from app.template_processes import AdapterTemplate
from app.tokenizer import Tokenizer
from app.tokenizer_files import tokenizer_folder
from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.roots import AdapterRoots
from punica_core.client import EngineClient
from punica_core.config import EngineConfig, EngineLayout, check_model_folder, is_model_path
from punica_core.errors import AdapterLoadTimeout, ConfigError, Draining, ModelNotFound, PunicaError
from punica_core.protocol import MAX_LOGPROBS, AdapterRef, Event, Outputs, Progress, StepStarted

log = logging.getLogger(__name__)

_MAX_UNKNOWN_FIELDS = 100
MAX_HELD_LOGPROBS = 32 * MAX_LOGPROBS
"""Logprobs that all unfinished answers may hold together: a gigabyte."""


def version() -> str:
    """The installed version of Punica."""
    try:
        return metadata.version("punica")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _check_folders(config: EngineConfig) -> None:
    """Say now what the worker would find only after seconds of importing torch. Raises ConfigError."""
    if Path(config.model).is_dir():
        check_model_folder(Path(config.model))
    elif is_model_path(config.model):
        raise ConfigError(f"model is {config.model!r}; there is no such folder.", param="model")
    if config.adapters and not Path(config.adapters).is_dir():
        raise ConfigError(f"adapters is {config.adapters!r}; there is no such folder.", param="adapters")
    if (Path(config.adapters) / CONFIG_NAME).is_file():
        raise ConfigError(
            f"adapters is {config.adapters!r}, which is an adapter itself; the folder that holds it is wanted: "
            f"{str(Path(config.adapters).parent)!r}.",
            param="adapters",
        )


def _read_template(path: str) -> str | None:
    """The chat template that replaces the model's. Raises ConfigError."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {path!r}, which cannot be read: {error}.", param="chat_template") from None


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


class Service:
    """Settings, engine, batcher, tokenizer, adapters and metrics of one server; `start` before use, `stop` after.

    connect: makes an engine client for one life of the engine. on_progress: told of long steps of the start.
    """

    def __init__(
        self,
        settings: Settings,
        connect: Callable[[], EngineClient],
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        config = settings.engine_config()
        _check_folders(config)
        self.settings = settings
        self._on_progress = on_progress
        self.base_name = settings.base_name
        self.created = int(time.time())
        self.version = version()
        self.usages = KeyUsages()
        self.keys = KeyStore(
            settings.api_key,
            Path(settings.api_keys_file) if settings.api_keys_file else None,
            enable_admin=settings.enable_admin,
            on_change=self.usages.set_keys,
        )
        self.registry = AdapterRegistry(
            Path(config.adapters) if config.adapters else None, {self.base_name}, roots=AdapterRoots(settings.roots)
        )
        self.adapter_files = AdapterFiles(self.registry, filter(None, [config.adapters, *settings.roots]))
        self.supervisor = Supervisor(
            connect,
            config,
            on_event=self._on_event,
            on_lost=self._on_lost,
            on_ready=self._on_ready,
            on_progress=on_progress,
            stall_timeout=settings.stall_timeout,
            start_timeout=settings.start_timeout,
        )
        self.batcher = Batcher(
            self.supervisor.submit,
            self.supervisor.cancel,
            self.supervisor.check_ready,
            max_num_seqs=settings.max_num_seqs,
            max_queue=settings.max_queue,
            max_queue_tokens=settings.max_queue_tokens,
            has_tenants=lambda: self.keys.count > 1,
        )
        self.loader = AdapterLoader(
            self.registry,
            self.adapter_files,
            self.batcher,
            self.supervisor.forget,
            timeout=settings.adapter_load_timeout,
            check_template=self.template_of,
        )
        self.metrics = Metrics(
            lambda: self.batcher.in_flight,
            lambda: self.batcher.queued_tokens,
            lambda: self.bodies.used,
            [self.usages],
        )
        self.logprobs = Budget(MAX_HELD_LOGPROBS)
        self.bodies = Bodies(settings.max_total_body_bytes)
        self._layout: EngineLayout | None = None
        self._tokenizer: Tokenizer | None = None
        self._templates: AdapterTemplates | None = None
        self._lives = 0
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._unknown_fields: set[str] = set()

    @property
    def layout(self) -> EngineLayout:
        """What the engine computed; after start."""
        assert self._layout is not None
        return self._layout

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer; after start."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def is_healthy(self) -> bool:
        """No stall or loss was noticed since the last engine became ready."""
        return self.supervisor.state is State.READY

    @property
    def is_ready(self) -> bool:
        """New work is taken."""
        return self.is_healthy and not self.batcher.draining

    async def model_names(self, key: ApiKey) -> list[str]:
        """The base model and every adapter, as this caller may ask for them."""
        base = [self.base_name] if key.base else []
        return [*base, *(name for name in await self.adapter_files.names() if key.may_use(name))]

    async def resolve(self, name: str, key: ApiKey) -> AdapterRef | None:
        """The adapter of that name, None for the base. Raises ModelNotFound or AdapterError.

        What the caller may not use does not exist: the answer is the same, and nothing is looked for on the disk.
        """
        if name == self.base_name and key.base:
            return None
        try:
            return await self.adapter_files.resolve(name, None if key.sees_all else key.may_use)
        except ModelNotFound as error:
            base = f" The base model is {self.base_name!r};" if key.base else ""
            raise ModelNotFound(f"{error.message}{base} GET /v1/models lists everything.", param="model") from None

    async def all_names(self) -> list[str]:
        """The base model and every adapter, whoever may ask for them; the base alone if they were never listed."""
        try:
            return [self.base_name, *await self.adapter_files.names()]
        except AdapterLoadTimeout:
            return [self.base_name]

    async def template_of(self, adapter: AdapterRef | None) -> AdapterTemplate | None:
        """The adapter's own chat template, if it has one and the settings say so. Raises AdapterError or
        QueueFull."""
        return await self._templates.of(adapter) if self._templates is not None and adapter is not None else None

    def note_unknown(self, fields: Sequence[str]) -> None:
        """Log fields of requests that nobody knows, each once."""
        for name in fields:
            if name not in self._unknown_fields and len(self._unknown_fields) < _MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(name)
                log.info("Requests carry the unknown field %r; it is ignored.", name)

    def head(self, prefix: str, model: str, adapter_key: str) -> Head:
        """Id, time and fingerprint of a new response; the fingerprint names version, base and adapter content."""
        parts = (f"punica-{self.version}", self.base_name, adapter_key[:16])
        fingerprint = ":".join(part for part in parts if part)
        return Head(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)

    def begin_start(self) -> asyncio.Task[None]:
        """Begin to start the engine, if that has not begun; `start` waits for it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start")
        return self._starting

    async def start(self) -> None:
        """Start the engine, then read the tokenizer. Raises ConfigError, or WorkerLost, also when that makes no
        progress, with the engine stopped."""
        await self.begin_start()
        self._watching = asyncio.create_task(self.keys.watch(), name="keys")
        if self.keys.is_open and self.settings.enable_admin:
            log.warning("Whoever reaches this server may load and unload adapters: --enable-admin without keys.")

    async def _start(self) -> None:
        layout = await self.supervisor.start()
        try:
            step = Progress("reading the tokenizer and the chat template", 1.0)
            self._on_progress(step)
            watch = StartWatch(self.settings.start_timeout, step.what)
            self._tokenizer = await watch.wait_for(self._load_tokenizer(layout))
            if self.settings.adapter_chat_templates:
                self._templates = AdapterTemplates(self._tokenizer.special_tokens, self.adapter_files)
        except BaseException:
            await self.supervisor.stop()
            raise

    async def _load_tokenizer(self, layout: EngineLayout) -> Tokenizer:
        folder = await tokenizer_folder(Path(layout.model_dir), self.settings.cache)
        return await on_daemon_thread(
            lambda: Tokenizer.load(folder, layout.vocab_size, _read_template(self.settings.chat_template))
        )

    def begin_drain(self) -> None:
        """Take no new work from now on."""
        if not self.batcher.draining:
            left = self.batcher.in_flight
            waiting = (
                f"; waiting for {_sequences(left)}, at most {self.settings.drain_timeout:g} s. "
                "A second Ctrl-C or SIGTERM does not wait"
            )
            log.info("Shutting down: no new requests%s.", waiting if left else "")
        self.batcher.begin_drain()

    async def finish_drain(self) -> None:
        """Wait until all admitted work has ended, or end it with an error after `drain_timeout`."""
        self.begin_drain()
        try:
            await asyncio.wait_for(self.batcher.wait_idle(), self.settings.drain_timeout)
        except TimeoutError:
            log.warning("Ending %s that did not finish in time.", _sequences(self.batcher.in_flight))
            self.batcher.fail_all(Draining("The server shut down before this request was finished."))

    async def stop(self) -> None:
        """End everything; requests still in flight end with an error. Idempotent."""
        self.batcher.begin_drain()
        if self._watching is not None:
            self._watching.cancel()
        self.batcher.fail_all(Draining("The server shut down before this request was finished."))
        await self.loader.stop()
        self.adapter_files.stop()
        if self._templates is not None:
            await self._templates.stop()
        await self.supervisor.stop()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Outputs):
            if event.stats is not None:
                self.metrics.on_stats(event.stats)
            self.batcher.on_outputs(event.outputs)
        elif isinstance(event, StepStarted) and not event.busy and self.batcher.in_flight == 0:
            self.metrics.on_idle()

    def _on_lost(self, error: PunicaError) -> None:
        self.metrics.on_worker_lost()
        self.batcher.fail_all(error)

    def _on_ready(self, layout: EngineLayout) -> None:
        self._layout = layout
        self.metrics.worker_up = True
        self.metrics.worker_restarts = self._lives
        self._lives += 1
