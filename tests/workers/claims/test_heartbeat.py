"""The pulse on a clock of its own, and the heart with a real store: who makes no headway keeps no lease."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.batching.engine import Engine
from core.jobs.cards import WorkerCard
from core.jobs.limits import JobLimits
from core.jobs.store import JobStore
from tests.workers.crew import Crew, eventually
from workers.claims.active_jobs import ActiveJob, ActiveJobs
from workers.claims.heartbeat import Heartbeat, StallDetector
from workers.claims.store_retry import StoreRetry


class Scripted:
    def __init__(self) -> None:
        self.ticks = 0
        self.busy_since: float | None = None
        self.alive = True


def pulse(engine: Scripted, stuck_s: float = 10.0) -> StallDetector:
    return StallDetector(engine, stuck_s, 1.0, 0.0)  # type: ignore[arg-type]


def test_a_thread_that_stands_still_loses_its_leases_first_and_then_its_process() -> None:
    engine = Scripted()
    heartbeat = pulse(engine)
    seen = []
    for now in range(1, 15):
        heartbeat.look(now)
        seen.append((heartbeat.ticks, bool(heartbeat.stuck)))
    assert (seen[0], seen[5], seen[-1]) == ((True, False), (False, False), (False, True))
    engine.ticks += 1
    heartbeat.look(15)
    assert heartbeat.ticks and not heartbeat.stuck


def test_an_iteration_that_does_not_end() -> None:
    engine = Scripted()
    heartbeat = pulse(engine)
    engine.busy_since = 0.5
    for now in range(1, 30):
        engine.ticks += 1  # the thread lives, and waits for its device
        heartbeat.look(now)
        if heartbeat.stuck:
            break
    assert 10 <= now <= 13 and "hangs" in heartbeat.stuck
    engine.busy_since = 30.0  # another iteration
    heartbeat.look(31)
    assert not heartbeat.stuck


@given(st.lists(st.floats(0, 1e6), max_size=4))
def test_time_in_which_the_process_was_stopped_does_not_count(gaps: list[float]) -> None:
    """After SIGCONT neither the thread nor the device can have moved yet."""
    engine = Scripted()
    heartbeat, now = pulse(engine), 0.0
    engine.busy_since = 0.1
    for gap in gaps:
        now += gap
        heartbeat.look(now)
        assert not heartbeat.stuck


@pytest.mark.parametrize(
    ("trouble", "reason"), [("still", "has not moved"), ("busy", "the device hangs"), ("dead", "thread has ended")]
)
def test_a_stuck_engine_ends_the_process(crew: Crew, trouble: str, reason: str) -> None:
    """For that reason alone: in the other cases the thread ticks."""
    engine, ended, over = Scripted(), list[str](), threading.Event()
    engine.busy_since = 1.0 if trouble == "busy" else None
    engine.alive = trouble != "dead"
    heartbeat = make(crew, ActiveJobs(), ended, stuck_s=0.2)
    heartbeat.start()  # its card is shown before there is an engine
    eventually(lambda: [card.id for card in crew.registry.workers()] == ["me"])

    def tick() -> None:
        while not over.wait(0.01):
            engine.ticks += trouble != "still"

    threading.Thread(target=tick, daemon=True).start()
    heartbeat.watch(engine)  # type: ignore[arg-type]
    eventually(lambda: ended)
    over.set()
    heartbeat.stop()
    assert len(ended) == 1 and reason in ended[0]


def test_leases_are_renewed_and_what_is_lost_is_dropped(
    crew: Crew, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Two jobs in hand: one is taken away (cancelled), the other outlives its lease many times."""
    caplog.set_level(logging.INFO, "workers")
    active_jobs, ended = ActiveJobs(), list[str]()
    crew.store.close()
    crew.store = JobStore(crew.url, JobLimits(lease_s=0.6))
    lost, kept = (ActiveJob(crew.claimed(crew.make()), engine) for _ in range(2))
    for work in (lost, kept):
        active_jobs.add(work)
    heartbeat = make(crew, active_jobs, ended, lease_s=0.6)
    heartbeat.watch(engine)
    heartbeat.start()
    crew.store.cancel(lost.claim.id)
    eventually(lambda: lost.dropped and f"this worker lost the lease of job {lost.claim.id}" in caplog.text)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        crew.store.upkeep.sweep()
        time.sleep(0.05)
    assert crew.job(kept.claim.id).lost == 0 and not kept.dropped
    heartbeat.stop()
    eventually(lambda: crew.store.upkeep.sweep().send, "the end of a lease that nobody renews")
    assert crew.job(kept.claim.id).lost == 1 and not ended


def make(
    crew: Crew, active_jobs: ActiveJobs, ended: list[str], lease_s: float = 3.0, stuck_s: float = 60.0
) -> Heartbeat:
    card = WorkerCard("me", "here", 1, "starting", "", 0.0)
    return Heartbeat(
        crew.store.leases, crew.registry, StoreRetry(), active_jobs, "me", lambda: card, lease_s=lease_s,
        stuck_s=stuck_s, end=ended.append,
    )  # fmt: skip


def test_a_failing_card_does_not_stop_the_heart(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    def card() -> Any:
        nonlocal asked
        asked += 1
        raise ZeroDivisionError

    heartbeat = Heartbeat(
        crew.store.leases, crew.registry, StoreRetry(), ActiveJobs(), "me", card, lease_s=0.3, stuck_s=60.0
    )
    heartbeat.start()
    eventually(lambda: asked > 2)
    heartbeat.stop()
    assert "a heartbeat failed" in caplog.text
