"""The reaper finds what got lost and sends it, whatever fails meanwhile, and says each trouble once."""

from __future__ import annotations

import logging
import queue
import random
import threading

import pytest
import redis

from core.jobs.broker import Envelope
from core.jobs.reaper import Reaper
from core.jobs.record import JobState
from core.jobs.store import JobStore
from core.jobs.upkeep import SweepResult
from deployment.redis import RedisServer
from tests.core.jobs import books
from tests.core.jobs.drafts import envelope, make
from tests.core.present import present

PATIENCE_S = 60.0  # no test is decided by it


def test_sweeps_leave_the_state_of_the_random_module_alone(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that begins while another thread draws numbers changes them."""
    swept: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(random, "uniform", lambda *_: pytest.fail("the shared generator was used"))
    reaper = Reaper(store.upkeep, lambda envelope: None, every_s=0.01)
    monkeypatch.setattr(reaper, "_pass", lambda: bool(swept.put(None)))
    reaper._thread = threading.Thread(target=reaper._run, args=(reaper._pass,))
    reaper.start()
    for _ in range(3):
        swept.get(timeout=PATIENCE_S)
    reaper.stop()


def test_goes_on_at_once_while_there_is_more(store: JobStore, client: redis.Redis) -> None:
    sent: list[Envelope] = []
    reaper = Reaper(store.upkeep, sent.append)
    late = make(store, deadline_s=500)
    for _ in range(150):
        make(store)
    books.age(client, 1100)
    assert [reaper._pass() for _ in range(3)] == [True, False, False]
    assert len(sent) == 150 and present(store.get(late)).state is JobState.EXPIRED


def test_send_that_fails(store: JobStore, client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "core.jobs.reaper")
    id, tried, works = make(store), queue.Queue[Envelope](), threading.Event()

    def send(envelope: Envelope) -> None:
        tried.put(envelope)
        if not works.is_set():
            raise OSError("the broker is away")

    reaper = Reaper(store.upkeep, send, every_s=0.01)
    reaper.start()
    for _ in range(3):
        books.age(client, 1100)
        assert tried.get(timeout=PATIENCE_S).id == id
    works.set()
    books.age(client, 1100)
    assert tried.get(timeout=PATIENCE_S).id == id
    reaper.stop()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["reaper: cannot resend messages, retrying in the next sweep: OSError", "reaper: recovered (send)"]


def test_redis_away(
    store: JobStore, client: redis.Redis, mortal: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "core.jobs.reaper")
    sent, failed = queue.Queue[Envelope](), queue.Queue[str]()
    id = make(store)
    sweep = store.upkeep.sweep

    def watched(limit: int) -> SweepResult:
        try:
            return sweep(limit)
        except Exception as error:
            failed.put(type(error).__name__)
            raise

    store.upkeep.sweep = watched  # type: ignore[method-assign,assignment]
    mortal.kill()
    reaper = Reaper(store.upkeep, sent.put, every_s=0.01)
    reaper.start()
    for _ in range(3):
        assert failed.get(timeout=PATIENCE_S) == "StoreDown"
    mortal.start()
    books.age(client, 1100)
    assert sent.get(timeout=PATIENCE_S) == envelope(id, 3)
    reaper.stop()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["reaper: sweeps are paused: Redis cannot be reached", "reaper: recovered (sweep)"]


def test_stops_while_it_waits(store: JobStore) -> None:
    reaper = Reaper(store.upkeep, lambda envelope: None, every_s=3600)
    reaper.start()
    reaper.stop()  # returns, or the test would hang
    Reaper(store.upkeep, lambda envelope: None).stop()  # and so does one that never started
    assert not {"reaper", "clearer"} & {thread.name for thread in threading.enumerate()}


def test_many_reapers(store: JobStore, client: redis.Redis) -> None:
    """What one finds, no other sends at the same time."""
    ids, sent = [make(store) for _ in range(150)], queue.Queue[Envelope]()
    books.age(client, 1100)
    reapers = [Reaper(store.upkeep, sent.put, every_s=0.01) for _ in range(4)]
    for reaper in reapers:
        reaper.start()
    got = [sent.get(timeout=PATIENCE_S).id for _ in ids]
    for reaper in reapers:
        reaper.stop()
    assert sorted(got) == sorted(ids)
    assert sent.empty()
