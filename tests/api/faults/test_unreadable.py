"""The API beside a newer version, and over what nobody can read: it serves, says so, and lets people clear it away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.config import Settings
from core.jobs.record import JobState
from tests.api.test_metrics import figures, value
from tests.api.world import Api, Worker, check_error, eventually


@pytest.fixture
def world(settings: Settings) -> Iterator[tuple[Api, Worker]]:
    """An API that starts over a card that it cannot read."""
    with Worker(settings) as worker:
        worker.announce()
        worker.redis.hset("diptych:models", "of/tomorrow", '{"v": 99}')
        worker.redis.hset("diptych:models", "broken", "{")
        with Api(settings) as api:
            yield api, worker


def test_a_card_that_cannot_be_read_blocks_nobody_and_can_be_deleted(world: tuple[Api, Worker]) -> None:
    api, worker = world
    eventually(lambda: api.get("/readyz").status_code == 200)
    assert [model["id"] for model in api.models()] == ["emoji-xl"]
    worker.work(api.order())
    assert value(figures(api.client), "diptych_unreadable_total", kind="model card") >= 2
    for name in ("of/tomorrow", "broken"):
        assert api.delete(f"/v1/models/{name}").json()["deleted"]
        check_error(api.delete(f"/v1/models/{name}"), 404, "model", "model_not_found")
    assert worker.redis.hkeys("diptych:models") == ["emoji-xl"]


def test_a_record_that_cannot_be_read(world: tuple[Api, Worker]) -> None:
    api, worker = world
    ids = [api.order() for _ in range(3)]
    worker.redis.hset(f"diptych:job:{ids[1]}", "state", "dreaming")
    listed = api.get("/v1/jobs").json()
    assert [job["id"] for job in listed["data"]] == [ids[2], ids[0]]
    for answer in (
        api.get(f"/v1/jobs/{ids[1]}"),
        api.client.post(f"/v1/jobs/{ids[1]}/cancel"),
        api.get(f"/v1/jobs/{ids[1]}/images/0"),
    ):
        check_error(answer, 503, code="record_unreadable")
        assert answer.headers["retry-after"]
    assert value(figures(api.client), "diptych_unreadable_total", kind="record") >= 1
    assert api.delete(f"/v1/jobs/{ids[1]}").json()["deleted"]
    check_error(api.get(f"/v1/jobs/{ids[1]}"), 404, "id")


def test_a_model_is_forgotten_though_thousands_of_its_jobs_are_gone(world: tuple[Api, Worker]) -> None:
    """What lists them is cleared on the way; the loop over pages ends."""
    api, worker = world
    waiting = api.order()
    with worker.redis.pipeline(transaction=False) as pipe:
        for k in range(2500):
            pipe.zadd("diptych:jobs", {f"|gone-{k}": 2**50 + k})
        pipe.execute()
    worker.registry.deregister(worker.name)
    told = api.delete("/v1/models/emoji-xl").json()
    assert told["cancelled"] == 1 and worker.job(waiting).state is JobState.CANCELLED
    page = api.get("/v1/jobs").json()
    assert page["last_id"] == waiting and not page["has_more"]
