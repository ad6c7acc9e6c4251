"""Tenants share what there is: one that asks for all leaves room for the others."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.seats import Seats
from punica_core.errors import InvalidRequest, QueueFull
from tests.app.conftest import MakeServer


def admitted(seats: Seats, tenant: str, count: int = 1, tokens: int = 1) -> bool:
    """tokens: of each sequence."""
    try:
        seats.check(tenant, count, count * tokens)
    except QueueFull:
        return False
    for _ in range(count):
        seats.take(tenant, tokens)
    return True


def fill(seats: Seats, tenant: str, **request: int) -> int:
    """How many requests of a tenant that asks again and again come in."""
    times = 0
    while admitted(seats, tenant, **request):
        times += 1
    return times


def test_a_greedy_tenant_leaves_room_for_others() -> None:
    seats = Seats(1000, 10**6, lambda: True)
    assert fill(seats, "greedy") == 800
    assert fill(seats, "second") == 160
    assert admitted(seats, "third", count=5)
    alone = Seats(1000, 10**6, lambda: False)
    assert fill(alone, "greedy") == 1000
    assert not admitted(alone, "second")


def test_as_others_come_a_greedy_tenant_must_give_way() -> None:
    seats = Seats(100, 10**6, lambda: True)
    greedy, other = fill(seats, "greedy"), 0
    for _ in range(200):  # one of the first's ends; both ask again
        seats.leave_queue("greedy", 1)
        seats.give_back("greedy")
        other += fill(seats, "other")
        greedy += fill(seats, "greedy") - 1
    assert (greedy, other) == (44, 45)  # four ninths each


def test_prompt_tokens_are_shared_too() -> None:
    seats = Seats(10**6, 1000, lambda: True)
    assert fill(seats, "greedy", tokens=10) == 80
    assert admitted(seats, "other", tokens=190)
    alone = Seats(10**6, 1000, lambda: False)
    assert fill(alone, "greedy", tokens=10) == 100
    assert not admitted(alone, "other", tokens=190)


def test_one_long_prompt_of_a_tenant_is_no_greed() -> None:
    seats = Seats(100, 1000, lambda: True)
    assert admitted(seats, "a", tokens=5000)
    assert not admitted(seats, "b")  # as where there is one tenant
    seats.leave_queue("a", 5000)
    assert admitted(seats, "b", tokens=950)
    assert admitted(seats, "c", tokens=40)


def test_what_one_key_could_never_have_is_not_told_to_come_back() -> None:
    seats = Seats(100, 10**6, lambda: True)
    with pytest.raises(InvalidRequest, match="at most 80 fit"):
        seats.check("a", 81, 81)
    assert admitted(seats, "a", count=80)
    Seats(100, 10**6, lambda: False).check("a", 100, 100)


def test_who_has_no_key_is_no_tenant() -> None:
    seats = Seats(100, 10**6, lambda: True)
    assert fill(seats, "") == 100


@given(
    size=st.integers(2, 60),
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8)), max_size=80),
    ends=st.lists(st.sampled_from("abc"), max_size=20),
)
def test_there_is_always_a_seat_for_who_has_none(size: int, asked: list[tuple[str, int]], ends: list[str]) -> None:
    seats = Seats(size, 10**6, lambda: True)
    held = dict.fromkeys("abc", 0)
    for turn, (tenant, count) in enumerate(asked):
        if turn < len(ends) and held[ends[turn]]:
            held[ends[turn]] -= 1
            seats.leave_queue(ends[turn], 1)
            seats.give_back(ends[turn])
        try:
            held[tenant] += count if admitted(seats, tenant, count) else 0
        except InvalidRequest:
            assert count > size * 4 // 5
        if sum(map(bool, held.values())) == 1:
            seats.check("newcomer", 1, 1)
    for tenant, count in held.items():
        for _ in range(count):
            seats.leave_queue(tenant, 1)
            seats.give_back(tenant)
    assert (seats.queued_tokens, seats._taken, +seats._taken_by, +seats._queued_by) == (0, 0, {}, {})


async def test_a_key_that_asks_for_all_does_not_keep_others_out(make_server: MakeServer, tmp_path: object) -> None:
    file = f"{tmp_path}/keys.yaml"
    with open(file, "w") as stream:
        stream.write("keys:\n- {name: greedy, key: greedy-key}\n- {name: other, key: other-key}\n")
    settings = {"api_keys_file": file, "max_num_seqs": 4, "max_queue": 6}
    async with make_server(settings=settings, step_seconds=0.001) as server:

        async def ask(key: str, n: int) -> int:
            body = {"model": "base", "prompt": "hi", "max_tokens": 400, "n": n}
            headers = {"authorization": f"Bearer {key}"}
            return (await server.http.post("/v1/completions", json=body, headers=headers)).status_code

        first = [asyncio.create_task(ask("greedy-key", 4)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert await ask("greedy-key", 9) == 400
        assert await ask("other-key", 1) == 200
        assert sorted(await asyncio.gather(*first)) == [200, 200, 429]
