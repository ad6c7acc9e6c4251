"""The check of answers passes for right ones, and not for those of a wrong adapter or with one wrong token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from punica_core.bench.answers import check_answers
from punica_core.bench.session import Answer, Session
from punica_core.protocol import AdapterRef


def run(session: Session, refs: Sequence[AdapterRef | None]) -> list[Answer]:
    requests = [
        session.request([3 + 11 * index + i for i in range(6)], 10, ref, tenant="mixed")
        for index, ref in enumerate(refs)
    ]
    return session.run(requests)


@pytest.fixture
def mixed(session: Session) -> list[Answer]:
    return run(session, session.adapters.refs)


def test_right_answers_pass(session: Session, mixed: list[Answer]) -> None:
    report = check_answers(session, mixed, every=2)
    assert report.passed
    assert (report.sampled, report.equal, report.control_equal) == (3, 3, 3)
    assert report.mixed.tokens == 30
    assert report.wrong.largest > report.band
    assert report.to_json()["passed"] is True


def test_one_wrong_token_fails(session: Session, mixed: list[Answer]) -> None:
    mixed[0].token_ids[5] = (mixed[0].token_ids[5] + 100) % session.layout.vocab_size
    report = check_answers(session, mixed, every=2)
    assert not report.passed
    assert report.equal == 2


def test_answers_of_another_adapter_fail(session: Session, mixed: list[Answer]) -> None:
    others = run(session, [*session.adapters.refs[1:], session.adapters.refs[0]])
    for answer, other in zip(mixed, others, strict=True):
        answer.token_ids = other.token_ids
    assert not check_answers(session, mixed, every=2).passed
