"""What a long prompt does to others, on a server that has nothing else to do.

    python load_tests/long_prompt.py [--base-url http://127.0.0.1:8000] [--tokens 3000] [--repeats 3]

Asks the first model that the server lists for completions of random token ids, so that nothing is in its prefix cache:
the long prompt alone, beside a short one that is sent a second later, and beside streams that run already. Prints
seconds: medians, and all values in order; then the seed of the prompts, another one in every run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import httpx

from app.bench.load import check_loopback
from app.bench.stream import Outcome, complete
from punica_core.bench.workload import PlannedRequest

SHORT_TOKENS = 32
"""Of a chat with two words, its template included."""

STREAMS = 4
STREAM_TOKENS = 16
ANSWER_TOKENS = 4


class RequestFailed(Exception):
    """A request was not answered, so there are no figures."""


class Client:
    """Sends completions to one server; `figures` collects what was seen, in seconds or tokens a second."""

    def __init__(self, http: httpx.AsyncClient, model: str, num_tokens: int, seed: int) -> None:
        self.figures: dict[str, list[float]] = defaultdict(list)
        self._http = http
        self._model = model
        self._num_tokens = num_tokens
        self._random = random.Random(seed)
        self._started = time.perf_counter()

    def ask(self, prompt_tokens: int, max_tokens: int = ANSWER_TOKENS) -> asyncio.Task[Outcome]:
        """Send a prompt of random ids now. The outcome's times are seconds since this client was made."""
        ids = tuple(self._random.randrange(1000, 10_000) for _ in range(prompt_tokens))
        request = PlannedRequest(self._model, ids, max_tokens)
        return asyncio.create_task(complete(self._http, request, self._now(), self._started))

    async def alone(self) -> None:
        """Each of the two prompts with nothing beside it."""
        self._note("short prompt alone: first token", (await checked(self.ask(SHORT_TOKENS))).ttft)
        self._note("long prompt alone: first token", (await checked(self.ask(self._num_tokens))).ttft)

    async def beside_a_short_one(self, delay: float) -> None:
        """The short prompt arrives `delay` seconds after the long one."""
        long = self.ask(self._num_tokens)
        await asyncio.sleep(delay)
        short = self.ask(SHORT_TOKENS)
        self._note(f"short prompt, {delay:g} s after a long one: first token", (await checked(short)).ttft)
        self._note("long prompt beside it: first token", (await checked(long)).ttft)

    async def beside_streams(self, solo_seconds: float) -> None:
        """The long prompt arrives when streams have run for `solo_seconds`; they are cut off after its first token."""
        streams = [self.ask(STREAM_TOKENS, self._num_tokens) for _ in range(STREAMS)]
        await asyncio.sleep(solo_seconds)
        arrived = self._now()
        long = await checked(self.ask(self._num_tokens))
        first = arrived + long.ttft
        for stream in streams:
            stream.cancel()
        times = [outcome.arrivals for outcome in await asyncio.gather(*streams)]
        self._note(f"{STREAMS} streams: tokens/s", _rate(times, arrived - solo_seconds / 2, arrived))
        self._note("the same while the long prompt is computed: tokens/s", _rate(times, arrived, first))
        self._note("longest time between tokens of one meanwhile", _longest_gap(times, arrived, first))
        self._note("long prompt beside streams: first token", long.ttft)

    def _note(self, name: str, value: float) -> None:
        self.figures[name].append(value)

    def _now(self) -> float:
        return time.perf_counter() - self._started


async def checked(task: asyncio.Task[Outcome]) -> Outcome:
    """The outcome of a request. Raises `RequestFailed` if it was not answered."""
    outcome = await task
    if outcome.error:
        raise RequestFailed(f"a request failed: {outcome.error}")
    return outcome


def _rate(times: Sequence[Sequence[float]], begin: float, end: float) -> float:
    return sum(begin <= arrival < end for arrivals in times for arrival in arrivals) / (end - begin)


def _longest_gap(times: Sequence[Sequence[float]], begin: float, end: float) -> float:
    """Of those that end in [begin, end]; 0 if there is none."""
    gaps = (gap for arrivals in times for gap in pairwise(arrivals))
    return max((after - before for before, after in gaps if begin <= after <= end), default=0.0)


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """All cases, `repeats` times in turns, after one short request that is not counted.

    Raises ValueError or an `httpx.HTTPError` if the server cannot be used, `RequestFailed` if it does not answer.
    """
    async with httpx.AsyncClient(base_url=options.base_url, timeout=600.0, trust_env=False) as http:
        listed = (await http.get("/v1/models")).raise_for_status().json()["data"]
        if not listed:
            raise ValueError(f"{options.base_url}/v1/models lists no models.")
        client = Client(http, listed[0]["id"], options.tokens, options.seed)
        await checked(client.ask(SHORT_TOKENS))
        for _ in range(options.repeats):
            await client.alone()
            await client.beside_a_short_one(options.delay)
            await client.beside_streams(options.solo_seconds)
    return client.figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each figure. Exit codes: 0 all requests completed, 1 one did not, 2 no usable server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--tokens", type=int, default=3000, help="length of the long prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay", type=float, default=1.0, help="seconds between the long prompt and the short one")
    parser.add_argument("--solo-seconds", type=float, default=4.0, help="of the streams before the long prompt arrives")
    parser.add_argument(
        "--seed",
        type=int,
        help="of the prompts, to repeat them (default: a new one, whose prompts no server has cached)",
    )
    parser.add_argument("--allow-remote", action="store_true", help="allow a server that is not on this machine")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = secrets.randbits(48)
    try:
        if not options.allow_remote:
            check_loopback(options.base_url)
        figures = asyncio.run(measure(options))
    except RequestFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    for name, values in figures.items():
        print(f"{name}: {statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})")
    print(f"seed: {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
