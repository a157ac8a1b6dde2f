"""Redis full, hanging, gone and back; queues full; messages lost: what clients are told, and that nothing is."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from api import cards
from api.jobs import follower as job_follower
from core.config import Settings
from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.api.easel import asked
from tests.api.world import CARD, PATIENCE_S, Api, Worker, changed, check_error, eventually, opened

JOB = {"type": "image", "prompt": "a cat"}


@pytest.fixture
def world(settings: Settings) -> Iterator[tuple[Api, Worker]]:
    with opened(changed(settings, max_queued=3), CARD) as (api, worker):
        yield api, worker


def test_a_full_queue_and_a_hopeless_deadline(world: tuple[Api, Worker]) -> None:
    api, worker = world
    ids = [api.order(n=10) for _ in range(2)]  # 15 s of work each
    error = check_error(api.draw(deadline_s=20), 400, "deadline_s", "deadline_hopeless")
    assert "32 s at best" in error["message"]
    ids.append(api.order(n=10, deadline_s=3600))
    for full in (api.draw(), api.post("/v1/jobs", **JOB)):
        check_error(full, 429, code="queue_full")
    assert worker.ids() == set(ids), "no job is made"
    # What is told follows what is queued and who is there to do it.
    eventually(lambda: api.draw().headers["retry-after"] == "45")
    with Worker(api.settings, "worker-2") as second:
        second.announce()
        eventually(lambda: api.draw().headers["retry-after"] == "23")
    worker.work(ids[0])
    api.order()


def test_a_full_redis(world: tuple[Api, Worker]) -> None:
    api, worker = world
    waiting = api.order()
    worker.redis.config_set("maxmemory", 1)
    try:
        for full in (api.draw(), api.post("/v1/jobs", **JOB)):
            check_error(full, 503, code="store_full")
            assert 1 <= int(full.headers["retry-after"]) <= 120
        assert worker.ids() == {waiting} and len(worker.redis.keys("diptych:events:*")) == 1, "nothing half-made"
        assert api.job(waiting)["status"] == "queued"
        assert api.client.post(f"/v1/jobs/{waiting}/cancel").json()["status"] == "cancelled"
    finally:
        worker.redis.config_set("maxmemory", 0)
    api.order()


def test_redis_goes_and_comes_back(world: tuple[Api, Worker], redis_server: RedisServer) -> None:
    api, worker = world
    watched = api.order()
    followed = threading.Event()

    def follow() -> list[str]:
        with api.events(watched) as events:
            first = next(events)
            followed.set()
            return [first.type, *(event.type for event in events)]

    with ThreadPoolExecutor(1) as pool:
        follows = pool.submit(follow)
        drawn, answer = asked(worker, api.draw, seed=3)
        assert followed.wait(PATIENCE_S)
        redis_server.kill()
        try:
            for response in (
                api.draw(),
                api.post("/v1/jobs", **JOB),
                *(api.get(f"/v1/jobs/{watched}{path}") for path in ("", "/events", "/images/0")),
                api.client.post(f"/v1/jobs/{watched}/cancel"),
            ):
                check_error(response, 503, code="store_down")
                assert 1 <= int(response.headers["retry-after"]) <= 120
            check_error(api.draw(steps=0), 400, "steps")  # what is wrong is wrong without Redis too
            check_error(api.draw(size="1x1"), 400, "size")
            not_ready = eventually(lambda: (r := api.get("/readyz")).status_code == 503 and r)
            assert not_ready.json()["error"]["message"] == "Redis does not answer." and not not_ready.json()["redis"]
            assert api.get("/healthz").status_code == 200
            assert api.get("/v1/models").status_code == 200
        finally:
            redis_server.start()
        eventually(lambda: api.get("/readyz").status_code == 200)
        worker.work(watched)
        worker.work(drawn)
        assert follows.result(PATIENCE_S) == ["queued", "running", "succeeded"]
        assert answer.result(PATIENCE_S).json()["job_id"] == drawn
    id = api.order()
    assert (id, 3) in worker.messages(), "Celery's connections are good again too: the reaper would send at level 0"
    worker.work(id)


def test_starts_without_redis(settings: Settings, redis_server: RedisServer) -> None:
    redis_server.stop()
    try:
        with opened(settings) as (api, worker):
            assert api.get("/healthz").status_code == 200
            assert api.get("/readyz").json()["error"]["message"] == "Redis does not answer."
            check_error(api.draw(), 503, code="store_down")
            check_error(api.get("/v1/models"), 503, code="store_down")  # nobody knows which keys there are
            redis_server.start()
            worker.announce()
            eventually(lambda: api.get("/readyz").status_code == 200)
            worker.work(api.order())
    finally:
        if redis_server.process is None or redis_server.process.poll() is not None:
            redis_server.start()


def test_redis_hangs(world: tuple[Api, Worker], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither answers nor refuses. The API says so, and goes on as soon as it does."""
    monkeypatch.setattr(cards, "_STALE_S", 1.5)
    api, _ = world
    assert redis_server.process is not None
    os.kill(redis_server.process.pid, signal.SIGSTOP)
    try:
        assert api.get("/healthz").status_code == 200
        not_ready = eventually(lambda: (r := api.get("/readyz")).status_code == 503 and r)
        assert not_ready.json()["error"]["message"] == "Redis does not answer."
    finally:
        os.kill(redis_server.process.pid, signal.SIGCONT)
    eventually(lambda: api.get("/readyz").status_code == 200)
    api.order()


def test_a_message_that_cannot_be_put_is_made_good(world: tuple[Api, Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    api, worker = world
    monkeypatch.setattr(api.server._service.store.upkeep, "_resend_ms", 500)  # a message that is late is lost sooner
    worker.redis.set("image.emoji-xl:3", "no list")  # so that nothing can be pushed onto it
    id = api.order()
    assert api.job(id)["status"] == "queued", "the record stands, and that is what counts"
    worker.redis.delete("image.emoji-xl:3")
    assert eventually(worker.messages) == [(id, 3)], "the reaper of the API has sent it"
    worker.work(id)


def test_an_unexpected_error_is_a_500_that_tells_nothing(world: tuple[Api, Worker]) -> None:
    api, worker = world
    id = api.order()
    worker.take(id)
    worker.redis.hset(f"diptych:job:{id}", "progress", '{"steps_done": "MARKER", "steps": "MARKER"}')
    answer = api.get(f"/v1/jobs/{id}")
    check_error(answer, 500, code="internal_error")
    assert "MARKER" not in answer.text and "Traceback" not in answer.text


@pytest.mark.parametrize("lost", ["record", "record of a stream", "event"])
def test_what_redis_lost_when_it_came_back(
    world: tuple[Api, Worker], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Up to a second of writes may be gone after a power cut. Nobody waits for ever for what was in them."""
    monkeypatch.setattr(job_follower, "_LOOK_S", 0.2)
    api, worker = world
    stream = lost == "record of a stream"
    id, answer = asked(worker, api.draw, stream=stream)
    eventually(worker.messages)
    with worker.redis.pipeline() as pipe:
        pipe.delete(f"diptych:events:{id}")
        if lost == "event":
            error = '{"code": "crashed", "message": "three workers were lost"}'
            pipe.hset(f"diptych:job:{id}", mapping={"state": JobState.FAILED.value, "error": error})
        else:
            pipe.delete(f"diptych:job:{id}")
        pipe.execute()
    told = answer.result(PATIENCE_S)
    if stream:
        assert "event: error" in told.text and "The job's record is gone." in told.text
    else:
        check_error(told, 500, code="crashed" if lost == "event" else "job_lost")
        assert told.headers["x-should-retry"] == "false"


def test_a_redis_that_evicts_is_logged_at_the_start(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with redis.Redis.from_url(settings.redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with caplog.at_level(logging.WARNING, "core.jobs.registry"), opened(settings):
                eventually(lambda: "allkeys-lru: jobs would be evicted" in caplog.text)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
