"""Cog's API: predictions that wait or do not, ids of the client's, cancelling; errors and the health check."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from core.jobs.cards import WorkerCard
from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.world import CARD, TEXT, Api, Worker, eventually, ok, opened, settings_of

INPUT: dict[str, Any] = {"prompt": "a cat", "width": 64, "height": 64, "num_inference_steps": 4, "seed": 7}
ASYNC = {"Prefer": "respond-async"}


def predict(api: Api, path: str = "/predictions", headers: dict[str, str] | None = None, **body: Any) -> Any:
    """The answer of PUT where the path has an id, else of POST."""
    method = "PUT" if path.startswith("/predictions/") else "POST"
    return api.client.request(method, path, json={"input": INPUT, **body}, headers=headers)


def image(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize("path", ["/predictions", "/predictions/of-mine"])
def test_it_waits_and_answers_with_data_urls(shared: Api, easel: Easel, path: str) -> None:
    answer = ok(predict(shared, path))
    prediction = answer.json()
    assert (prediction["status"], prediction["error"]) == ("succeeded", None)
    assert [image(url).size for url in prediction["output"]] == [(64, 64)]
    assert prediction == shared.get(f"/predictions/{prediction['id']}").json()
    assert prediction["urls"]["get"] == f"{shared.url}/predictions/{prediction['id']}"


def test_it_waits_for_no_longer_than_is_preferred(shared: Api) -> None:
    answer = predict(shared, headers={"Prefer": "wait=1, handling=lenient"})
    assert (answer.status_code, answer.json()["status"]) == (202, "starting")


def test_an_id_makes_one_prediction(shared: Api, worker: Worker) -> None:
    answers = [predict(shared, "/predictions/once", ASYNC) for _ in range(3)]
    assert {(answer.status_code, answer.json()["id"]) for answer in answers} == {(202, "once")}
    other = predict(shared, "/predictions/once", ASYNC, input={**INPUT, "seed": 8})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_conflict")
    worker.work("once")
    again = predict(shared, "/predictions/once")
    assert (again.status_code, again.json()["status"]) == (200, "succeeded")
    assert predict(shared, "/predictions/no%20id").json()["error"]["param"] == "id"
    assert predict(shared, "/predictions/once", id="once").status_code == 200
    mismatch = predict(shared, "/predictions/another", ASYNC, id="once")
    assert (mismatch.status_code, mismatch.json()["error"]["param"]) == (422, "id")


def test_an_id_has_one_filter_of_events(shared: Api) -> None:
    """In any order."""

    def status(*events: str) -> int:
        body = {"webhook": "https://93.184.216.34/hook", "webhook_events_filter": events}
        return int(predict(shared, "/predictions/filtered", ASYNC, **body).status_code)

    assert [status("start", "output"), status("output", "start"), status("start")] == [202, 202, 422]


def test_what_ends_without_pictures(shared: Api, worker: Worker, pool: ThreadPoolExecutor) -> None:
    """An answer that waited is a 200 all the same: the status says it."""
    waiting = {id: pool.submit(predict, shared, f"/predictions/{id}") for id in ("fails", "cancelled", "late")}
    claims = {id: eventually(lambda id=id: worker.store.leases.claim(id, worker.name)) for id in waiting}
    worker.store.leases.fail("fails", claims["fails"].attempt, "a", "it broke")
    shared.client.post("/predictions/cancelled/cancel")
    worker.store.leases.expire("late", claims["late"].attempt)
    answers = {id: answer.result() for id, answer in waiting.items()}
    assert {answer.status_code for answer in answers.values()} == {200}
    outcomes = {id: (answer.json()["status"], answer.json()["error"]) for id, answer in answers.items()}
    assert outcomes == {
        "fails": ("failed", "it broke"),
        "cancelled": ("canceled", None),
        "late": ("failed", "The deadline passed before the job was done."),
    }


def test_who_leaves_cancels_unless_it_may_ask_again(shared: Api, worker: Worker) -> None:
    def leave(method: str, path: str) -> str:
        before = worker.ids()
        connection = HTTPConnection("127.0.0.1", shared.port)
        connection.request(method, path, json.dumps({"input": INPUT}), {"Content-Type": "application/json"})
        (id,) = eventually(lambda: worker.ids() - before)
        connection.close()
        return id

    stays, left = leave("PUT", "/predictions/stays"), leave("POST", "/predictions")
    eventually(lambda: worker.is_(left, JobState.CANCELLED))
    assert worker.is_(stays, JobState.QUEUED)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": {}}, "input.prompt"),
        ({"input": {**INPUT, "mask": "data:image/png;base64,AA"}}, "input.image"),
        ({"input": {**INPUT, "lora_weights": "none"}}, "input.lora_weights"),
        ({"input": {**INPUT, "num_outputs": 99}}, "input.num_outputs"),
        ({"input": {**INPUT, "upscale": {"model": 4}}}, "input.upscale.model"),
        ({"input": "a cat"}, "input"),
        ({"input": None}, "input"),
        ({"output_file_prefix": "https://a.example"}, "output_file_prefix"),
        ({"webhook": "http://127.0.0.1/hook"}, "webhook"),
        ({"webhook": "https://a.example", "webhook_events_filter": ["end"]}, "webhook_events_filter"),
        ({"version": "none"}, "version"),
        ({"version": "none", "input": {"prompt": "a cat", "aspect_ratio": "16:9"}}, "version"),
    ],
)
def test_an_error_is_a_problem_that_names_the_field(shared: Api, body: dict[str, Any], param: str) -> None:
    answer = predict(shared, **body)
    problem = answer.json()
    assert answer.status_code == problem["status"] == (404 if param == "version" else 422)
    assert problem["error"]["param"] == param and problem["detail"] == problem["error"]["message"]
    assert problem["detail"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"n": None},
        {"seed": None},
        {"edit": {"image": "a"}},
        {"control": [{"model": "canny", "image": "a", "of_tomorrow": 1}]},
        {"image_prompts": 5},
    ],
)
def test_a_record_of_a_newer_version_is_shown_without_its_input(
    shared: Api, worker: Worker, changes: dict[str, Any]
) -> None:
    id = predict(shared, headers=ASYNC).json()["id"]
    worker.work(id)
    parameters = {**worker.job(id).parameters, **changes}
    kept = {name: value for name, value in parameters.items() if value is not None}
    worker.redis.hset(f"diptych:job:{id}", "parameters", json.dumps(kept))
    listed = {item["id"]: item for item in shared.get("/v1/predictions").json()["results"]}
    for item in (listed[id], shared.get(f"/predictions/{id}").json()):
        assert (item["status"], item["input"], item["logs"], len(item["output"])) == ("succeeded", {}, "", 1)
    assert "request" not in shared.job(id)


def test_an_aspect_ratio_before_a_card_is_known(redis_server: RedisServer, folder: Path) -> None:
    """No card: as any request. A card that the API has not read yet: read, so that a repeated request is the same."""
    input = {"prompt": "a cat", "aspect_ratio": "16:9"}
    with opened(settings_of(redis_server.url, folder)) as (api, worker):
        worker.redis.delete("diptych:models", *worker.redis.keys("diptych:worker*"))
        eventually(lambda: not api.models())
        assert predict(api, "/predictions/wide", ASYNC, input=input).status_code == 503
        worker.announce()
        answers = [predict(api, "/predictions/wide", ASYNC, input=input) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 202]
        assert (answers[0].json()["input"]["width"], answers[0].json()["input"]["height"]) == (168, 96)


def test_models_of_all_kinds_and_names_have_openais_object(redis_server: RedisServer, folder: Path) -> None:
    """Also those of names and aliases with a slash, whose address is that of Replicate's object."""
    aliases = "openai/gpt=emoji-lm,openai/image=emoji-xl"
    with opened(settings_of(redis_server.url, folder, model_aliases=aliases), CARD) as (api, worker):
        worker.registry.announce(
            WorkerCard("worker-2", "here", 1, "ready", "", 1.0, [TEXT, replace(TEXT, name="org/lm")]), 600
        )
        names = {"emoji-xl", "emoji-lm", "org/lm", "openai/gpt", "openai/image"}
        listed = lambda: {item["id"]: item for item in api.models()}  # noqa: E731
        eventually(lambda: listed().keys() >= names)
        for name, item in listed().items():
            assert api.get(f"/v1/models/{name}").json().items() >= item.items()
        assert "latest_version" in api.get("/v1/models/openai/image").json()
        assert api.get("/v1/models/org/none").status_code == 404


def test_links_where_they_begin_with_https(redis_server: RedisServer, folder: Path) -> None:
    settings = settings_of(redis_server.url, folder, public_url="https://pictures.example/here")
    with opened(settings, CARD) as (api, worker), Easel(worker):
        for path in ("/v1/predictions", "/v1/models/any/emoji-xl/predictions"):
            answer = predict(api, path, {"Prefer": "wait"})
            id = answer.json()["id"]
            assert answer.status_code == 201
            assert answer.json()["output"] == [f"https://pictures.example/here/v1/jobs/{id}/images/0"]
        assert predict(api).json()["output"][0].startswith("data:")


def test_the_health_check(redis_server: RedisServer, folder: Path) -> None:
    with opened(settings_of(redis_server.url, folder)) as (api, worker):
        for name in worker.redis.keys("diptych:worker*"):
            worker.redis.delete(name)
        status = lambda: api.get("/health-check").json()["status"]  # noqa: E731
        eventually(lambda: status() == "STARTING")
        worker.announce()
        eventually(lambda: status() == "READY")


def test_the_schemas_that_cogs_clients_read(shared: Api) -> None:
    schemas = shared.get("/openapi.json").json()["components"]["schemas"]
    properties = schemas["Input"]["properties"]
    assert all("type" in schema and "title" in schema for schema in properties.values())
    assert [schema["x-order"] for schema in properties.values()] == list(range(len(properties)))
    assert schemas["Output"]["items"] == {"type": "string", "format": "uri"}


def test_without_the_setting_there_are_none(redis_server: RedisServer, folder: Path) -> None:
    with opened(settings_of(redis_server.url, folder, predictions=False), CARD) as (api, _):
        assert predict(api).status_code == predict(api, "/v1/predictions").status_code == 404
        document = api.get("/openapi.json").json()
        assert not any("predictions" in path for path in document["paths"])
        assert "Input" not in document["components"]["schemas"]
