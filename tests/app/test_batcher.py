from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from app.batcher import Batcher
from app.flight import ClientGone, SequenceRequest
from app.metrics import ModelMetrics
from punica_core.errors import Draining, EngineRestarting, InvalidRequest, PunicaError, QueueFull, WorkerLost
from punica_core.protocol import AdapterRef, FileSignature, FinishReason, NewSequence, SamplingParams, SequenceOutput

REQUEST = SequenceRequest([1, 2, 3], SamplingParams(max_tokens=8))


class Engine:
    """Records the messages it gets."""

    def __init__(self) -> None:
        self.submissions: list[list[NewSequence]] = []
        self.cancels: list[list[int]] = []
        self.failure: PunicaError | None = None

    def submit(self, sequences: Sequence[NewSequence]) -> None:
        self.submissions.append(list(sequences))

    def cancel(self, request_ids: Sequence[int]) -> None:
        self.cancels.append(list(request_ids))

    def check_ready(self) -> None:
        if self.failure is not None:
            raise self.failure


def batcher_of(engine: Engine, seats: int = 1000, queue_tokens: int = 10**6) -> Batcher:
    return Batcher(
        engine.submit,
        engine.cancel,
        engine.check_ready,
        max_num_seqs=1,
        max_queue=seats - 1,
        max_queue_tokens=queue_tokens,
    )


async def turn() -> None:
    await asyncio.sleep(0)


def adapter(name: str) -> AdapterRef:
    signature = FileSignature(1, 2, 3, 4)
    return AdapterRef(name=name, path=f"/{name}", config_signature=signature, weights_signature=signature)


async def test_64_arrivals_of_one_turn_are_one_message_with_mixed_adapters() -> None:
    engine = Engine()
    batcher = batcher_of(engine)

    async def arrive(index: int) -> None:
        batcher.open([REQUEST], ModelMetrics(), adapter=adapter(f"a{index % 4}") if index % 5 else None)

    await asyncio.gather(*(arrive(index) for index in range(64)))
    await turn()
    assert [len(message) for message in engine.submissions] == [64]
    assert len({sequence.request_id for sequence in engine.submissions[0]}) == 64
    assert {sequence.adapter.name if sequence.adapter else None for sequence in engine.submissions[0]} == {
        None, "a0", "a1", "a2", "a3",
    }  # fmt: skip


async def test_arrivals_of_different_turns_are_different_messages() -> None:
    engine = Engine()
    batcher = batcher_of(engine)
    for _ in range(3):
        batcher.open([REQUEST], ModelMetrics())
        await turn()
    assert [len(message) for message in engine.submissions] == [1, 1, 1]


async def test_outputs_that_arrive_while_the_reader_is_away_come_as_one() -> None:
    batcher = batcher_of(Engine())
    flight = batcher.open([REQUEST], ModelMetrics())
    await turn()
    for token in (5, 6, 7):
        batcher.on_outputs([SequenceOutput(1, [token])])
    (sequence,) = await flight.changed()
    assert sequence.take_tokens() == [5, 6, 7]


async def test_a_reader_that_is_not_eager_wakes_only_at_the_end() -> None:
    batcher = batcher_of(Engine())
    flight = batcher.open([REQUEST], ModelMetrics(), eager=False)
    await turn()
    reader = asyncio.create_task(flight.changed())
    batcher.on_outputs([SequenceOutput(1, [5])])
    await turn()
    assert not reader.done()
    batcher.on_outputs([SequenceOutput(1, [6], FinishReason.LENGTH)])
    assert [sequence.take_tokens() for sequence in await reader] == [[5, 6]]


async def test_full_queue_refuses_all_of_a_request_or_none() -> None:
    engine = Engine()
    batcher = batcher_of(engine, seats=4)
    batcher.open([REQUEST] * 3, ModelMetrics())
    with pytest.raises(QueueFull, match="3 sequences are running or waiting and 2 more"):
        batcher.open([REQUEST] * 2, ModelMetrics())
    batcher.open([REQUEST], ModelMetrics())
    assert batcher.in_flight == 4


async def test_a_request_that_could_never_fit_is_not_told_to_come_back() -> None:
    with pytest.raises(InvalidRequest, match="at most 4"):
        batcher_of(Engine(), seats=4).open([REQUEST] * 5, ModelMetrics())


async def test_prompt_tokens_that_wait_are_bounded_until_the_engine_answers() -> None:
    batcher = batcher_of(Engine(), queue_tokens=8)
    batcher.open([REQUEST] * 2, ModelMetrics())
    with pytest.raises(QueueFull, match="6 prompt tokens are waiting and 3 more would exceed the limit of 8"):
        batcher.open([REQUEST], ModelMetrics())
    assert (batcher.in_flight, batcher.queued_tokens) == (2, 6)
    await turn()
    batcher.on_outputs([SequenceOutput(1, [4])])
    batcher.open([REQUEST], ModelMetrics())
    assert (batcher.in_flight, batcher.queued_tokens) == (3, 6)


async def test_prompt_tokens_stop_waiting_however_a_sequence_ends() -> None:
    batcher = batcher_of(Engine())
    flights = [batcher.open([REQUEST], ModelMetrics()) for _ in range(4)]
    flights[0].abandon()  # before it left
    assert batcher.queued_tokens == 9
    await turn()
    flights[1].abandon()
    assert batcher.queued_tokens == 9  # the engine has it still
    batcher.on_outputs([SequenceOutput(2, finish_reason=FinishReason.CANCELLED)])
    batcher.on_outputs([SequenceOutput(3, [5]), SequenceOutput(3, [6], FinishReason.LENGTH)])
    assert batcher.queued_tokens == 3
    batcher.fail_all(WorkerLost("gone"))
    assert (batcher.in_flight, batcher.queued_tokens) == (0, 0)


async def test_a_prompt_beyond_the_bound_is_admitted_alone_and_several_never() -> None:
    batcher = batcher_of(Engine(), queue_tokens=2)
    with pytest.raises(InvalidRequest, match="6 prompt tokens"):
        batcher.open([REQUEST] * 2, ModelMetrics())
    batcher.open([REQUEST], ModelMetrics())
    with pytest.raises(QueueFull):
        batcher.open([REQUEST], ModelMetrics())


async def test_a_seat_is_free_after_the_terminal_output() -> None:
    batcher = batcher_of(Engine(), seats=1)
    batcher.open([REQUEST], ModelMetrics())
    await turn()
    batcher.on_outputs([SequenceOutput(1, finish_reason=FinishReason.STOP)])
    assert batcher.in_flight == 0
    batcher.open([REQUEST], ModelMetrics())


async def test_a_sequence_that_never_left_is_cancelled_without_the_engine() -> None:
    engine = Engine()
    batcher = batcher_of(engine)
    batcher.open([REQUEST], ModelMetrics()).abandon()
    await turn()
    assert (engine.submissions, engine.cancels, batcher.in_flight) == ([], [], 0)


async def test_a_sequence_that_left_is_cancelled_once_and_keeps_its_seat_until_its_end() -> None:
    engine = Engine()
    batcher = batcher_of(engine)
    flight = batcher.open([REQUEST, REQUEST], ModelMetrics())
    await turn()
    flight.abandon()
    flight.close()
    await turn()
    assert engine.cancels == [[1, 2]]
    assert batcher.in_flight == 2
    batcher.on_outputs([SequenceOutput(1, [4]), SequenceOutput(1, finish_reason=FinishReason.CANCELLED)])
    assert batcher.in_flight == 1


async def test_the_reader_of_an_abandoned_flight_is_released() -> None:
    batcher = batcher_of(Engine())
    flight = batcher.open([REQUEST], ModelMetrics())
    reader = asyncio.create_task(flight.changed())
    await turn()
    flight.abandon()
    with pytest.raises(ClientGone):
        await reader


async def test_losing_the_engine_ends_every_sequence_once_with_the_error() -> None:
    engine = Engine()
    batcher = batcher_of(engine)
    flights = [batcher.open([REQUEST], ModelMetrics()) for _ in range(3)]
    await turn()
    flights.append(batcher.open([REQUEST], ModelMetrics()))  # not sent yet
    batcher.fail_all(WorkerLost("gone"))
    batcher.on_outputs([SequenceOutput(1, [9], FinishReason.STOP)])  # too late
    for flight in flights:
        (sequence,) = await flight.changed()
        assert isinstance(sequence.error, WorkerLost)
        assert sequence.take_tokens() == []
    await turn()
    assert [len(message) for message in engine.submissions] == [3]
    assert batcher.in_flight == 0


async def test_error_outputs_become_exceptions_of_the_tree() -> None:
    batcher = batcher_of(Engine())
    flight = batcher.open([REQUEST], ModelMetrics())
    await turn()
    batcher.on_outputs(
        [SequenceOutput(1, finish_reason=FinishReason.ERROR, error_code="adapter_invalid", error_message="bad")]
    )
    (sequence,) = await flight.changed()
    assert sequence.error is not None
    assert (sequence.error.code, sequence.error.message) == ("adapter_invalid", "bad")


async def test_draining_refuses_new_work_and_lets_old_work_end() -> None:
    batcher = batcher_of(Engine())
    flight = batcher.open([REQUEST], ModelMetrics())
    await turn()
    batcher.begin_drain()
    with pytest.raises(Draining):
        batcher.open([REQUEST], ModelMetrics())
    idle = asyncio.create_task(batcher.wait_idle())
    await turn()
    assert not idle.done()
    batcher.on_outputs([SequenceOutput(1, [4], FinishReason.LENGTH)])
    await idle
    assert [sequence.take_tokens() for sequence in await flight.changed()] == [[4]]


async def test_without_an_engine_nothing_is_admitted() -> None:
    engine = Engine()
    engine.failure = EngineRestarting("wait")
    batcher = batcher_of(engine)
    with pytest.raises(EngineRestarting):
        batcher.open([REQUEST], ModelMetrics())
    assert batcher.in_flight == 0


async def test_tokens_are_counted_under_the_model_that_was_asked_for() -> None:
    batcher = batcher_of(Engine())
    base, sql = ModelMetrics(), ModelMetrics()
    batcher.open([REQUEST], base)
    batcher.open([REQUEST], sql)
    await turn()
    batcher.on_outputs([SequenceOutput(1, [4]), SequenceOutput(2, [4, 5])])
    assert (base.generated_tokens, sql.generated_tokens) == (1, 2)


async def test_the_end_of_a_request_is_told_once_with_what_was_generated() -> None:
    batcher, ends = batcher_of(Engine()), []
    flight = batcher.open([REQUEST] * 2, ModelMetrics(), on_end=ends.append)
    await turn()
    batcher.on_outputs([SequenceOutput(1, [5, 6]), SequenceOutput(2, [7])])
    batcher.on_outputs([SequenceOutput(1, [8], FinishReason.LENGTH)])
    assert ends == []
    flight.close()  # the second is cancelled; its seat is taken until the engine says so
    assert ends == []
    batcher.on_outputs([SequenceOutput(2, finish_reason=FinishReason.CANCELLED)])
    assert ends == [4]


@pytest.mark.parametrize("sent", [False, True])
async def test_the_end_is_told_also_when_all_fail_or_the_client_leaves_at_once(sent: bool) -> None:
    batcher, ends = batcher_of(Engine()), []
    batcher.open([REQUEST] * 2, ModelMetrics(), on_end=ends.append)
    if sent:
        await turn()
    batcher.fail_all(WorkerLost("gone"))
    assert ends == [0]
    batcher.open([REQUEST] * 2, ModelMetrics(), on_end=ends.append).abandon()
    assert ends == [0, 0]
    assert batcher.in_flight == 0


async def test_an_adapter_is_unused_when_its_last_sequence_has_given_its_seat_back() -> None:
    batcher = batcher_of(Engine())
    used = adapter("used")
    batcher.open([REQUEST] * 2, ModelMetrics(), adapter=used)
    batcher.open([REQUEST], ModelMetrics(), adapter=adapter("other"))
    await turn()
    waits = [asyncio.create_task(batcher.wait_unused(used.path)) for _ in range(2)]
    await turn()
    waits[0].cancel()  # one who waits no longer is no concern of the other
    batcher.on_outputs([SequenceOutput(1, [5], FinishReason.LENGTH)])
    await turn()
    assert not waits[1].done()
    batcher.on_outputs([SequenceOutput(2, [5], FinishReason.LENGTH)])
    await asyncio.wait_for(waits[1], 5)
    await asyncio.wait_for(batcher.wait_unused("/nobody"), 5)


async def test_tokens_that_come_with_the_end_are_counted() -> None:
    batcher, ends = batcher_of(Engine()), []
    batcher.open([REQUEST], ModelMetrics(), on_end=ends.append)
    await turn()
    batcher.on_outputs([SequenceOutput(1, [5])])
    batcher.on_outputs([SequenceOutput(1, [6, 7], FinishReason.LENGTH)])
    assert ends == [3]
