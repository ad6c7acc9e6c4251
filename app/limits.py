"""What each key uses, and its limits: requests and tokens a minute, and unfinished sequences.

A limit a minute is a bucket that holds one minute's worth and refills evenly, as OpenAI's does. A request takes one of
the one and, when its prompt is known, prompt plus asked output of the other; when it ends, what it really used is
charged instead. Output that nobody asked for by number is charged at the end only, which may leave a debt to wait for.

Nothing here knows of HTTP or of time: times are seconds of one clock, as arguments or from `clock`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.keys import ApiKey, KeyLimits
from punica_core.errors import InvalidRequest, RateLimited

CONCURRENCY_RETRY_SECONDS = 1.0


class Bucket:
    """`capacity` units when full, as many again each minute. `take` may overdraw it."""

    __slots__ = ("_at", "_level", "capacity")

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._level = float(capacity)
        self._at = now

    def level(self, now: float) -> float:
        """What is there; negative while there is a debt."""
        refilled = self._level + (now - self._at) * self.capacity / 60
        self._level, self._at = min(refilled, float(self.capacity)), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take it, whether it is there or not; a negative amount gives back."""
        self._level = min(self.level(now) - amount, float(self.capacity))

    def seconds_until(self, amount: float, now: float) -> float:
        """Until `amount` (at most the capacity) is there; 0 if it is."""
        return max(0.0, (amount - self.level(now)) * 60 / self.capacity)

    def resize(self, capacity: int, now: float) -> None:
        """Another limit: what was used stays used."""
        used = self.capacity - self.level(now)
        self.capacity, self._level = capacity, capacity - used


class KeyUsage:
    """One key's buckets and counters."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.in_flight = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.responses: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()
        self.digest = b""
        self._clock = clock
        self._limits = KeyLimits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._unlimited: dict[str, Bucket] = {}  # of limits that were taken back, with what was used of them

    def set_limits(self, limits: KeyLimits) -> None:
        """From now on these; what was used is not forgotten, nor while there is no limit."""
        self._limits = limits
        self._requests = self._resized("requests", self._requests, limits.requests_per_minute)
        self._tokens = self._resized("tokens", self._tokens, limits.tokens_per_minute)

    @property
    def is_spent(self) -> bool:
        """Nothing runs and all that was used has come back: a new usage would be the same."""
        now = self._clock()
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.in_flight and all(
            bucket.level(now) >= bucket.capacity for bucket in (*buckets, *self._unlimited.values())
        )

    def take_request(self) -> None:
        """Count a request. Raises RateLimited, which is not counted."""
        if self._requests is not None:
            self._check(self._requests, 1, "requests")
            self._requests.take(1, self._clock())

    def reserve(self, sequences: int, prompt_tokens: int, output_tokens: int) -> Lease:
        """Room for a request's sequences and tokens. output_tokens: what was asked for by number, over all sequences.

        Raises RateLimited, or InvalidRequest for what would never fit.
        """
        tokens, at_once = prompt_tokens + output_tokens, self._limits.max_concurrent
        if at_once is not None and sequences > at_once:
            raise InvalidRequest(
                f"The request asks for {sequences} sequences (prompts x n); this key may have {at_once} at once. "
                "Split the request."
            )
        if self._tokens is not None and tokens > self._tokens.capacity:
            raise InvalidRequest(
                f"The request asks for {tokens} tokens ({prompt_tokens} in the prompt, {output_tokens} in the output); "
                f"this key may use {self._tokens.capacity} a minute. Shorten the prompt or the output."
            )
        if at_once is not None and self.in_flight + sequences > at_once:
            self.refusals["concurrency"] += 1
            raise RateLimited(
                f"Rate limit reached for key {self.name!r} on concurrent sequences: limit {at_once}, running "
                f"{self.in_flight}, requested {sequences}. Try again when one has ended.",
                retry_after=CONCURRENCY_RETRY_SECONDS,
            )
        if self._tokens is not None:
            self._check(self._tokens, tokens, "tokens")
        return Lease(self, sequences, tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-*` for the limits that this key has."""
        now = self._clock()
        found = []
        for bucket, kind in ((self._requests, b"requests"), (self._tokens, b"tokens")):
            if bucket is not None:
                remaining = max(0, math.floor(bucket.level(now)))
                found += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % remaining),
                    (b"x-ratelimit-reset-" + kind, duration(bucket.seconds_until(bucket.capacity, now)).encode()),
                ]
        return found

    def _check(self, bucket: Bucket, amount: int, kind: str) -> None:
        now = self._clock()
        seconds = bucket.seconds_until(amount, now)
        if seconds <= 0:
            return
        self.refusals[kind] += 1
        used = math.ceil(bucket.capacity - bucket.level(now))
        raise RateLimited(
            f"Rate limit reached for key {self.name!r} on {kind} per minute: limit {bucket.capacity}, used {used}, "
            f"requested {amount}. Try again in {duration(seconds)}.",
            retry_after=seconds,
        )

    def _resized(self, kind: str, bucket: Bucket | None, capacity: int | None) -> Bucket | None:
        if bucket is None:
            bucket = self._unlimited.pop(kind, None)
        if capacity is None:
            if bucket is not None:
                self._unlimited[kind] = bucket
            return None
        if bucket is None:
            return Bucket(capacity, self._clock())
        bucket.resize(capacity, self._clock())
        return bucket

    def _take_tokens(self, amount: int) -> None:
        if self._tokens is not None:
            self._tokens.take(amount, self._clock())


class Lease:
    """What one request holds of its key's limits, from admission to its end."""

    __slots__ = ("_reserved", "_sequences", "_usage")

    def __init__(self, usage: KeyUsage, sequences: int, tokens: int) -> None:
        self._usage: KeyUsage | None = usage
        self._sequences = sequences
        self._reserved = tokens
        usage.in_flight += sequences
        usage._take_tokens(tokens)

    def end(self, prompt_tokens: int, generated_tokens: int) -> None:
        """The request ended, however: charge what it used. Only the first call counts."""
        usage, self._usage = self._usage, None
        if usage is not None:
            usage.in_flight -= self._sequences
            usage._take_tokens(prompt_tokens + generated_tokens - self._reserved)
            usage.prompt_tokens += prompt_tokens
            usage.generated_tokens += generated_tokens


class KeyUsages(Collector):
    """The usage of every key, by name. Also the metrics of it.

    It outlives changes of the keys: a key that is gone and comes back, under its name or with its token under another
    name, finds what it had used. Of keys that are gone there are no metrics, unless they still run something.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usages: dict[str, KeyUsage] = {}
        self._gone: dict[str, KeyUsage] = {}

    def of(self, key: ApiKey) -> KeyUsage:
        """The usage of a key that exists (or existed when the request came)."""
        found = self._usages.get(key.name) or self._gone.get(key.name)
        if found is None:
            found = self._usages[key.name] = KeyUsage(key.name, self._clock)
            found.digest = key.digest
            found.set_limits(key.limits)
        return found

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """These are the keys from now on. The usage of others is kept until nothing of it is left."""
        known = {**self._gone, **self._usages}
        names = {key.name for key in keys}
        renamed = {usage.digest: usage for name, usage in known.items() if name not in names and usage.digest}
        self._usages = {}
        for key in keys:
            usage = known.pop(key.name, None)
            if usage is None and key.digest in renamed:
                usage = known.pop(renamed[key.digest].name)
                usage.name = key.name
            if usage is None:
                usage = KeyUsage(key.name, self._clock)
            usage.digest = key.digest
            usage.set_limits(key.limits)
            self._usages[key.name] = usage
        self._gone = {name: usage for name, usage in known.items() if not usage.is_spent}

    def collect(self) -> Iterator[Metric]:
        """Families by key; nothing where no keys are configured."""
        responses = CounterMetricFamily("punica_key_responses", "Responses by status.", labels=["key", "status"])
        refusals = CounterMetricFamily("punica_key_limited", "Requests beyond a limit.", labels=["key", "limit"])
        prompt = CounterMetricFamily("punica_key_prompt_tokens", "Prompt tokens of ended requests.", labels=["key"])
        generated = CounterMetricFamily("punica_key_generated_tokens", "Generated tokens of them.", labels=["key"])
        in_flight = GaugeMetricFamily("punica_key_in_flight", "Unfinished sequences.", labels=["key"])
        shown = self._usages.copy() | {name: usage for name, usage in self._gone.copy().items() if usage.in_flight}
        for name, usage in sorted(shown.items()):
            if not name:
                continue
            for status, count in sorted(usage.responses.copy().items()):
                responses.add_metric([name, str(status)], count)
            for limit, count in sorted(usage.refusals.copy().items()):
                refusals.add_metric([name, limit], count)
            prompt.add_metric([name], usage.prompt_tokens)
            generated.add_metric([name], usage.generated_tokens)
            in_flight.add_metric([name], usage.in_flight)
        if any(shown):
            yield from (responses, refusals, prompt, generated, in_flight)


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers have them: "12ms", "1.5s", "6m0s"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return f"{math.ceil(seconds) // 60}m{math.ceil(seconds) % 60}s"
