"""Workers of several models on one queue: each draws what names its own, and leaves all else to others."""

from __future__ import annotations

import signal

from core.jobs.broker import Envelope
from core.jobs.record import Job, JobState
from tests.workers.crew import Crew, eventually
from tests.workers.stage import picture
from workers.delayed_requeue import DelayedRequeue

OTHER = "stage-next"


def envelope(k: int, priority: int = 5) -> Envelope:
    return Envelope(f"job_{k}", "image", priority)


def test_what_is_held_is_sent_again_in_order_and_once() -> None:
    sent: list[Envelope] = []
    aside = DelayedRequeue(sent.append, hold_s=0.05)
    for k in (0, 1, 0, 2, 1):
        aside.put(envelope(k))
    eventually(lambda: len(sent) == 3)
    aside.put(envelope(1))  # it came round again
    eventually(lambda: len(sent) == 4)
    aside.close()
    assert sent == [envelope(k) for k in (0, 1, 2, 1)]


def test_what_is_held_in_the_end_is_left_to_others_at_once() -> None:
    sent: list[Envelope] = []
    aside = DelayedRequeue(sent.append, hold_s=1e6)
    for k in range(3):
        aside.put(envelope(k, priority=k))
    assert not sent
    aside.close()
    aside.close()
    assert sent == [envelope(k, priority=k) for k in range(3)]
    aside.put(envelope(9))
    assert sent[3:] == [envelope(9)]
    DelayedRequeue(sent.append).close()


def colour(crew: Crew, job: Job) -> bytes:
    assert job.state is JobState.SUCCEEDED and job.result is not None, job.error
    return crew.artifacts.get(job.result["images"][0]["key"])


def test_what_nobody_serves_waits_and_holds_nobody_up(crew: Crew) -> None:
    crew.hire(image_jobs=2)
    waiting = [crew.ask(model=OTHER, prompt=f"{k}") for k in range(20)]
    for _ in range(3):
        assert crew.ended(crew.ask()).state is JobState.SUCCEEDED
    assert {crew.job(id).state for id in waiting} == {JobState.QUEUED}
    assert {crew.job(id).attempt for id in waiting} == {0}
    crew.store.cancel(waiting[0])
    crew.hire("--name", OTHER)
    for k, id in enumerate(waiting[1:], 1):
        assert colour(crew, crew.ended(id)) == picture(f"{OTHER}: {k}", 7, 32, 32)
    assert crew.job(waiting[0]).state is JobState.CANCELLED
    eventually(lambda: not any(crew.redis.exists(name) for name in ("image", "image:3", "unacked")), "an empty queue")


def test_a_deadline_passes_though_nobody_serves_it(crew: Crew) -> None:
    crew.hire()
    id = crew.ask(model=OTHER, deadline_s=0.3)
    assert crew.ended(id).state is JobState.EXPIRED


def test_who_ends_leaves_what_it_held_to_others(crew: Crew) -> None:
    first = crew.hire()
    id = crew.ask(model=OTHER)
    eventually(lambda: not crew.redis.exists("image:3"), "the message is taken")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    crew.hire("--name", OTHER)
    assert colour(crew, crew.ended(id)) == picture(f"{OTHER}: a pizza", 7, 32, 32)
