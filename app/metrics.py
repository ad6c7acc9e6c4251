"""Prometheus metrics. Plain numbers on the hot path; families are built when somebody scrapes.

Label values are bounded: `model` is the base, an adapter that exists, or `unknown` (one for all names that do not);
series of adapters that were removed disappear. Engine-side numbers come from `protocol.StepStats` only; a gauge that is
not known (no worker has reported, no step has run) has no series, so that no number is a wrong one.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from punica_core.protocol import StepStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNKNOWN_MODEL = "unknown"

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LOAD_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts by bucket; `bounds` are upper limits in seconds, in order."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Append this histogram to a family of the exposition, with cumulative buckets."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, self._sum)


class ModelMetrics:
    """Numbers of one name that clients ask for."""

    __slots__ = ("first_token", "generated_tokens", "inter_token", "prompt_tokens", "request_seconds", "requests")

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.inter_token = Histogram(_INTER_TOKEN_SECONDS)
        self.request_seconds = Histogram(_REQUEST_SECONDS)

    def finish(self, status: str, seconds: float) -> None:
        """A request ended: "ok", "cancelled" or the error's code."""
        self.requests[status] += 1
        self.request_seconds.observe(seconds)


class Metrics(Collector):
    """All numbers of a server. known_names: the names that exist now; in_flight: sequences that hold a seat;
    queued_tokens: prompt tokens of those without any output; body_bytes: of request bodies; more: collectors of other
    parts, scraped with this one."""

    def __init__(
        self,
        in_flight: Callable[[], int],
        queued_tokens: Callable[[], int],
        body_bytes: Callable[[], int],
        more: Sequence[Collector] = (),
    ) -> None:
        self._in_flight = in_flight
        self._queued_tokens = queued_tokens
        self._body_bytes = body_bytes
        self._models: dict[str, ModelMetrics] = {}
        self._unknown = ModelMetrics()
        self._engine: StepStats | None = None  # while no worker has reported
        self._loads: Counter[tuple[str, str]] = Counter()
        self._load_seconds: dict[str, Histogram] = {}
        self._past = Counter[str]()  # counters of worker lives that are over
        self.worker_restarts = 0
        self.worker_up = False
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (self, *more):
            self._registry.register(collector)

    def model(self, name: str) -> ModelMetrics:
        """Numbers of a name that exists (the caller has resolved it)."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelMetrics()
        return found

    @property
    def unknown(self) -> ModelMetrics:
        """Numbers of all names that do not exist."""
        return self._unknown

    def on_stats(self, stats: StepStats) -> None:
        """The engine's report after a step."""
        self._engine = stats
        for load in stats.adapter_loads:
            self._loads[load.tier, load.outcome] += 1
            self._load_seconds.setdefault(load.tier, Histogram(_LOAD_SECONDS)).observe(load.seconds)

    def on_idle(self) -> None:
        """Nothing runs: the gauges of running and waiting sequences are 0 whatever the last report said."""
        # reasons stand alone where all that waited was cancelled after the step that noted them
        engine = self._engine
        if engine is not None and (engine.running or engine.waiting or engine.waiting_by_reason):
            self._engine = msgspec.structs.replace(engine, running=0, waiting=0, waiting_by_reason={})

    def on_worker_lost(self) -> None:
        """The worker's counters begin again at 0; what they had reached stays in the totals."""
        for name in _ENGINE_COUNTERS:
            self._past[name] += getattr(self._engine, name, 0)
        self._engine = None
        self.worker_up = False

    def render(self, names: Collection[str]) -> bytes:
        """The text exposition. Forgets models that are not among `names`.

        May run on another thread than the rest: what it reads of a dict, it copies in one go.
        """
        known = set(names)
        for name in [name for name in list(self._models) if name not in known]:
            self._models.pop(name, None)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._model_families()
        yield from self._engine_families()
        yield from self._load_families()

    def _labelled(self) -> list[tuple[str, ModelMetrics]]:
        rows = sorted(self._models.items())
        return [*rows, (UNKNOWN_MODEL, self._unknown)] if self._unknown.requests else rows

    def _model_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("punica_requests", "Requests by outcome.", labels=["model", "status"])
        prompt = CounterMetricFamily("punica_prompt_tokens", "Prompt tokens of admitted requests.", labels=["model"])
        generated = CounterMetricFamily("punica_generated_tokens", "Tokens received from the engine.", labels=["model"])
        first = _histogram("punica_time_to_first_token_seconds", "Arrival of a request to its first token.", "model")
        inter = _histogram("punica_inter_token_seconds", "Time between tokens of a sequence.", "model")
        whole = _histogram("punica_request_seconds", "Arrival of a request to its end.", "model")
        for name, metrics in self._labelled():
            for status, count in sorted(metrics.requests.items()):
                requests.add_metric([name, status], count)
            prompt.add_metric([name], metrics.prompt_tokens)
            generated.add_metric([name], metrics.generated_tokens)
            metrics.first_token.add_to(first, [name])
            metrics.inter_token.add_to(inter, [name])
            metrics.request_seconds.add_to(whole, [name])
        yield from (requests, prompt, generated, first, inter, whole)

    def _engine_families(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("punica_in_flight", "Sequences admitted and not ended.", value=self._in_flight())
        queued = "Prompt tokens of admitted sequences without any output."
        yield GaugeMetricFamily("punica_queued_prompt_tokens", queued, value=self._queued_tokens())
        bodies = "Bytes of request bodies that are arriving or being read."
        yield GaugeMetricFamily("punica_request_body_bytes", bodies, value=self._body_bytes())
        yield GaugeMetricFamily("punica_worker_up", "1 while a worker takes commands.", value=int(self.worker_up))
        yield CounterMetricFamily("punica_worker_restarts", "Workers started after a loss.", value=self.worker_restarts)
        engine = self._engine
        for name, help_text in _ENGINE_COUNTERS.items():
            total = self._past[name] + getattr(engine, name, 0)
            yield CounterMetricFamily(f"punica_{name}", help_text, value=total)
        if engine is None:
            return
        for name, help_text in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"punica_{name}", help_text, value=getattr(engine, name))
        if engine.steps:
            for name, help_text in _STEP_GAUGES.items():
                yield GaugeMetricFamily(f"punica_{name}", help_text, value=getattr(engine, name))
        waiting = GaugeMetricFamily("punica_waiting_by_reason", "Waiting sequences by reason.", labels=["reason"])
        for reason, count in sorted(engine.waiting_by_reason.items()):
            waiting.add_metric([reason], count)
        yield waiting

    def _load_families(self) -> Iterator[Metric]:
        loads = CounterMetricFamily("punica_adapter_loads", "Adapter loads by outcome.", labels=["tier", "outcome"])
        for (tier, outcome), count in sorted(self._loads.items()):
            loads.add_metric([tier, outcome], count)
        seconds = _histogram("punica_adapter_load_seconds", "Time of adapter loads.", "tier")
        for tier, histogram in sorted(self._load_seconds.items()):
            histogram.add_to(seconds, [tier])
        yield from (loads, seconds)


_ENGINE_GAUGES = {
    "running": "Sequences in the last step.",
    "waiting": "Sequences that wait for a step.",
    "free_blocks": "KV blocks that nothing uses.",
    "cached_blocks": "KV blocks kept for prefix reuse only.",
    "adapters_host": "Adapters in host memory.",
    "adapters_gpu": "Adapters in GPU memory.",
    "adapter_host_bytes_used": "Bytes of adapters in host memory.",
    "adapter_gpu_bytes_used": "Bytes of adapters in GPU memory.",
}
_STEP_GAUGES = {
    "last_step_seconds": "Duration of the last step.",
    "slowest_step_seconds": "Duration of the slowest step.",
}
"""Known once there was a step."""
_ENGINE_COUNTERS = {
    "steps": "Steps.",
    "prefill_tokens": "Prompt tokens computed.",
    "decode_tokens": "Tokens generated.",
    "preemptions": "Sequences put back to make room.",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache.",
    "prefix_hit_tokens": "Prompt tokens found there.",
    "adapter_evictions": "Adapters evicted from a tier.",
}


def _histogram(name: str, help_text: str, label: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, help_text, labels=[label])
