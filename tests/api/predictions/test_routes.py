"""Cog's API: predictions that wait or do not, ids of the client's, cancelling; errors and the health check."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
from PIL import Image

from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.world import CARD, Api, Worker, eventually, opened, settings_of

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
    answer = predict(shared, path)
    assert answer.status_code == 200, answer.text
    prediction = answer.json()
    assert (prediction["status"], prediction["error"]) == ("succeeded", None)
    assert [image(url).size for url in prediction["output"]] == [(64, 64)]
    assert prediction == shared.client.get(f"/predictions/{prediction['id']}").json()
    assert prediction["urls"]["get"] == f"{shared.url}/predictions/{prediction['id']}"


def test_it_does_not_wait(shared: Api, worker: Worker) -> None:
    answer = predict(shared, headers=ASYNC)
    assert (answer.status_code, answer.json()["status"]) == (202, "starting")
    id = answer.json()["id"]
    worker.work(id)
    assert shared.client.get(f"/predictions/{id}").json()["status"] == "succeeded"


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


def test_what_ends_without_pictures(shared: Api, worker: Worker) -> None:
    """An answer that waited is a 200 all the same: the status says it."""
    with ThreadPoolExecutor() as pool:
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
    ],
)
def test_an_error_is_a_problem_that_names_the_field(shared: Api, body: dict[str, Any], param: str) -> None:
    answer = predict(shared, **body)
    problem = answer.json()
    assert answer.status_code == problem["status"] == (404 if param == "version" else 422)
    assert problem["error"]["param"] == param and problem["detail"] == problem["error"]["message"]
    assert problem["detail"].startswith(f"{param}: ")


def test_texts_are_no_predictions(shared: Api) -> None:
    assert shared.client.get("/predictions/none").json()["status"] == 404
    assert shared.client.post("/v1/predictions/none/cancel").json()["title"] == "Not found"


def test_links_where_they_begin_with_https(redis_server: RedisServer, tmp_path: Any) -> None:
    settings = settings_of(redis_server.url, tmp_path, public_url="https://pictures.example/here")
    with opened(settings, CARD) as (api, worker), Easel(worker):
        for path in ("/v1/predictions", "/v1/models/any/emoji-xl/predictions"):
            answer = predict(api, path, {"Prefer": "wait"})
            id = answer.json()["id"]
            assert answer.status_code == 201
            assert answer.json()["output"] == [f"https://pictures.example/here/v1/jobs/{id}/images/0"]
        assert predict(api).json()["output"][0].startswith("data:")


def test_the_health_check(redis_server: RedisServer, tmp_path: Any) -> None:
    with opened(settings_of(redis_server.url, tmp_path)) as (api, worker):
        for name in worker.redis.keys("diptych:worker*"):
            worker.redis.delete(name)
        status = lambda: api.client.get("/health-check").json()["status"]  # noqa: E731
        eventually(lambda: status() == "STARTING")
        worker.announce()
        eventually(lambda: status() == "READY")


def test_the_schemas_that_cogs_clients_read(shared: Api) -> None:
    schemas = shared.client.get("/openapi.json").json()["components"]["schemas"]
    properties = schemas["Input"]["properties"]
    assert all("type" in schema and "title" in schema for schema in properties.values())
    assert [schema["x-order"] for schema in properties.values()] == list(range(len(properties)))
    assert schemas["Output"]["items"] == {"type": "string", "format": "uri"}


def test_without_the_setting_there_are_none(redis_server: RedisServer, tmp_path: Any) -> None:
    with opened(settings_of(redis_server.url, tmp_path, predictions=False), CARD) as (api, _):
        assert predict(api).status_code == predict(api, "/v1/predictions").status_code == 404
        document = api.client.get("/openapi.json").json()
        assert not any("predictions" in path for path in document["paths"])
        assert "Input" not in document["components"]["schemas"]
