"""Jobs by chosen ids, repeated requests, lists, waiting, places in the queue, trying again, erasing; pausing queues."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from api.service import Service
from core.jobs.record import JobState, ProgressReport, new_id
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually

JOB = {"type": "image", "prompt": "a cat"}


def followers(api: Api, id: str) -> int:
    """How many requests wait for the job's end."""
    service: Service = api.server.config.app.state.service  # type: ignore[union-attr]
    return len(service.reader._followers.get(id, ()))


def test_an_id_of_ones_own(shared: Api, worker: Worker) -> None:
    id = f"my_cat-{new_id()}"
    made = shared.client.put(f"/v1/jobs/{id}", json=JOB)
    assert made.status_code == 202 and made.json()["id"] == id and made.headers["location"] == f"/v1/jobs/{id}"
    seed = worker.job(id).parameters["seed"]
    before = worker.ids()
    assert shared.client.put(f"/v1/jobs/{id}", json=JOB).json()["id"] == id
    assert worker.ids() == before and worker.job(id).parameters["seed"] == seed, "one job, drawn by one lot"
    other = shared.client.put(f"/v1/jobs/{id}", json={**JOB, "prompt": "a dog"})
    check_error(other, 422, code="idempotency_conflict")
    worker.work(id)
    assert shared.client.put(f"/v1/jobs/{id}", json=JOB).json()["status"] == "succeeded"
    for wrong in ("a" * 65, "a b", "é", "a.b"):
        check_error(shared.client.put(f"/v1/jobs/{wrong}", json=JOB), 400, "id")


def test_a_request_that_is_repeated_draws_once(shared: Api, worker: Worker, pool: ThreadPoolExecutor) -> None:
    key = {"Idempotency-Key": new_id()}
    before = worker.ids()
    answers = list(pool.map(lambda _: shared.client.post("/v1/jobs", json=JOB, headers=key), range(16)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    (id,) = worker.ids() - before
    assert worker.messages().count((id, 3)) == 1
    other = shared.client.post("/v1/jobs", json={**JOB, "n": 2}, headers=key)
    check_error(other, 422, code="idempotency_conflict")
    for wrong in ("", "x" * 256, "a b"):
        check_error(
            shared.client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": wrong}), 400, "idempotency-key"
        )


def test_who_waits_may_come_again(shared: Api, worker: Worker, pool: ThreadPoolExecutor) -> None:
    """A client whose connection broke: its job goes on, and its second request gets the pictures of the first."""
    key = {"Idempotency-Key": new_id()}
    before = worker.ids()
    fields = {"prompt": "a cat", "response_format": "url"}
    first = pool.submit(shared.client.post, "/v1/images/generations", json=fields, headers=key)
    (id,) = eventually(lambda: worker.ids() - before)
    second = pool.submit(shared.client.post, "/v1/images/generations", json=fields, headers=key)
    eventually(lambda: followers(shared, id) == 2)
    worker.work(id)
    answers = [call.result(PATIENCE_S).json() for call in (first, second)]
    assert answers[0] == answers[1] and answers[0]["job_id"] == id
    assert worker.ids() - before == {id}


def test_waiting_for_the_end(shared: Api, worker: Worker, pool: ThreadPoolExecutor) -> None:
    id = shared.order()
    begun = time.monotonic()
    assert shared.get(f"/v1/jobs/{id}", params={"wait_s": 0.3}).json()["status"] == "queued"
    assert time.monotonic() - begun >= 0.3
    waits = pool.submit(shared.client.get, f"/v1/jobs/{id}", params={"wait_s": 60})
    eventually(lambda: followers(shared, id) == 1)
    worker.work(id)
    assert waits.result(PATIENCE_S).json()["status"] == "succeeded"
    assert shared.get(f"/v1/jobs/{id}?wait_s=60").json()["status"] == "succeeded"
    for wrong in ("60.1", "-1e-3", "nan", "0x1", "", "soon"):
        check_error(shared.get(f"/v1/jobs/{id}", params={"wait_s": wrong}), 400, "wait_s")


def test_places_and_estimates(alone: tuple[Api, Worker]) -> None:
    api, worker = alone
    ids = [api.order(steps=20, priority=priority) for priority in (5, 5, 0)]
    told = [api.job(id) for id in ids]
    assert [job["position"] for job in told] == [1, 2, 0]
    one_s = worker.job(ids[0]).work_ms / 1000
    assert [job["estimated_start_s"] for job in told] == pytest.approx([one_s, 2 * one_s, 0], abs=0.01)
    assert told[1]["estimated_end_s"] == pytest.approx(3 * one_s, abs=0.01)
    claim = worker.take(ids[2])
    worker.report(claim, 10)
    running = api.job(ids[2])
    assert running["position"] is None and running["estimated_start_s"] is None
    assert 0 <= running["estimated_end_s"] < PATIENCE_S
    worker.finish(claim)
    done = api.job(ids[2])
    assert done["position"] is done["estimated_end_s"] is None
    worker.announce("draining")
    eventually(lambda: api.job(ids[0])["estimated_end_s"] is None)
    assert api.job(ids[0])["position"] == 0


def test_lists(alone: tuple[Api, Worker]) -> None:
    api, worker = alone
    empty = api.get("/v1/jobs").json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    ids = []
    for _ in range(5):
        ids.append(api.order())
        time.sleep(0.002)  # by Redis's clock one after the other
    worker.store.leases.fail(worker.take(ids[1]).id, 1, "engine_error", "it broke")
    newest = ids[::-1]
    first = api.get("/v1/jobs?limit=2").json()
    assert [job["id"] for job in first["data"]] == newest[:2] and first["has_more"]
    assert (first["first_id"], first["last_id"]) == (newest[0], newest[1])
    rest = api.get("/v1/jobs", params={"after": first["last_id"], "limit": 3}).json()
    assert [job["id"] for job in rest["data"]] == newest[2:] and not rest["has_more"]
    failed = api.get("/v1/jobs?status=failed&model=emoji-xl").json()["data"]
    assert [job["id"] for job in failed] == [ids[1]] and failed[0]["error"]["code"] == "engine_error"
    assert api.get("/v1/jobs?model=other").json()["data"] == []
    check_error(api.get("/v1/jobs?after=nothing"), 400, "after")


def test_what_failed_is_tried_again(shared: Api, worker: Worker) -> None:
    id = shared.order(seed=7, n=2)
    check_error(shared.client.post(f"/v1/jobs/{id}/requeue"), 409, code="job_not_failed")
    worker.store.leases.fail(worker.take(id).id, 1, "engine_error", "it broke")
    again = shared.client.post(f"/v1/jobs/{id}/requeue")
    assert again.status_code == 202
    new = worker.job(again.json()["id"])
    assert new.id != id and new.parameters == worker.job(id).parameters and new.state is JobState.QUEUED
    assert (new.id, 3) in worker.messages() and worker.is_(id, JobState.FAILED)
    worker.work(new.id)
    check_error(shared.client.post(f"/v1/jobs/{new.id}/requeue"), 409, code="job_not_failed")


def test_erasing(shared: Api, worker: Worker) -> None:
    done, waits = shared.order(), shared.order()
    worker.work(done)
    for id in (done, waits):
        assert shared.delete(f"/v1/jobs/{id}").json() == {"id": id, "object": "job", "deleted": True}
        for path in ("", "/events", "/images/0"):
            check_error(shared.get(f"/v1/jobs/{id}{path}"), 404, code="job_not_found")
        check_error(shared.delete(f"/v1/jobs/{id}"), 404, code="job_not_found")
    assert waits not in {job["id"] for job in shared.get("/v1/jobs?limit=100").json()["data"]}


def test_previews_and_formats(shared: Api, worker: Worker) -> None:
    id = shared.order(preview_every=2, output_format="webp", output_compression=80, steps=8)
    claim = worker.take(id)
    assert {name: claim.parameters[name] for name in ("preview_every", "output_format", "output_compression")} == {
        "preview_every": 2, "output_format": "webp", "output_compression": 80,
    }  # fmt: skip
    assert shared.get(f"/v1/jobs/{id}/preview").status_code == 204
    worker.store.leases.report([ProgressReport(id, 1, {"steps_done": 2, "steps": 8, "previews": [0]}, {0: "UE5H"})])
    look = shared.get(f"/v1/jobs/{id}/preview")
    assert look.content == b"PNG" and look.headers["content-type"] == "image/png"
    assert shared.get(f"/v1/jobs/{id}/preview?image=1").status_code == 204
    for image in ("x", "-1", "100"):
        check_error(shared.get(f"/v1/jobs/{id}/preview", params={"image": image}), 400, "image")
    worker.finish(claim)
    assert shared.get(f"/v1/jobs/{id}/preview").status_code == 204


def test_pausing_is_told_to_workers(shared: Api, worker: Worker) -> None:
    queues = {queue["name"]: queue for queue in shared.get("/v1/queues").json()["data"]}
    assert set(queues) == {"image", "text"} and not queues["image"]["paused"]
    assert shared.client.post("/v1/queues/image/pause").json()["paused"]
    assert worker.registry.paused_queues() == {"image"}
    assert shared.post("/v1/jobs", **JOB).status_code == 202, "jobs are accepted, and wait"
    assert not shared.client.post("/v1/queues/image/resume").json()["paused"]
    assert worker.registry.paused_queues() == set()


def test_one_call_empties_a_queue(alone: tuple[Api, Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.queues._PORTION", 3)
    api, worker = alone
    waiting = [api.order(priority=priority) for priority in (0, 5, 9, 5, 2, 7, 5)]
    runs = worker.take(api.order())
    answer = api.client.post("/v1/queues/image/cancel").json()
    assert (answer["cancelled"], answer["queued"], answer["running"]) == (len(waiting), 0, 1)
    assert all(worker.is_(id, JobState.CANCELLED) for id in waiting) and worker.messages_left() == []
    assert api.all_events(waiting[0])[-1].type == "cancelled"
    worker.finish(runs)
    assert api.client.post("/v1/queues/image/cancel").json()["cancelled"] == 0
    check_error(api.client.post("/v1/queues/music/cancel"), 404, code="queue_not_found")
