"""What crosses the process boundary: tables of logprobs, and messages that fit frames."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_core import protocol
from punica_core.protocol import LogprobTable, Outputs, SequenceOutput, StepStats, TokenLogprobs

FLOATS = st.floats(width=32, allow_nan=False)
PAIRS = st.tuples(st.integers(0, 2**31 - 1), FLOATS)


def entries_of(width: int) -> st.SearchStrategy[list[TokenLogprobs]]:
    rows = st.builds(
        lambda own, top: TokenLogprobs(*own, top), PAIRS, st.lists(PAIRS, min_size=width - 1, max_size=width - 1)
    )
    return st.lists(rows, max_size=5)


LISTS = st.integers(1, 4).flatmap(entries_of)


@given(entries=LISTS, cut=st.integers(0, 5))
def test_a_table_gives_back_what_it_was_made_of(entries: list[TokenLogprobs], cut: int) -> None:
    table = LogprobTable.of(entries)
    assert (len(table), list(table)) == (len(entries), entries)
    assert list(table.own) == [entry.logprob for entry in entries]
    joined = table.part(0, cut)
    joined.extend(table.part(cut, len(table)))
    assert list(joined) == entries
    output = SequenceOutput(1, prompt_logprobs=table, logprobs=joined)
    event = protocol.decode_event(protocol.encode(Outputs([output]))[4:])
    assert event == Outputs([output])


def test_minus_infinity_and_the_smallest_differences_survive() -> None:
    entries = [TokenLogprobs(5, -math.inf, [(2, -0.100000001490116), (0, -3.4e38)])]
    (back,) = LogprobTable.of(entries)
    assert back.logprob == -math.inf
    assert back.top[0] == (2, -0.10000000149011612)  # the nearest fp32, which is what an engine has


def test_rows_of_another_width_are_refused() -> None:
    narrow, wide = TokenLogprobs(1, -1.0), TokenLogprobs(1, -1.0, [(1, -1.0)])
    with pytest.raises(ValueError, match="1 alternatives among entries of 0"):
        LogprobTable.of([narrow, wide])
    table = LogprobTable.of([narrow])
    with pytest.raises(ValueError, match="width 2"):
        table.extend(LogprobTable.of([wide]))
    table.extend(LogprobTable())
    assert list(table) == [narrow]


def test_the_most_that_one_sequence_is_told_fits_a_frame() -> None:
    size = protocol.MAX_LOGPROBS * 4
    table = LogprobTable(1, bytearray(size), bytearray(size))
    ids = list(range(2**20, 2**20 + 1000))
    (frame,) = protocol.event_frames(Outputs([SequenceOutput(1, ids, logprobs=table)]))
    assert len(frame) < protocol.MAX_FRAME_BYTES / 4


def test_outputs_beyond_a_frame_leave_in_several_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = StepStats(running=3)
    event = Outputs(
        [SequenceOutput(i, prompt_logprobs=LogprobTable.of([TokenLogprobs(i, -1.0)] * 40)) for i in range(9)], stats
    )
    assert len(protocol.event_frames(event)) == 1
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 1000)
    frames = protocol.event_frames(event)
    assert max(map(len, frames)) <= 1004 < len(protocol.encode(event))
    parts = [protocol.decode_event(frame[4:]) for frame in frames]
    assert all(isinstance(part, Outputs) for part in parts)
    assert [output for part in parts if isinstance(part, Outputs) for output in part.outputs] == event.outputs
    assert [part.stats for part in parts if isinstance(part, Outputs) and part.stats] == [stats]
    assert parts[-1] == Outputs(event.outputs[-len(parts[-1].outputs) :], stats)  # type: ignore[union-attr]
