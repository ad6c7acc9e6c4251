"""The engine as a benchmark drives it: everything ends, adapters count, and what cannot run is said."""

from __future__ import annotations

import gc

import pytest

from punica_core.bench.session import EngineChoice, Session
from punica_core.protocol import AdapterRef

PROMPTS = [[3 + 7 * i + j for j in range(5 + i)] for i in range(6)]


def answers(session: Session, refs: list[AdapterRef | None], at_once: int | None = None) -> list[list[int]]:
    requests = [
        session.request(prompt, 8 + index, ref) for index, (prompt, ref) in enumerate(zip(PROMPTS, refs, strict=True))
    ]
    found = session.run(requests, at_once)
    assert [len(answer.token_ids) for answer in found] == [8 + index for index in range(6)]
    assert all(len(answer.times) == len(answer.token_ids) for answer in found)
    assert all(answer.submitted <= answer.times[0] <= answer.times[-1] for answer in found)
    return [answer.token_ids for answer in found]


def test_adapters_change_what_is_generated_and_company_does_not(session: Session) -> None:
    refs: list[AdapterRef | None] = [None, *session.adapters.refs]
    mixed = answers(session, refs)
    assert mixed == answers(session, refs, at_once=1)
    plain = answers(session, [None] * 6)
    assert plain[0] == mixed[0]
    changed = [ours != theirs for ours, theirs in zip(mixed[1:], plain[1:], strict=True)]
    assert sum(changed) >= 4, changed


def test_at_most_so_many_are_in_the_engine_at_once(session: Session) -> None:
    most = 0
    step = session.step

    def watched() -> list[object]:
        nonlocal most
        outputs = step()
        stats = session.stats()
        most = max(most, stats.running + stats.waiting + sum(o.finish_reason is not None for o in outputs))
        return outputs  # type: ignore[return-value]

    session.step = watched  # type: ignore[method-assign,assignment]
    try:
        answers(session, [None] * 6, at_once=2)
    finally:
        del session.step
    assert most == 2


def test_adapters_are_loaded_once(session: Session) -> None:
    session.preload(session.adapters.refs)
    session.stats()
    session.preload(session.adapters.refs)
    stats = session.stats()
    assert stats.adapter_loads == []
    assert stats.adapters_host == len(session.adapters.refs)
    assert session.memory()["adapter_host_bytes"] > 0


def test_a_request_that_cannot_run_is_an_error(session: Session) -> None:
    with pytest.raises(RuntimeError, match="Shorten the prompt"):
        session.run([session.request([5] * 200, 4)])
    assert answers(session, [None] * 6)


def test_cancelled_requests_are_gone(session: Session) -> None:
    requests = [session.request(prompt, 50) for prompt in PROMPTS]
    session.submit(requests)
    session.step()
    session.cancel(requests)
    assert (session.stats().running, session.stats().waiting) == (0, 0)


def test_the_device_decides_where_kv_is_sized() -> None:
    assert not EngineChoice(model="tiny", device="cpu").is_on_gpu
    assert EngineChoice(model="tiny", device="cuda").is_on_gpu


def test_collections_do_not_look_through_the_engine(session: Session) -> None:
    made_since = [session]
    looked_at = {id(found) for found in gc.get_objects()}
    assert id(made_since) in looked_at
    assert id(type(session._engine)) not in looked_at
