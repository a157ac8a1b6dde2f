"""The engine with its real thread: every future ends, whatever breaks, and nothing depends on how fast that
is.

The heartbeat is set to an hour, so that a wake-up that is lost hangs the test instead of slowing it down.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from contract.errors import Invalid
from core.batching import engine as engine_module
from core.batching.engine import Aborted, Closed, Engine, Expired, Tick, end_process
from core.batching.request import Outcome, Request, State
from core.batching.runner import DeviceLost, Lane, OutOfMemory
from tests.core.batching.fake import (
    Ask,
    FakeRunner,
    at_launches,
    expected,
    linear,
    memory_for,
    results,
)

PATIENCE_S = 20.0  # how long anything may take before a test fails


def eventually(condition: Callable[[], bool]) -> None:
    """Fails if a condition has not come true in a generous time."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "never came true"
        time.sleep(0.001)


def _nap_s(engine: Engine) -> float:
    """For how long the engine's thread sleeps if nothing wakes it; 0 while it does not sleep, or is being woken."""
    woken = engine._wake.is_set()
    frame = sys._current_frames().get(engine._thread.ident or 0)
    waits = False
    while frame is not None and frame.f_code is not Engine._sleep.__code__:
        waits |= frame.f_code is threading.Event.wait.__code__
        frame = frame.f_back
    return float(frame.f_locals["until_s"]) if frame is not None and waits and not woken else 0.0


def sleeps(engine: Engine, at_least_s: float = PATIENCE_S) -> None:
    """Fails if the thread does not fall asleep, for longer than a test lasts, though nothing happens."""
    eventually(lambda: _nap_s(engine) >= at_least_s)


class House:
    """Makes runners with real lanes, and engines; closes all of them."""

    def __init__(self) -> None:
        self.lanes = {name: Lane(name) for name in ("main", "vae", "text")}
        self.runners: list[FakeRunner] = []
        self.engines: list[Engine] = []

    def runner(self, **how: Any) -> FakeRunner:
        runner = FakeRunner(time.monotonic, threads=self.lanes, **how)
        self.runners.append(runner)
        return runner

    def engine(self, *runners: FakeRunner, **how: Any) -> Engine:
        how.setdefault("on_device_lost", lambda error: None)
        engine = Engine(runners, **how)
        self.engines.append(engine)
        return engine

    def one(self, *, depth: int = 1, **how: Any) -> tuple[Engine, FakeRunner]:
        runner = self.runner(**how)
        return self.engine(runner, depth=depth), runner

    @staticmethod
    def held(engine: Engine, runner: FakeRunner, *requests: Request) -> list[Future[Any]]:
        """Submit requests of which an iteration is under way, and does not end before the gate is opened."""
        runner.gate.clear()
        futures = [engine.submit(request) for request in requests]
        eventually(lambda: bool(runner.log))
        return futures

    def close(self) -> None:
        for runner in self.runners:
            runner.gate.set()
        for engine in self.engines:
            engine.close()
            assert not engine.alive
            assert not engine._pending.futures
        for lane in self.lanes.values():
            lane.close()
        for runner in self.runners:
            assert not runner.violations, runner.violations


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(engine_module, "_HEARTBEAT_S", 3600.0)
    house = House()
    yield house
    house.close()


def ask(id: str, *, modality: str = "image", **how: Any) -> Request:
    of_request = {k: how.pop(k) for k in ("priority", "deadline", "listener") if k in how}
    return Request(id, modality, Ask(**how), **of_request)


@pytest.mark.parametrize("depth", [1, 2])
def test_futures_get_results(house: House, depth: int) -> None:
    engine, runner = house.one(depth=depth, lanes_of={"vae": "vae"}, slots=8)
    requests = [ask(f"r{n}", steps=1 + n % 5) for n in range(60)]
    assert list(results([engine.submit(r) for r in requests])) == [expected(r) for r in requests]
    assert {r.state for r in requests} == {State.DONE}
    eventually(lambda: runner.held() == 0)
    assert engine.counts() == {"image": (0, 0)}


def test_submit_says_what_it_cannot_take(house: House) -> None:
    engine, runner = house.one()
    with pytest.raises(ValueError, match=r"'sound' is not served here; served: image"):
        engine.submit(ask("r", modality="sound"))
    with pytest.raises(Invalid, match="steps"):
        engine.submit(ask("r", steps=0))
    request = ask("r")
    assert results([engine.submit(request)])
    with pytest.raises(ValueError, match="submitted before"):
        engine.submit(request)
    runner.gate.clear()
    future = engine.submit(ask("r"))  # an id is free again after its end
    with pytest.raises(ValueError, match="'r' is already in use"):
        engine.submit(ask("r"))
    assert not future.cancel(), "aborting is the engine's"
    runner.gate.set()
    assert isinstance(results([future])[0], int)


def run_threads(targets: list[Callable[[], None]]) -> None:
    """Run all at once; what one of them raises fails the test."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors, errors


def test_abort_in_flight_and_waiting(house: House) -> None:
    engine, runner = house.one(slots=1, lanes_of={"vae": "vae"})
    heard: list[Outcome] = []
    listened = ask("flying", listener=lambda _, outcome: heard.append(outcome))
    flying, waiting = house.held(engine, runner, listened, ask("waiting"))
    engine.abort("waiting")
    assert isinstance(results([waiting])[0], Aborted)
    engine.abort("flying")
    engine.abort("nobody")
    assert not flying.done()
    runner.gate.set()
    (error,) = results([flying])
    assert isinstance(error, Aborted) and "flying" in str(error)
    assert len(runner.log) == 1
    assert len(heard) <= 1  # the abort may come after the first iteration, never two iterations later


def test_a_deadline_wakes_the_engine(house: House) -> None:
    """Nothing else happens: without an alarm the thread would sleep for an hour."""
    engine, runner = house.one(slots=1, lanes_of={"vae": "vae"})
    (flying,) = house.held(engine, runner, ask("flying"))
    late = engine.submit(ask("late", deadline=engine.clock() + 0.05))
    past = engine.submit(ask("past", deadline=-math.inf))
    for error in results([late, past]):
        assert isinstance(error, Expired)
    runner.gate.set()
    assert results([flying])


@pytest.mark.parametrize("at_launch", [False, True])
def test_memory_that_runs_out_halves_batches_and_says_so(
    house: House, at_launch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ticks: list[Tick] = []
    runner = house.runner(faults=[memory_for(2)], fail_at_launch=at_launch)
    engine = house.engine(runner, on_tick=ticks.append)
    futures = house.held(engine, runner, ask("first", size="o"))
    futures += [engine.submit(ask(f"r{n}")) for n in range(8)]
    with caplog.at_level(logging.WARNING):
        runner.gate.set()
        assert not any(isinstance(r, Exception) for r in results(futures))
    assert engine._scheduler.caps
    assert all(cap <= 2 for cap in engine._scheduler.caps.values())
    assert any("at most" in record.message for record in caplog.records)
    failed = [tick for tick in ticks if tick.error is not None]
    assert failed
    assert all(isinstance(tick.error, OutOfMemory) and tick.rows > 2 for tick in failed)


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def broken(*_: Any) -> Any:
        raise error("broken runner")

    return broken


@pytest.mark.parametrize(
    ("method", "error"),
    [("release", RuntimeError), ("group", RuntimeError), ("commit", SystemExit), ("admit", KeyboardInterrupt)],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_broken_runner_leaves_no_future_hanging(
    house: House, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException], depth: int
) -> None:
    engine, runner = house.one(slots=3, depth=depth)
    futures = house.held(engine, runner, *(ask(f"r{n}", steps=1) for n in range(6)))
    monkeypatch.setattr(runner, method, raises(error))
    futures.append(engine.submit(ask("late")))
    runner.gate.set()
    assert all("broken runner" in str(result) for result in results(futures))
    eventually(lambda: not engine.alive)
    with pytest.raises(Closed) as closed:
        engine.submit(ask("after"))
    assert "broken runner" in str(closed.value.__cause__)
    assert engine.drain() == []


@pytest.mark.parametrize("where", ["launch", "outcome", "ready", "admit"])
def test_a_lost_device_is_reported_once_and_ends_everything(house: House, where: str) -> None:
    told: list[BaseException] = []
    lost = DeviceLost("an illegal memory access was encountered")
    faults = [at_launches(1, error=lambda _: lost)] if where in ("launch", "outcome") else []  # type: ignore[arg-type]
    runner = house.runner(faults=faults, fail_at_launch=where == "launch")
    engine = house.engine(runner, on_device_lost=told.append)
    futures = house.held(engine, runner, ask("first"))
    if where == "ready":
        engine._executor.flying[0][1].ready = lambda: (_ for _ in ()).throw(lost)  # type: ignore[method-assign]
    if where == "admit":
        runner.admit_error["r0"] = lost
    futures += [engine.submit(ask(f"r{n}")) for n in range(3)]
    runner.gate.set()
    for error in results(futures):
        assert error is lost
    eventually(lambda: not engine.alive)
    assert told == [lost]
    with pytest.raises(Closed):
        engine.submit(ask("after"))


def test_the_default_answer_to_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    end_process(DeviceLost("gone"))
    assert codes == [70]


def test_an_idle_engine_notices_a_leak(house: House, caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = house.one()
    runner.leaks = 1
    assert isinstance(results([engine.submit(ask("r"))])[0], int)
    eventually(lambda: not engine.alive)
    assert "still holds 1" in caplog.text
    with pytest.raises(Closed):
        engine.submit(ask("after"))


def test_listeners_hear_every_iteration_before_the_end(house: House) -> None:
    engine, _ = house.one()
    heard: list[Outcome] = []
    done: list[bool] = []
    ready = threading.Event()

    def listener(request: Request, outcome: Outcome) -> None:
        ready.wait(PATIENCE_S)
        heard.append(outcome)
        done.append(future.done())

    request = ask("r", steps=3, listener=listener)
    future = engine.submit(request)
    ready.set()
    assert results([future])[0] == expected(request)
    assert [outcome.progress for outcome in heard] == [(n, 5) for n in range(1, 6)]
    assert [outcome.finished for outcome in heard] == [False] * 4 + [True]
    assert not any(done)


def test_a_listener_that_raises_harms_nobody(house: House) -> None:
    broken = raises(RuntimeError)
    runner = house.runner()
    engine = house.engine(runner, on_tick=broken)
    requests = [ask(f"r{n}", listener=broken) for n in range(4)]
    assert list(results([engine.submit(r) for r in requests])) == [expected(r) for r in requests]
    assert engine.alive


def test_a_callback_may_submit_and_abort_but_not_drain(house: House) -> None:
    engine, _ = house.one()
    found: list[Any] = []
    ended = threading.Event()

    def listener(request: Request, outcome: Outcome) -> None:
        if outcome.finished:
            try:
                engine.drain()
            except RuntimeError as error:
                found.append(error)
            found.append(engine.submit(ask("from the listener")))

    def callback(future: Future[Any]) -> None:
        found.append(engine.submit(ask("from the callback")))
        engine.abort("nobody")
        ended.set()

    engine.submit(ask("r", listener=listener)).add_done_callback(callback)
    assert ended.wait(PATIENCE_S)
    assert "cannot be called on it" in str(found[0])
    assert all(isinstance(r, int) for r in results(found[1:]))


def test_drain_finishes_what_has_started_and_hands_back_the_rest(house: House) -> None:
    engine, runner = house.one(slots=2)
    started = [ask(f"s{n}") for n in range(2)]
    rest = [ask("late", priority=5), ask("urgent", priority=1)]
    futures = house.held(engine, runner, *started, *rest)
    threading.Timer(0.02, runner.gate.set).start()
    back = engine.drain()
    found = results(futures)
    assert set(back) | {r for r in started if r.state is State.DONE} == {*started, *rest}
    for request, result in zip([*started, *rest], found, strict=True):
        if request in back:
            assert isinstance(result, Closed) and request.state is State.WAITING
        else:
            assert result == expected(request)
    with pytest.raises(Closed):
        engine.submit(ask("after"))
    assert engine.drain() == []


def test_a_drain_that_runs_out_of_time_returns_what_is_unfinished(house: House) -> None:
    engine, runner = house.one(slots=2, lanes_of={"vae": "vae"})
    futures = house.held(engine, runner, *(ask(f"r{n}") for n in range(4)))
    eventually(lambda: engine.counts() == {"image": (2, 2)})
    threading.Timer(0.05, runner.gate.set).start()
    unfinished = engine.drain(timeout_s=0.01)
    assert [r.id for r in unfinished] == ["r2", "r3", "r0", "r1"]
    kinds = [type(r) for r in results(futures)]
    assert kinds == [Aborted, Aborted, Closed, Closed]
    assert runner.held() == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_close_with_work_in_flight(house: House, depth: int) -> None:
    engine, runner = house.one(slots=3, depth=depth)
    futures = house.held(engine, runner, *(ask(f"r{n}", size="sl"[n % 2]) for n in range(6)))
    threading.Timer(0.02, runner.gate.set).start()
    engine.close()
    engine.close()
    for error in results(futures):
        assert isinstance(error, Closed)
    assert runner.held() == 0
    with pytest.raises(Closed):
        engine.submit(ask("after"))
    engine.abort("r0")
    assert engine.drain() == []


def test_close_waits_without_spinning(house: House) -> None:
    engine, runner = house.one(depth=2)
    house.held(engine, runner, ask("r"))
    sleeps(engine)
    before = engine.ticks
    closing = threading.Thread(target=engine.close)
    closing.start()
    eventually(lambda: engine.ticks > before)
    sleeps(engine)
    ticks = engine.ticks
    for _ in range(100):
        time.sleep(0.001)
        assert engine.ticks == ticks, "nothing wakes it before the iteration's end"
    runner.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


@pytest.mark.quick(0)
@pytest.mark.parametrize("end", ["close", "drain", "break"])
def test_no_future_hangs_when_the_end_races_with_submissions(house: House, end: str) -> None:
    for turn in range(12):
        race(house, end, turn)


def race(house: House, end: str, turn: int) -> None:
    engine, runner = house.one(slots=4, lanes_of={"vae": "vae"}, depth=1 + turn % 2)
    futures: list[Future[Any]] = []
    going = threading.Barrier(5)

    def client(number: int) -> None:
        going.wait(PATIENCE_S)
        for count in itertools.count():
            try:
                futures.append(engine.submit(ask(f"{number}-{count}", steps=1)))
            except Closed:
                return
            engine.abort(f"{number}-{count - 2}")

    def nuisance() -> None:
        going.wait(PATIENCE_S)
        while engine.alive and engine._pending._accepting:
            engine.abort("nobody")

    def ender() -> None:
        going.wait(PATIENCE_S)
        time.sleep(0.001 * (turn % 4))
        if end == "close":
            engine.close()
        elif end == "drain":
            engine.drain(timeout_s=0.001 * turn)
        else:
            runner.release_error = RuntimeError("broken runner")

    run_threads([*(partial(client, number) for number in range(3)), nuisance, ender])
    for error in results(futures):
        assert isinstance(error, int | Closed | Aborted) or "broken runner" in str(error)
    runner.release_error = None
    engine.close()


def test_the_end_is_not_lost_to_those_who_still_talk(house: House) -> None:
    """Others put things into the inbox while the engine empties it for the last time."""
    engine, runner = house.one()
    (future,) = house.held(engine, runner, ask("r"))

    class Chatty(deque[tuple[str, Any]]):
        """A deque into which someone writes whenever it is looked through."""

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                self.append(("abort", "nobody"))
                yield item

    engine._inbox = Chatty(engine._inbox)
    engine._scheduler.schedule = lambda now: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    runner.gate.set()
    engine.abort("nobody")
    assert isinstance(results([future])[0], ZeroDivisionError)


def test_an_idle_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(time.monotonic)
    with Engine([runner]) as engine:
        for _ in range(3):  # from one heartbeat to the next, and for no shorter
            ticks = engine.ticks
            eventually(lambda ticks=ticks: engine.ticks > ticks)
            sleeps(engine, engine_module._HEARTBEAT_S)
        assert engine.clock() - engine.last_tick < PATIENCE_S


@pytest.mark.parametrize("depth", [1, 2])
def test_a_busy_engine_does_not_ask_the_scheduler_for_nothing(house: House, depth: int) -> None:
    """While an iteration is under way and nothing else happens, nothing is decided again."""
    engine, runner = house.one(depth=depth, lanes_of={"vae": "vae"}, costs={"": linear()})
    futures = house.held(engine, runner, *(ask(f"r{n}") for n in range(5)))
    eventually(lambda: len(runner.log) == depth and engine.counts() == {"image": (0, 5)})
    sleeps(engine)
    before, ticks = runner.calls, engine.ticks
    for _ in range(100):
        time.sleep(0.001)
        assert (runner.calls, engine.ticks) == (before, ticks)
    runner.gate.set()
    assert all(isinstance(r, int) for r in results(futures))


def test_the_engine_ticks_while_an_iteration_takes_long(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """`last_tick` tells others that the thread lives: also while it waits for its device."""
    monkeypatch.undo()  # its own heartbeat
    engine, runner = house.one()
    house.held(engine, runner, ask("r"))
    before = engine.ticks
    eventually(lambda: engine.ticks > before + 1)


def test_since_when_the_oldest_iteration_runs(house: House) -> None:
    """A device that hangs shows in `busy_since`, while the thread goes on ticking."""
    engine, runner = house.one(depth=2)
    assert engine.busy_since is None
    before = engine.clock()
    futures = house.held(engine, runner, ask("r"))
    eventually(lambda: engine.busy_since is not None)
    since = engine.busy_since
    assert since is not None and before <= since <= engine.clock()
    futures.append(engine.submit(ask("s", size="l")))  # queued behind, launched later
    eventually(lambda: len(runner.log) == 2)
    assert engine.busy_since == since
    runner.gate.set()
    results(futures)
    eventually(lambda: engine.busy_since is None)


def test_a_lane_runs_in_order_and_hands_over_errors() -> None:
    lane, ran = Lane(), list[int]()

    def compute(number: int) -> int:
        ran.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    tickets = [lane.start(partial(compute, n), lambda value: {"r": Outcome(result=value)}) for n in range(4)]
    ended = threading.Event()
    tickets[3].notify(ended.set)
    assert ended.wait(PATIENCE_S)
    assert all(ticket.ready() for ticket in tickets)
    assert ran == [0, 1, 2, 3]
    again = threading.Event()
    tickets[0].notify(again.set)
    assert again.is_set(), "it has ended"
    assert tickets[1].outcome()["r"].result == 1
    with pytest.raises(ValueError, match="two"):
        tickets[2].outcome()
    last = lane.start(lambda: 1, lambda value: {})
    lane.close()
    assert last.ready()
    with pytest.raises(RuntimeError, match="closed"):
        lane.start(lambda: 1, lambda value: {})
