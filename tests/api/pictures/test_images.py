"""POST /v1/images/generations: OpenAI's answer when all goes well, an honest one when not, and who leaves cancels."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from core.config import Settings
from core.jobs.record import JobState
from tests.api.easel import asked, conclude
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually, opened


def test_answers_as_openai_does(shared: Api, worker: Worker) -> None:
    prompt = "a cat\n\tand a hat ☂ 😀"
    id, answer = asked(worker, shared.draw, prompt=prompt, n=2, size="64x64", seed=2**63 - 1, steps=4)
    claim = worker.take(id)
    assert claim.parameters["prompt"] == prompt
    for done in range(1, 9):
        worker.report(claim, done)
    pictures = worker.finish(claim)
    drawn = answer.result(PATIENCE_S)
    assert drawn.status_code == 200 and drawn.headers["content-type"] == "application/json"
    content = drawn.json()
    data = content.pop("data")
    assert [base64.b64decode(item["b64_json"]) for item in data] == pictures
    assert [item["seed"] for item in data] == [2**63 - 1, 0]
    created = content.pop("created")
    assert isinstance(created, int) and abs(created - time.time()) < 3600
    assert content == {
        "size": "64x64", "output_format": "png", "background": "opaque", "model": "emoji-xl", "job_id": id,
    }  # fmt: skip


def test_every_field_of_openai_is_accepted(shared: Api, worker: Worker) -> None:
    id, answer = asked(
        worker, shared.draw, model="emoji-xl", n=1, size="auto", response_format="url", user="u-1", quality="hd",
        style="vivid", background="transparent", moderation="low", output_format="png", output_compression=100,
        partial_images=0, input_fidelity="high", stream=False,
    )  # fmt: skip
    pictures = worker.work(id)
    (item,) = answer.result(PATIENCE_S).json()["data"]
    assert item["url"].startswith(shared.url + "/v1/jobs/job_") and "b64_json" not in item
    assert shared.get(item["url"]).content == pictures[0]


def test_two_that_ask_get_their_own(shared: Api, worker: Worker) -> None:
    known = worker.ids()
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(shared.draw, seed=seed) for seed in range(20)]
        ids = eventually(lambda: len(found := worker.ids() - known) == 20 and found)
        made = {}
        for id in sorted(ids, reverse=True):
            claim = worker.take(id)
            made[claim.parameters["seed"]] = worker.finish(claim)[0]
        for seed, answer in enumerate(answers):
            (item,) = answer.result(PATIENCE_S).json()["data"]
            assert base64.b64decode(item["b64_json"]) == made[seed] and item["seed"] == seed


def fail(api: Api, worker: Worker, id: str) -> None:
    worker.store.leases.fail(id, worker.take(id).attempt, "out_of_memory", "one picture needs more memory")


def cancel(api: Api, worker: Worker, id: str) -> None:
    api.client.post(f"/v1/jobs/{id}/cancel")


def lose(api: Api, worker: Worker, id: str) -> None:
    conclude(worker, id, {"key": f"sha256/00/{'0' * 62}.png", "size_bytes": None})


def wait(api: Api, worker: Worker, id: str) -> None:
    """For the reaper of the API."""


@pytest.mark.parametrize(
    ("end", "fields", "status", "code"),
    [
        (fail, {}, 500, "out_of_memory"),
        (cancel, {}, 409, "cancelled"),
        (lose, {}, 500, "artifact_unreadable"),
        (wait, {"deadline_s": 0.5, "steps": 1, "priority": 0}, 504, "expired"),
    ],
)
def test_a_job_that_ends_without_its_picture(
    shared: Api, worker: Worker, end: Callable[[Api, Worker, str], None], fields: dict[str, Any], status: int, code: str
) -> None:
    id, answer = asked(worker, shared.draw, **fields)
    end(shared, worker, id)
    ended = answer.result(PATIENCE_S)
    error = check_error(ended, status, code=code)
    assert ended.headers["x-should-retry"] == "false"
    if code == "out_of_memory":
        assert error["message"] == "one picture needs more memory"
    if code == "artifact_unreadable":
        check_error(shared.get(f"/v1/jobs/{id}/images/0"), 404, code="image_not_found")


def call(api: Api, seed: int) -> HTTPConnection:
    """A request that waits for its answer."""
    connection = HTTPConnection("127.0.0.1", api.port, timeout=PATIENCE_S)
    body = json.dumps({"prompt": "a cat", "seed": seed})
    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
    return connection


def test_who_leaves_cancels_and_nobody_else_is_touched(shared: Api, worker: Worker) -> None:
    known = worker.ids()
    callers = {seed: call(shared, seed) for seed in range(12)}
    ids = eventually(lambda: len(found := worker.ids() - known) == 12 and found)
    by_seed = {worker.job(id).parameters["seed"]: id for id in ids}
    running = {seed: worker.take(by_seed[seed]) for seed in range(0, 12, 2)}  # half of them run, half wait
    leaving = {0, 1, 5, 6, 11}
    for seed in leaving:
        callers[seed].close()
    eventually(lambda: all(worker.is_(by_seed[seed], JobState.CANCELLED) for seed in leaving))
    for seed in set(by_seed) - leaving:
        assert worker.job(by_seed[seed]).state in (JobState.QUEUED, JobState.RUNNING)
        worker.finish(running[seed] if seed in running else worker.take(by_seed[seed]))
        assert callers[seed].getresponse().status == 200
        callers[seed].close()
    # What the workers of the two that ran are told.
    told = worker.registry.control(worker.name, "0", 0.01)
    assert {message["cancel"] for _, message in told} >= {by_seed[0], by_seed[6]}
    assert not {message["cancel"] for _, message in told} & {by_seed[seed] for seed in set(by_seed) - leaving}


def test_a_server_that_stops_lets_those_who_wait_go(settings: Settings) -> None:
    with opened(settings) as (api, worker), ThreadPoolExecutor(1) as pool:
        worker.announce()
        ordered = api.order()  # of a model that the API has not read of yet
        follows = pool.submit(api.all_events, ordered)
        drawn, answer = asked(worker, api.draw)
        worker.take(drawn)
        worker.take(ordered)
        # Both wait for what happens next, and have been told what did.
        positions = api.server._service.reader._positions  # type: ignore[attr-defined]
        last = {id: worker.redis.xrevrange(f"diptych:events:{id}", count=1)[0][0] for id in (ordered, drawn)}
        eventually(lambda: {id: f"{at}-{k}" for id, (at, k) in positions.copy().items()} == last)
        api.server.should_exit = True
        stopped = answer.result(PATIENCE_S)
        check_error(stopped, 503, code="stopping")
        assert stopped.headers["retry-after"]
        assert [event.type for event in follows.result(PATIENCE_S)] == ["queued", "running"]
        assert worker.job(drawn).state is JobState.CANCELLED, "its one reader is gone, and asks again"
        assert worker.job(ordered).state is JobState.RUNNING, "it is nobody's, and goes on"


def test_the_server_is_silent_about_itself(shared: Api) -> None:
    assert "server" not in shared.get("/healthz").headers
