"""In which order graphs are recorded, what happens to those that cannot be, and how much of the time that takes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from core.batching.runner import Lane
from core.cuda_graphs import GraphCache
from core.graphs import ExecutableKey
from pipeline.recording import BackgroundRecorder, GraphSet
from tests.core.tape import Tape
from tests.starved import no_threads

WIDTHS = {"double": (1, 2, 4)}


def key(rows: int) -> ExecutableKey:
    return ExecutableKey("double", rows, (8, 8))


class Recordings(GraphSet):
    """Records by an example, and notes in which order."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(GraphCache({"double": lambda x: x * 2}, tape), WIDTHS, self._example)
        self.order: list[int] = []

    def _example(self, key: ExecutableKey, record: Callable[..., Any]) -> None:
        self.order.append(key.rows)
        with torch.inference_mode():
            record(torch.ones(key.rows, 3))


def planned(*rows: int, tape: Tape | None = None) -> Recordings:
    made = Recordings(tape or Tape())
    made.plan(map(key, rows))
    return made


def test_what_traffic_missed_comes_before_what_was_planned() -> None:
    made = planned(4, 2, 1)
    assert made.counts == (0, 3)
    assert made.record_next()
    for rows in (1, 8, 1, 4):  # 4 is there, 1 was missed twice, 8 is wider than was planned
        made.missed(key(rows))
    assert made.counts == (1, 4)
    while made.record_next():
        pass
    assert made.order == [4, 1, 8, 2]
    assert made.counts == (4, 4) and not made.pending
    made.plan([key(2)])
    made.missed(key(2))
    assert not made.pending, "it is there"


def test_widths_are_the_next_ones() -> None:
    made = Recordings(Tape())
    assert [made.width("double", rows) for rows in range(1, 7)] == [1, 2, 4, 4, 5, 6]
    assert made.wider(key(1)) is None
    made.plan([key(4), key(2)])
    made.record_next()
    assert made.wider(key(1)) == key(4) and made.wider(key(4)) is None
    made.record_next()
    assert made.wider(key(1)) == key(2)


class Breaking(Tape):
    """Cannot record what is two rows wide."""

    def __init__(self, lost: bool = False) -> None:
        super().__init__()
        self.lost = lost

    def record(self, function):  # type: ignore[no-untyped-def]
        replay, made = super().record(function)
        if made.shape[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        return replay, made

    def settle(self) -> None:
        super().settle()
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_one_that_cannot_be_recorded_runs_without_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    tape = Breaking()
    made = planned(4, 2, 1, tape=tape)
    with caplog.at_level(logging.INFO):
        while made.record_next():
            pass
    assert "double at 2 rows, (8, 8), runs without a graph (OutOfMemoryError: CUDA out of memory." in caplog.text
    assert "recorded 2 of 3 graphs" in caplog.text
    assert made.counts == (2, 3) and tape.settled == 2, "once after the failure, once in the end"
    made.missed(key(2))
    made.plan([key(2)])
    assert not made.pending, "it is not tried again"
    assert torch.equal(made.function(key(2))(torch.ones(2, 3)), 2 * torch.ones(2, 3))


def test_a_lost_device_is_not_taken_for_one_graph_that_fails() -> None:
    made = planned(2, tape=Breaking(lost=True))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.record_next()
    assert not made.failed


class Stage:
    """A background recorder of real threads, whose clock and whose traffic the test has in its hands."""

    def __init__(self, recordings: Recordings, lane: Lane) -> None:
        self.now = 0.0
        self.busy = True
        self.asked = threading.Semaphore(0)  # released whenever it is asked whether there is traffic
        self.recordings = recordings
        self.recorder = BackgroundRecorder(lane, self._record, self._traffic, share=0.1, clock=lambda: self.now)

    def _record(self) -> bool:
        self.now += 1.0  # which is what a recording takes
        return self.recordings.record_next()

    def _traffic(self) -> bool:
        self.asked.release()
        return self.busy

    def look(self) -> None:
        """Wait until the recorder has looked twice: whatever it could have begun, it has."""
        for _ in range(2):
            assert self.asked.acquire(timeout=60)


class HeldStage:
    """A background recorder without traffic whose first recording waits; `order` is what ran on the lane."""

    def __init__(self, lane: Lane) -> None:
        self.recordings, self.order = planned(4, 2, 1), list[str]()
        self.under_way, self.go_on = threading.Event(), threading.Event()
        self.recorder = BackgroundRecorder(lane, self._record, lambda: False)
        self.recorder.start()
        assert self.under_way.wait(60)

    def _record(self) -> bool:
        self.under_way.set()
        assert self.go_on.wait(60)
        found = self.recordings.record_next()
        self.order += ["graph"] * found
        return found


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("test")
    yield made
    made.close()


@contextmanager
def stage(made: Recordings, lane: Lane) -> Iterator[Stage]:
    found = Stage(made, lane)
    try:
        yield found
    finally:
        found.busy = False
        found.recorder.close()


def test_beside_traffic_it_takes_a_tenth_of_the_time(lane: Lane) -> None:
    made = planned(4, 2, 1)
    with stage(made, lane) as on:
        on.recorder.start()
        on.look()
        assert made.order == [4]
        on.now += 8.9
        while on.asked.acquire(blocking=False):
            pass
        on.look()
        assert made.order == [4], "nine times as long as the recording took has not passed"
        on.now += 0.2
        assert on.asked.acquire(timeout=60)
        while len(made.order) < 2:
            on.look()
        assert made.order == [4, 2]
        on.busy = False  # traffic ends: the rest at once
        assert on.recorder.wait(60) and made.order == [4, 2, 1]


def test_without_traffic_it_goes_straight_on_and_begins_again_when_more_is_missed(lane: Lane) -> None:
    made = planned(4, 2)
    with stage(made, lane) as on:
        on.busy = False
        on.recorder.start()
        assert on.recorder.wait(60) and made.order == [4, 2]
        lane.call(lambda: made.missed(key(1)))
        on.recorder.start()
        assert on.recorder.wait(60) and made.order == [4, 2, 1]


def test_traffic_gets_the_lane_between_two_recordings(lane: Lane) -> None:
    """One recording is on the lane at a time: an iteration waits for one at most."""
    held = HeldStage(lane)
    iteration = lane.start(lambda: held.order.append("iteration"), lambda _: {})
    held.go_on.set()
    iteration.outcome()
    assert held.order[:2] == ["graph", "iteration"]
    assert held.recorder.wait(60) and held.order == ["graph", "iteration", "graph", "graph"]
    held.recorder.close()


def test_closing_ends_after_the_recording_under_way(lane: Lane) -> None:
    held = HeldStage(lane)
    closing = threading.Thread(target=held.recorder.close)
    closing.start()
    held.go_on.set()
    closing.join(60)
    assert not closing.is_alive() and 1 <= len(held.order) <= 2
    held.recorder.start()
    assert held.recorder.wait(60) and len(held.order) <= 2, "what is closed stays closed"


def test_an_error_of_recording_is_logged_and_ends_it(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    def record() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    recorder = BackgroundRecorder(lane, record, lambda: False)
    recorder.start()
    assert recorder.wait(60)
    assert "no more graphs are recorded" in caplog.text and "unspecified launch failure" in caplog.text
    assert lane.call(lambda: 3) == 3, "traffic goes on"
    recorder.close()


def test_recording_waits_until_a_thread_can_start(lane: Lane) -> None:
    came = threading.Event()
    recorder = BackgroundRecorder(lane, lambda: came.set() or False, lambda: False)
    with no_threads():
        recorder.start()
    assert not came.is_set() and recorder.wait(0)
    recorder.start()
    assert came.wait(60)
    recorder.close()
