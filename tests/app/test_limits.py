"""Limits of a key against a clock that stands still until it is told to go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from app.keys import ApiKey, KeyLimits
from app.limits import Bucket, KeyUsage, KeyUsages, duration
from punica_core.errors import InvalidRequest, RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def usage_of(clock: Clock, **limits: int) -> KeyUsage:
    usage = KeyUsage("acme", clock)
    usage.set_limits(KeyLimits(**limits))
    return usage


def shown(usage: KeyUsage) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in usage.headers()}


def test_a_key_without_limits_is_never_stopped_and_says_nothing(clock: Clock) -> None:
    usage = usage_of(clock)
    for _ in range(1000):
        usage.take_request()
        usage.reserve(1000, 10**6, 10**6)
    assert usage.headers() == []


def test_requests_beyond_the_limit_are_told_when_to_come_back(clock: Clock) -> None:
    usage = usage_of(clock, requests_per_minute=3)
    for left in (2, 1, 0):
        usage.take_request()
        assert shown(usage)["remaining-requests"] == str(left)
    with pytest.raises(RateLimited, match=r"on requests per minute: limit 3, used 3, requested 1\. .* in 20s\."):
        usage.take_request()
    clock.now += 19.9
    with pytest.raises(RateLimited) as caught:
        usage.take_request()
    assert caught.value.retry_after == pytest.approx(0.1)
    clock.now += 0.2  # what was refused was not counted
    usage.take_request()
    with pytest.raises(RateLimited):
        usage.take_request()


def test_headers_tell_limit_rest_and_time_to_the_full_measure(clock: Clock) -> None:
    usage = usage_of(clock, requests_per_minute=60, tokens_per_minute=600)
    usage.take_request()
    usage.reserve(1, 100, 50)
    assert shown(usage) == {
        "limit-requests": "60",
        "remaining-requests": "59",
        "reset-requests": "1s",
        "limit-tokens": "600",
        "remaining-tokens": "450",
        "reset-tokens": "15s",
    }
    clock.now += 3600
    assert shown(usage)["remaining-tokens"] == "600"
    assert shown(usage)["reset-tokens"] == "0ms"


def test_what_was_reserved_is_replaced_by_what_was_used(clock: Clock) -> None:
    usage = usage_of(clock, tokens_per_minute=1000)
    lease = usage.reserve(2, 100, 500)
    assert shown(usage)["remaining-tokens"] == "400"
    with pytest.raises(RateLimited, match="tokens per minute: limit 1000, used 600, requested 401"):
        usage.reserve(1, 401, 0)
    lease.end(100, 30)
    assert shown(usage)["remaining-tokens"] == "870"
    lease.end(100, 30)  # once is enough
    assert shown(usage)["remaining-tokens"] == "870"
    assert (usage.prompt_tokens, usage.generated_tokens, usage.in_flight) == (100, 30, 0)


def test_output_that_nobody_asked_for_by_number_leaves_a_debt(clock: Clock) -> None:
    usage = usage_of(clock, tokens_per_minute=600)
    lease = usage.reserve(1, 100, 0)
    lease.end(100, 800)
    assert shown(usage)["remaining-tokens"] == "0"
    with pytest.raises(RateLimited) as caught:
        usage.reserve(1, 1, 0)
    assert caught.value.retry_after == pytest.approx(30.1)
    clock.now += 30.2
    usage.reserve(1, 1, 0)


def test_sequences_at_once_are_limited_until_their_request_ends(clock: Clock) -> None:
    usage = usage_of(clock, max_concurrent=4)
    first, _second = usage.reserve(2, 1, 1), usage.reserve(2, 1, 1)
    with pytest.raises(RateLimited, match="concurrent sequences: limit 4, running 4, requested 1"):
        usage.reserve(1, 1, 1)
    first.end(1, 0)
    usage.reserve(2, 1, 1)
    with pytest.raises(RateLimited):
        usage.reserve(1, 1, 1)


def test_what_would_never_fit_is_not_told_to_come_back(clock: Clock) -> None:
    usage = usage_of(clock, max_concurrent=4, tokens_per_minute=1000)
    with pytest.raises(InvalidRequest, match=r"5 sequences .* may have 4 at once"):
        usage.reserve(5, 1, 1)
    with pytest.raises(InvalidRequest, match=r"1001 tokens \(1 in the prompt, 1000 in the output\)"):
        usage.reserve(1, 1, 1000)
    assert usage.in_flight == 0
    assert shown(usage)["remaining-tokens"] == "1000"


def test_a_new_limit_keeps_what_was_used(clock: Clock) -> None:
    usage = usage_of(clock, requests_per_minute=10)
    for _ in range(6):
        usage.take_request()
    usage.set_limits(KeyLimits(requests_per_minute=8, tokens_per_minute=100))
    assert shown(usage)["remaining-requests"] == "2"
    usage.set_limits(KeyLimits(requests_per_minute=5))
    with pytest.raises(RateLimited):
        usage.take_request()
    usage.set_limits(KeyLimits())
    usage.take_request()
    usage.set_limits(KeyLimits(requests_per_minute=5))
    with pytest.raises(RateLimited):
        usage.take_request()
    clock.now += 60
    usage.take_request()


def series(usages: KeyUsages) -> str:
    registry = CollectorRegistry()
    registry.register(usages)
    return generate_latest(registry).decode()


def test_usage_goes_with_its_key_once_nothing_runs(clock: Clock) -> None:
    usages = KeyUsages(clock)
    old = ApiKey("old", limits=KeyLimits(max_concurrent=1))
    lease = usages.of(old).reserve(1, 1, 1)
    usages.set_keys([ApiKey("new")])
    assert usages.of(old).in_flight == 1
    assert 'punica_key_in_flight{key="old"} 1.0' in series(usages)
    lease.end(1, 1)
    assert "old" not in series(usages)
    usages.set_keys([ApiKey("new")])
    assert usages.of(old).prompt_tokens == 0  # another one


def indebted(usages: KeyUsages, key: ApiKey) -> None:
    """Leave the key with a debt of two minutes."""
    usages.of(key).reserve(1, 10, 0).end(10, 290)


@pytest.mark.parametrize("back", [ApiKey("acme", digest=b"1"), ApiKey("acme", digest=b"2"), ApiKey("new", digest=b"1")])
def test_a_key_that_goes_and_comes_back_finds_its_debt(clock: Clock, back: ApiKey) -> None:
    usages, limits = KeyUsages(clock), KeyLimits(tokens_per_minute=100)
    other = ApiKey("other", limits=limits, digest=b"3")
    indebted(usages, ApiKey("acme", limits=limits, digest=b"1"))
    back = replace(back, limits=limits)
    usages.set_keys([other])
    assert "acme" not in series(usages)
    clock.now += 60
    usages.set_keys([other])
    usages.set_keys([other, back])
    usages.of(other).reserve(1, 100, 0)
    with pytest.raises(RateLimited):
        usages.of(back).reserve(1, 1, 0)
    clock.now += 61
    usages.of(back).reserve(1, 1, 0)


def test_a_debt_is_nobody_elses(clock: Clock) -> None:
    usages, limits = KeyUsages(clock), KeyLimits(tokens_per_minute=100)
    indebted(usages, ApiKey("acme", limits=limits, digest=b"1"))
    usages.set_keys([ApiKey("other", limits=limits, digest=b"2")])
    usages.of(ApiKey("other", limits=limits, digest=b"2")).reserve(1, 100, 0)


def test_what_has_come_back_is_forgotten(clock: Clock) -> None:
    usages, limits = KeyUsages(clock), KeyLimits(tokens_per_minute=100)
    indebted(usages, ApiKey("acme", limits=limits))
    usages.set_keys([])
    assert list(usages._gone) == ["acme"]
    clock.now += 181
    usages.set_keys([])
    assert not usages._gone


def test_a_renamed_key_goes_on_under_its_new_name(clock: Clock) -> None:
    usages, limits = KeyUsages(clock), KeyLimits(max_concurrent=1)
    lease = usages.of(ApiKey("old", limits=limits, digest=b"1")).reserve(1, 1, 0)
    new = ApiKey("new", limits=limits, digest=b"1")
    usages.set_keys([new])
    with pytest.raises(RateLimited, match="'new'"):
        usages.of(new).reserve(1, 1, 0)
    lease.end(1, 0)
    usages.of(new).reserve(1, 1, 0)


def test_metrics_have_names_and_counts(clock: Clock) -> None:
    usages = KeyUsages(clock)
    registry = CollectorRegistry()
    registry.register(usages)
    usages.of(ApiKey(""))  # who needs no key has no series
    assert generate_latest(registry) == b""
    usage = usages.of(ApiKey("acme", limits=KeyLimits(max_concurrent=2)))
    lease = usage.reserve(2, 7, 5)
    with pytest.raises(RateLimited):
        usage.reserve(1, 1, 1)
    usage.responses[200] += 1
    text = generate_latest(registry).decode()
    assert 'punica_key_in_flight{key="acme"} 2.0' in text
    assert 'punica_key_limited_total{key="acme",limit="concurrency"} 1.0' in text
    assert 'punica_key_responses_total{key="acme",status="200"} 1.0' in text
    lease.end(7, 3)
    text = generate_latest(registry).decode()
    assert 'punica_key_in_flight{key="acme"} 0.0' in text
    assert 'punica_key_prompt_tokens_total{key="acme"} 7.0' in text
    assert 'punica_key_generated_tokens_total{key="acme"} 3.0' in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (0.9999, "1000ms"), (1, "1s"), (8.64, "8.7s"), (60, "1m0s"), (359.2, "6m0s")],
)
def test_durations_are_written_as_openai_does_and_never_too_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@settings(max_examples=200, deadline=None)
@given(capacity=st.integers(1, 50), pauses=st.lists(st.floats(0, 30), max_size=60))
def test_no_span_of_time_passes_more_than_a_measure_and_its_share(capacity: int, pauses: list[float]) -> None:
    bucket, now, taken = Bucket(capacity, 0.0), 0.0, []
    for pause in pauses:
        now += pause
        if bucket.seconds_until(1, now) <= 0:
            bucket.take(1, now)
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= capacity + (taken[last] - taken[first]) * capacity / 60 + 1e-6
