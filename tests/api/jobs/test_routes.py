"""/v1/jobs: made, asked for, cancelled, and its pictures fetched."""

from __future__ import annotations

import pytest

from tests.api.easel import conclude
from tests.api.world import Api, Worker, check_error


def test_a_job_is_made_and_sent(shared: Api, worker: Worker) -> None:
    answer = shared.post("/v1/jobs", type="image", prompt="a cat", deadline_s=3600, priority=4)
    assert answer.status_code == 202
    job = answer.json()
    id = job["id"]
    assert answer.headers["location"] == f"/v1/jobs/{id}"
    assert job == {
        "id": id, "object": "job", "status": "queued", "model": "emoji-xl", "created_at": job["created_at"],
        "started_at": None, "completed_at": None, "expires_at": pytest.approx(job["created_at"] + 3600, abs=0.01),
        "attempt": 0, "progress": None, "error": None, "images": None, "position": job["position"], "priority": 4,
        "estimated_start_s": job["estimated_start_s"], "estimated_end_s": job["estimated_end_s"],
    }  # fmt: skip
    assert (id, 3) in worker.messages(), "Celery's list for priorities 3 to 5 holds the message"
    record = worker.job(id)
    assert record.priority == 4 and record.work_ms == 1500
    told = shared.get(f"/v1/jobs/{id}")
    assert "a cat" not in told.text and told.headers["cache-control"] == "no-store"


def test_a_job_from_beginning_to_end(shared: Api, worker: Worker) -> None:
    id = shared.order(n=2, steps=5, seed=7)
    assert shared.job(id)["status"] == "queued"
    claim = worker.take(id)
    running = shared.job(id)
    assert running["status"] == "running" and running["attempt"] == 1 and running["started_at"] >= running["created_at"]
    worker.report(claim, 3)
    assert shared.job(id)["progress"] == {"steps_done": 3, "steps": 10, "image": 0, "images_done": 0}
    check_error(shared.get(f"/v1/jobs/{id}/images/0"), 409, code="job_not_done")
    pictures = worker.finish(claim)
    done = shared.job(id)
    assert done["status"] == "succeeded" and done["completed_at"] >= done["started_at"] and done["error"] is None
    assert done["images"] == [
        {
            "url": f"{shared.url}/v1/jobs/{id}/images/{k}", "seed": 7 + k, "width": 128, "height": 128,
            "media_type": "image/png", "size_bytes": len(picture), "warnings": [],
        }
        for k, picture in enumerate(pictures)
    ]  # fmt: skip
    assert [shared.get(image["url"]).content for image in done["images"]] == pictures
    assert shared.client.post(f"/v1/jobs/{id}/cancel").json() == done == shared.job(id), "what has ended stays"


def test_pictures_are_kept_by_who_has_them(shared: Api, worker: Worker) -> None:
    id = shared.order()
    worker.work(id)
    first = shared.get(f"/v1/jobs/{id}/images/0")
    assert first.status_code == 200 and first.headers["content-type"] == "image/png"
    assert "immutable" in first.headers["cache-control"] and first.headers["x-content-type-options"] == "nosniff"
    tag = first.headers["etag"]
    assert tag.startswith('"') and tag.endswith('"')
    for known, status in ((tag, 304), (f"W/{tag}", 304), (f'"other", {tag}', 304), ("*", 304), ('"other"', 200)):
        again = shared.get(f"/v1/jobs/{id}/images/0", headers={"If-None-Match": known})
        assert again.status_code == status and again.headers["etag"] == tag and bool(again.content) is (status == 200)


def test_pictures_that_are_not_there(shared: Api, worker: Worker) -> None:
    id = shared.order()
    worker.work(id)
    for k in ("1", "-1", "00001", "x", "0x0", "1e0", "%20", "9" * 5000, "٠"):
        check_error(shared.get(f"/v1/jobs/{id}/images/{k}"), 404, "k", "image_not_found")


def test_a_job_that_ended_without_pictures(shared: Api, worker: Worker) -> None:
    failed, cancelled = shared.order(), shared.order()
    claim = worker.take(failed)
    worker.store.leases.fail(failed, claim.attempt, "crashed", "three workers were lost")
    shared.client.post(f"/v1/jobs/{cancelled}/cancel")
    told = shared.job(failed)
    assert told["status"] == "failed" and told["error"] == {"code": "crashed", "message": "three workers were lost"}
    assert told["images"] is None and shared.job(cancelled)["error"] is None
    for id in (failed, cancelled):
        check_error(shared.get(f"/v1/jobs/{id}/images/0"), 404, "k", "image_not_found")


def test_cancel_reaches_exactly_its_job(shared: Api, worker: Worker) -> None:
    ids = [shared.order() for _ in range(6)]
    claims = [worker.take(id) for id in ids[:3]]
    for id in (ids[1], ids[4]):
        answer = shared.client.post(f"/v1/jobs/{id}/cancel")
        assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
    states = ["running", "cancelled", "running", "queued", "cancelled", "queued"]
    assert [worker.job(id).state.value for id in ids] == states
    told = {message["cancel"] for _, message in worker.registry.control(worker.name, "0", 0.01)}
    assert ids[1] in told and not told & {ids[0], ids[2], ids[3], ids[4], ids[5]}
    assert not worker.store.leases.succeed(ids[1], claims[1].attempt, {"images": []}), "it comes too late"
    assert worker.store.leases.claim(ids[4], worker.name) is None
    assert worker.finish(claims[0])


def test_a_job_says_what_draws_it_again(shared: Api, worker: Worker) -> None:
    """Unchanged; and with nothing left open, not even by chance."""
    id = shared.order(n=2, steps=5, prompt='a "fox"\n🦊', size="168x96", negative_prompt="", deterministic=True)
    assert "request" not in shared.job(id)
    cached = {"interval": 3, "depth": "resnet"}
    claim = conclude(worker, id, *[{"fingerprint": {"weights": "ab"}}] * 2, deepcache=cached)
    done = shared.job(id)
    assert [image["fingerprint"] for image in done["images"]] == [{"weights": "ab"}] * 2
    asked = done["request"]
    assert (asked["seed"], asked["size"], asked["deepcache"]) == (claim.parameters["seed"], "168x96", cached)
    again = shared.client.post("/v1/jobs", json=asked).json()["id"]
    assert worker.take(again).parameters == {**claim.parameters, "deepcache": cached}
    for other in (shared.get("/v1/jobs").json()["data"][0], shared.job(again)):
        assert "request" not in other and "fox" not in str(other), "lists hold no prompts"


def test_an_id_that_is_used_again(shared: Api, worker: Worker) -> None:
    """Erased and made anew at once: its events are its own, who waits for it waits, who followed the old one ends."""
    id, ask = "again", {"type": "image", "prompt": "a cat"}
    assert shared.client.put(f"/v1/jobs/{id}", json=ask).status_code == 202
    worker.take(id)
    with shared.events(id) as following:
        assert [next(following).type for _ in range(2)] == ["queued", "running"]
        assert shared.delete(f"/v1/jobs/{id}").status_code == 200
        assert shared.client.put(f"/v1/jobs/{id}", json={**ask, "prompt": "a dog"}).status_code == 202
        assert [event.type for event in following] in ([], ["cancelled"])
    assert shared.job(id)["attempt"] == 0
    assert worker.redis.pttl(f"diptych:events:{id}") == -1
    before = commands(worker)
    assert shared.get(f"/v1/jobs/{id}", params={"wait_s": 2}).json()["status"] == "queued"
    assert commands(worker) - before < 1000, "it spins"
    with shared.events(id) as events:
        assert next(events).type == "queued"
        worker.work(id)
        rest = list(events)
    assert [event.type for event in rest] == ["running", "succeeded"] and rest[0].data == {"attempt": 1}
    assert shared.get(f"/v1/jobs/{id}", params={"wait_s": 5}).json()["status"] == "succeeded"


def commands(worker: Worker) -> int:
    """All that Redis was ever asked to do."""
    return int(worker.redis.info("stats")["total_commands_processed"])
