"""Whether a sequence's answer is its own, whoever it shared its steps with.

In 16 bits another shape of a batch may move a logit by an ulp, and a near tie then falls the other way. So answers are
not only compared: each token is scored by the model alone, and may stay behind the likeliest one by no more than the
tokens of answers that had no company do (`Report.band`). The same answers scored under another adapter must not pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from punica_core.bench.session import Answer, Session
from punica_core.protocol import AdapterRef

LEAST_BAND: Final[Mapping[str, float]] = MappingProxyType({"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1})
"""Nats by which a token may stay behind even if no token of the control does."""


@dataclass(frozen=True, slots=True)
class Margins:
    """By how many nats the tokens of answers stay behind the likeliest one. behind: how many do at all."""

    tokens: int
    behind: int
    largest: float

    @classmethod
    def of(cls, margins: Sequence[float]) -> Margins:
        found = np.asarray(margins)
        return cls(len(margins), int((found > 0).sum()), float(found.max(initial=0.0)))


@dataclass(frozen=True, slots=True)
class Report:
    """equal: answers with the tokens of the same request alone; control_equal: the same of the sample run by itself.

    mixed: margins of the answers in question; alone, control: of the two without company; wrong: of the answers in
    question under another adapter.
    """

    sampled: int
    equal: int
    control_equal: int
    mixed: Margins
    alone: Margins
    control: Margins
    wrong: Margins
    least_band: float

    @property
    def band(self) -> float:
        return 2 * max(self.alone.largest, self.control.largest, self.least_band)

    @property
    def passed(self) -> bool:
        """The answers are within the band, and another adapter's would not be."""
        return self.mixed.largest <= self.band < self.wrong.largest

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found | {"band": self.band, "passed": self.passed}


def check_answers(session: Session, answers: Sequence[Answer], every: int = 10) -> Report:
    """Check every so many-th answer of a run against the same requests one at a time. Greedy requests only."""
    sample = answers[::every]
    alone = [session.run([_again(session, answer, "alone")])[0] for answer in sample]
    control = session.run([_again(session, answer, "control") for answer in sample])
    adapters = [answer.request.adapter for answer in sample]
    others = [_another(session.adapters.refs, adapter) for adapter in adapters]
    return Report(
        sampled=len(sample),
        equal=_num_equal(sample, alone),
        control_equal=_num_equal(control, alone),
        mixed=score(session, sample, adapters),
        alone=score(session, alone, adapters),
        control=score(session, control, adapters),
        wrong=score(session, sample, others),
        least_band=LEAST_BAND[session.layout.dtype],
    )


def score(session: Session, answers: Sequence[Answer], adapters: Sequence[AdapterRef | None]) -> Margins:
    """Margins of the answers' tokens by the model with these adapters, each answer in steps of its own."""
    margins: list[float] = []
    for answer, adapter in zip(answers, adapters, strict=True):
        whole = [*answer.request.prompt_ids, *answer.token_ids]
        # Scoring a prompt reads no prefix cache, so nothing of the run in question is used.
        (scored,) = session.run([session.request(whole, 0, adapter, tenant="score", prompt_logprobs=1)])
        assert scored.last is not None
        assert scored.last.prompt_logprobs is not None
        prompt_length = len(answer.request.prompt_ids)
        for entry in scored.last.prompt_logprobs.part(prompt_length - 1, len(whole) - 1):
            margins.append(entry.top[0][1] - entry.logprob)
    return Margins.of(margins)


def _again(session: Session, answer: Answer, tenant: str) -> Any:
    """The same request for another tenant: it shares no KV with the first."""
    request = answer.request
    return session.request(request.prompt_ids, request.sampling.max_tokens, request.adapter, tenant=tenant)


def _another(refs: Sequence[AdapterRef], adapter: AdapterRef | None) -> AdapterRef | None:
    return next((ref for ref in refs if ref != adapter), None)


def _num_equal(answers: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    return sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(answers, wanted, strict=True))
