"""Progress on its way to a real store: gathered, in order, fenced, and dropped rather than waited for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.jobs.record import ProgressReport
from deployment.redis import RedisServer
from tests.workers.crew import Crew, eventually
from workers.claims.publisher import ProgressPublisher
from workers.claims.store_retry import StoreRetry
from workers.text.stream_buffer import StreamBuffer


class Scene:
    def __init__(self, crew: Crew) -> None:
        self.ticks = 0
        self.stale: list[tuple[str, int]] = []
        self.publisher = ProgressPublisher(
            crew.store.leases, StoreRetry(), lambda: self.ticks, lambda id, attempt: self.stale.append((id, attempt))
        )


@pytest.fixture
def scene(crew: Crew) -> Iterator[Scene]:
    scene = Scene(crew)
    scene.publisher.start()
    yield scene
    scene.publisher.stop()


def claimed(crew: Crew) -> str:
    return crew.claimed(crew.make()).id


def steps(crew: Crew, id: str) -> list[int]:
    return [data["step"] for type, data in crew.events(id) if type == "progress"]


def test_what_is_said_in_one_tick_is_written_at_once(crew: Crew, scene: Scene) -> None:
    """Unless the tick takes long, one flush holds what all jobs of a batch got; of each job the newest."""
    ids = [claimed(crew) for _ in range(5)]
    for tick in range(3):
        before = scene.publisher.flushes
        for step in range(4):
            for id in ids:
                scene.publisher.say(id, 1, {"step": 10 * tick + step})
        scene.ticks += 1
        eventually(lambda: all(steps(crew, id)[-1:] == [10 * tick + 3] for id in ids))  # noqa: B023
        assert scene.publisher.flushes - before <= 4  # not one for each of the 20; a stalled machine may split a tick


def test_progress_never_goes_back(crew: Crew, scene: Scene) -> None:
    """Two threads flush while a third speaks: the order of what was said is the order of what is read."""
    id, over = claimed(crew), threading.Event()

    def hurry() -> None:
        while not over.is_set():
            scene.publisher.flush()

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(hurry)
        for step in itertools.count():
            scene.publisher.say(id, 1, {"step": step})
            scene.ticks += 1
            if len(steps(crew, id)) > 30:
                break
        over.set()
    seen = steps(crew, id)
    assert seen == sorted(set(seen))
    scene.publisher.say(id, 1, {"step": step + 1})
    scene.publisher.flush()
    assert steps(crew, id)[-1] == step + 1, "it returns when all is written"


def test_a_stale_attempt_is_refused_and_told(crew: Crew, scene: Scene) -> None:
    lost, cancelled, fine = claimed(crew), claimed(crew), claimed(crew)
    crew.store.leases.hand_back(lost, 1)
    crew.store.leases.claim(lost, "another")
    crew.store.cancel(cancelled)
    for id in (lost, cancelled, fine):
        scene.publisher.say(id, 1, {"step": 1})
    eventually(lambda: len(scene.stale) == 2)
    assert set(scene.stale) == {(lost, 1), (cancelled, 1)}
    assert steps(crew, fine) == [1]
    assert steps(crew, lost) == steps(crew, cancelled) == []


def test_texts_are_told_in_pieces_to_who_knows_them(crew: Crew, scene: Scene) -> None:
    """An API of the version before knows only all of the text, each time."""
    pieces = [{"pieces": [{"index": 0, "at": k, "text": text}]} for k, text in enumerate("ab")]
    for cumulative, expected in (False, pieces), (True, [{"texts": ["a"]}, {"texts": ["ab"]}]):
        id, written = claimed(crew), StreamBuffer(1)
        written.followed, written.cumulative = not cumulative, cumulative
        if not cumulative:
            crew.store.follow(id)
        for text in "ab":
            written.add(0, text, [])
            scene.publisher.say(id, "1", {"step": 1}, None, written)
            scene.publisher.flush()
        told = [data for type, data in crew.events(id) if type == "progress"]
        assert told == [{"step": 1, **one} for one in expected]


def test_progress_is_dropped_while_redis_is_away(crew: Crew, scene: Scene, redis_server: RedisServer) -> None:
    id = claimed(crew)
    redis_server.kill()
    try:
        scene.publisher.say(id, 1, {"step": 1})
        scene.publisher.flush()  # does not wait for it
    finally:
        redis_server.start()
    crew.store.leases.report([ProgressReport(id, 1, {"step": 2})])
    assert steps(crew, id) == [2]
    scene.publisher.say(id, 1, {"step": 3})
    eventually(lambda: steps(crew, id)[-1] == 3)
