from __future__ import annotations

from app.supervisor import StallClock
from punica_core.protocol import Outputs, StepStarted, StepStats


def test_the_stall_bound_counts_from_the_steps_start() -> None:
    stall = StallClock(30.0)
    assert stall.seconds_left(now=1000.0) == 30.0  # idle
    stall.on_event(StepStarted(busy=True), now=1000.0)
    assert stall.seconds_left(now=1029.0) == 1.0
    stall.on_event(StepStarted(busy=True), now=1029.0)
    assert stall.seconds_left(now=1031.0) == 28.0
    stall.on_event(StepStarted(busy=False), now=1031.0)
    assert stall.seconds_left(now=5000.0) == 30.0


def test_work_that_an_idle_engine_does_not_answer_counts_until_it_does() -> None:
    stall = StallClock(30.0)
    stall.on_submit(now=1000.0)
    stall.on_submit(now=1010.0)
    assert stall.seconds_left(now=1029.0) == 1.0
    stall.on_event(Outputs([]), now=1029.0)  # it was refused at once: the engine is idle
    assert stall.seconds_left(now=5000.0) == 30.0
    stall.on_event(StepStarted(busy=True), now=6000.0)
    stall.on_submit(now=6020.0)
    assert stall.seconds_left(now=6020.0) == 10.0  # a step that runs has its own clock


def test_only_an_idle_engine_that_was_silent_for_a_while_is_pinged_and_once() -> None:
    stall = StallClock(30.0, now=1000.0)
    assert not stall.should_ping(now=1009.0)
    assert stall.should_ping(now=1010.0)
    assert not stall.should_ping(now=1025.0)
    assert stall.seconds_left(now=1025.0) == 15.0
    stall.on_event(Outputs(), now=1026.0)
    assert stall.seconds_left(now=1030.0) == 30.0
    stall.on_submit(now=1035.0)
    assert not stall.should_ping(now=1040.0), "it was asked already"
    stall.on_event(StepStarted(busy=True), now=1041.0)
    assert not stall.should_ping(now=1060.0), "a step has its own clock"
    stall.on_event(StepStarted(busy=False), now=1061.0)
    assert stall.should_ping(now=1071.0)


def test_a_slow_step_gives_work_more_time_and_a_ping_none() -> None:
    stall = StallClock(30.0)
    stall.on_event(Outputs([], StepStats(slowest_step_seconds=8.0)), now=1000.0)
    stall.on_submit(now=1000.0)
    assert stall.seconds_left(now=1000.0) == 80.0
    stall.on_event(StepStarted(busy=False), now=1001.0)
    assert stall.should_ping(now=1011.0)
    assert (stall.seconds_left(now=1011.0), stall.bound) == (30.0, 30.0)
    stall.on_submit(now=1031.0)  # what it may do now takes as long as a step
    assert stall.seconds_left(now=1031.0) == 60.0
    stall.on_event(StepStarted(busy=False), now=1032.0)
    assert stall.should_ping(now=1042.0)
    stall.on_event(Outputs(), now=1043.0)
    stall.on_submit(now=1044.0)
    assert stall.seconds_left(now=1044.0) == 80.0, "the ping was answered"


def test_the_stall_bound_is_ten_times_the_slowest_step() -> None:
    stall = StallClock(30.0)
    stall.on_event(StepStarted(busy=True), now=0.0)
    stall.on_event(Outputs([], StepStats(slowest_step_seconds=8.0)), now=8.0)
    assert stall.bound == 80.0
    stall.on_event(Outputs([], StepStats(slowest_step_seconds=9.0)), now=8.1)
    assert stall.bound == 90.0


def test_what_this_process_reads_late_is_no_slow_step() -> None:
    stall = StallClock(30.0)
    stall.on_event(StepStarted(busy=True), now=0.0)
    stall.on_event(Outputs([], StepStats(slowest_step_seconds=0.1)), now=100.0)
    assert stall.bound == 30.0


def test_outputs_of_an_idle_engine_start_no_clock() -> None:
    stall = StallClock(30.0)
    stall.on_event(Outputs([]), now=0.0)
    assert stall.seconds_left(now=1000.0) == 30.0
