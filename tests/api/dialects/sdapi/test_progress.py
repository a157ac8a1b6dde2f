"""Progress, interruptions, options and keys: each caller's are its own."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from PIL import Image

from core.config import Settings
from core.jobs.record import JobState, ProgressReport
from tests.api.dialects.sdapi.studio import CARD, Studio
from tests.api.dialects.sdapi.test_generation import encoded, info, picture, sdapi_error
from tests.api.world import PATIENCE_S, Api, Worker, bearer, changed, eventually, opened, token_of

IDLE = (0.0, 0)


@pytest.fixture
def world(settings: Settings) -> Iterator[tuple[Api, Worker, list[httpx2.Client]]]:
    """A service with two callers, who bring their keys as passwords of different forms."""
    settings = changed(settings, sdapi=True)
    ann, bob = (token_of(settings, name) for name in ("ann", "bob"))
    with opened(settings, CARD) as (api, worker), ExitStack() as stack:
        clients = [httpx2.Client(base_url=api.url, timeout=PATIENCE_S, auth=auth, verify=False)
                   for auth in (("ann", ann), (bob, ""))]  # fmt: skip
        yield api, worker, [stack.enter_context(client) for client in clients]


World = tuple[Api, Worker, list[httpx2.Client]]


def begun(pool: ThreadPoolExecutor, worker: Worker, client: httpx2.Client, **fields: Any) -> tuple[Any, str]:
    """A request that waits, and the id of its job."""
    before = worker.ids()
    answer = pool.submit(client.post, "/sdapi/v1/txt2img", json={"prompt": "a cat", "steps": 20, **fields})
    (id,) = eventually(lambda: worker.ids() - before)
    return answer, id


def progress(client: httpx2.Client) -> dict[str, Any]:
    answer = client.get("/sdapi/v1/progress")
    assert answer.status_code == 200
    return dict(answer.json())


def task(client: httpx2.Client, name: str) -> dict[str, Any]:
    return dict(client.post("/internal/progress", json={"id_task": name, "id_live_preview": -1}).json())


def standing(client: httpx2.Client) -> tuple[float, int]:
    now = progress(client)
    return now["progress"], now["state"]["job_count"]


def test_a_key_is_told_and_interrupts_its_own(world: World, pool: ThreadPoolExecutor) -> None:
    _, worker, (ann, bob) = world
    assert standing(ann) == IDLE
    answer, id = begun(pool, worker, ann, force_task_id="task(1)")
    eventually(lambda: standing(ann) == (0.0, 1))
    assert standing(bob) == IDLE
    assert task(ann, "task(1)")["queued"] and not task(bob, "task(1)")["queued"]
    claim = worker.take(id)
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "PNG")
    look = base64.b64encode(stream.getvalue()).decode()
    data = {"steps_done": 5, "steps": 20, "image": 0, "images_done": 0, "previews": [0]}
    worker.store.leases.report([ProgressReport(claim.id, claim.attempt, data, {0: look})])
    now = progress(ann)
    assert (now["progress"], now["current_image"]) == (0.25, look)
    assert (now["state"]["sampling_step"], now["state"]["sampling_steps"]) == (5, 20)
    assert ann.get("/sdapi/v1/progress?skip_current_image=true").json()["current_image"] is None
    told = task(ann, "task(1)")
    assert told["active"] and told["progress"] == 0.25 and told["live_preview"].endswith(look)
    assert told["id_live_preview"] == 5
    again = ann.post("/internal/progress", json={"id_task": "task(1)", "id_live_preview": 5}).json()
    assert (again["live_preview"], again["id_live_preview"], again["progress"]) == (None, 5, 0.25)
    assert bob.post("/sdapi/v1/interrupt").json() == {} and worker.is_(id, JobState.RUNNING)
    assert ann.post("/sdapi/v1/interrupt").json() == {}
    ended = answer.result(PATIENCE_S)
    assert ended.json()["images"] == [] and "interrupted" in info(ended)["warnings"][-1]
    assert worker.is_(id, JobState.CANCELLED)
    eventually(lambda: standing(ann) == IDLE)
    assert task(ann, "task(1)")["completed"] and not task(bob, "task(1)")["completed"]


def test_an_interruption_leaves_other_work_of_the_key(world: World, pool: ThreadPoolExecutor) -> None:
    """What waits behind what runs, and jobs that did not come by this API."""
    _, worker, (ann, _) = world
    (first, running), (second, waiting) = (begun(pool, worker, ann) for _ in range(2))
    worker.take(running)
    eventually(lambda: standing(ann)[1] == 2)
    assert ann.post("/sdapi/v1/skip").json() is None
    assert first.result(PATIENCE_S).json()["images"] == []
    assert worker.is_(waiting, JobState.QUEUED)
    assert ann.post("/sdapi/v1/interrupt").json() == {}, "now the one that waits"
    assert isinstance(second, Future) and second.result(PATIENCE_S).json()["images"] == []
    assert ann.post("/sdapi/v1/interrupt").json() == {}, "nothing is left"


def test_open_requests_are_one_read_and_old_ones_are_forgotten(world: World, pool: ThreadPoolExecutor) -> None:
    api, worker, (ann, bob) = world
    begun_ones = [begun(pool, worker, ann) for _ in range(4)]
    eventually(lambda: standing(ann)[1] == 4)
    (key,) = worker.redis.scan_iter("diptych:sdapi_open:*")
    owner, store, executed = key.rpartition(":")[2], api.server._service.sdapi, []
    client = store._client

    class Counting:
        def __getattr__(self, name: str) -> Any:
            executed.append(name)
            return getattr(client, name)

    store._client = Counting()
    try:
        jobs = store.open_jobs(owner)
    finally:
        store._client = client
    assert [job.id for job in jobs] == [id for _, id in begun_ones] and executed == ["hgetall", "pipeline"]
    old, gone = begun_ones[0][1], "a" * 20
    worker.redis.hset(key, mapping={old: int(time.time()) - 86_401, gone: int(time.time())})
    assert standing(ann)[1] == 3 and standing(bob) == IDLE
    assert set(worker.redis.hkeys(key)) == {id for _, id in begun_ones[1:]}
    for answer, id in begun_ones:
        worker.work(id)
        answer.result(PATIENCE_S)


def test_options_are_a_keys_own(world: World, pool: ThreadPoolExecutor) -> None:
    api, worker, (ann, bob) = world
    with Worker(api.settings, "other") as other:
        other.announce(card=replace(CARD, name="z"))
        eventually(lambda: len(ann.get("/sdapi/v1/sd-models").json()) == 2)
        options = ann.get("/sdapi/v1/options").json()
        chosen = {"emoji-xl": "z", "z": "emoji-xl"}[options["sd_model_checkpoint"]]
        posted = {**options, "sd_model_checkpoint": f"{chosen}.safetensors [0123456789]"}
        assert ann.post("/sdapi/v1/options", json=posted).json() is None
        assert ann.get("/sdapi/v1/options").json()["sd_model_checkpoint"] == chosen
        assert bob.get("/sdapi/v1/options").json() == options
        for client, model in ((ann, chosen), (bob, options["sd_model_checkpoint"])):
            answer, id = begun(pool, worker, client)
            assert worker.job(id).model == model
            worker.work(id)
            assert info(answer.result(PATIENCE_S))["sd_model_name"] == model
        own = {"sd_model_checkpoint": options["sd_model_checkpoint"]}
        answer, id = begun(pool, worker, ann, override_settings=own)
        assert worker.job(id).model == options["sd_model_checkpoint"], "a request's own come first"
        worker.work(id)
        answer.result(PATIENCE_S)
    refused = ann.post("/sdapi/v1/options", json={"sd_model_checkpoint": "sdxl"})
    sdapi_error(refused, 422, "sd_model_checkpoint")
    lasting = {name: worker.redis.pttl(name) for name in worker.redis.scan_iter("diptych:sdapi*")}
    assert lasting and min(lasting.values()) > 0, "all that this API keeps expires"


def test_nobody_comes_in_without_a_key(world: World) -> None:
    api, worker, _ = world
    for header in ("", "Basic", "Basic !", "Basic Og==", "Bearer x", "Digest a", "Basic dXNlcjpwYXNz"):
        headers = {"Authorization": header} if header else {}
        for path in ("/sdapi/v1/options", "/sdapi/v1/progress", "/queue/status"):
            answer = api.get(path, headers=headers)
            sdapi_error(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer", "no browser is asked for a password"
    sdapi_error(api.post("/sdapi/v1/txt2img", prompt="a"), 401, "invalid_api_key")
    assert not worker.ids()


def test_scopes_hold(settings: Settings) -> None:
    settings = changed(settings, sdapi=True)
    headers = bearer(token_of(settings, "texts", ["text"]))
    with opened(settings, CARD) as (api, _):
        for path in ("txt2img", "img2img", "options", "interrupt", "png-info", "extra-single-image"):
            answer = api.client.post(f"/sdapi/v1/{path}", json={"prompt": "a"}, headers=headers)
            sdapi_error(answer, 403, "insufficient_scope")


def test_the_quota_comes_before_the_mask(settings: Settings) -> None:
    settings = changed(settings, sdapi=True)
    headers = bearer(token_of(settings, "one", ["images"], quota="1/day"))
    with opened(settings, CARD) as (api, worker), Studio(worker):
        body = {"prompt": "a cat", "steps": 4, "init_images": [picture()]}
        assert api.client.post("/sdapi/v1/img2img", json=body, headers=headers).status_code == 200
        empty = {**body, "mask": encoded(Image.new("L", (128, 128)))}
        sdapi_error(api.client.post("/sdapi/v1/img2img", json=empty, headers=headers), 429, "quota_exceeded")
