"""Replicate's own Python client, unmodified: run, poll, wait, stream, cancel, files, pages, models and webhooks."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.jobs.test_webhooks import Receiver
from tests.api.pictures.test_edits import as_file, handed_on, pixels
from tests.api.world import PATIENCE_S, Api, Worker, client_of, eventually

replicate = pytest.importorskip("replicate", reason="pip install replicate")

MODEL = "diptych/emoji-xl"
INPUT: dict[str, Any] = {"prompt": "a cat", "width": 64, "height": 64, "num_inference_steps": 4, "seed": 7}


@pytest.fixture
def client(api: Api) -> Iterator[Any]:
    client = replicate.Client(api_token="none", base_url=api.url, timeout=PATIENCE_S)
    client.poll_interval = 0.01
    yield client
    client._client.close()


def predict(client: Any, **options: Any) -> Any:
    return client.predictions.create(version=MODEL, input=INPUT, **options)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("ref", [MODEL, "anyone/emoji-xl", f"{MODEL}:emoji-xl"])
@pytest.mark.parametrize("wait", [True, 5, False])
def test_run(client: Any, easel: Easel, ref: str, wait: bool | int) -> None:
    output = client.run(ref, input={**INPUT, "num_outputs": 2}, wait=wait)
    assert [opened(file.read()).size for file in output] == [(64, 64)] * 2
    parameters = easel.seen[-1].parameters
    assert parameters.items() >= {"prompt": "a cat", "steps": 4, "seed": 7, "n": 2, "width": 64}.items()


def test_run_without_blocking(api: Api, easel: Easel) -> None:
    async def run() -> bytes:
        client = replicate.Client(api_token="none", base_url=api.url, timeout=PATIENCE_S)
        async with client._async_client:
            (file,) = await client.async_run(MODEL, input=INPUT)
            data: bytes = await file.aread()
            return data

    assert opened(asyncio.run(run())).size == (64, 64)


def test_every_name_of_theirs_reaches_the_job(client: Any, easel: Easel) -> None:
    names = {
        "negative_prompt": "fog", "guidance_scale": 3.5, "scheduler": "KarrasDPM", "output_format": "jpg",
        "output_quality": 80, "disable_safety_checker": True, "apply_watermark": False, "refine": "no_refiner",
        "high_noise_frac": 0.8, "prompt_strength": 0.8, "go_fast": True, "lora_scale": 0.6, "deepcache": "off",
    }  # fmt: skip
    client.run(MODEL, input=INPUT | names)
    expected = {
        "negative_prompt": "fog", "guidance_scale": 3.5, "scheduler": "dpm++2m", "schedule_type": "karras",
        "output_format": "jpeg", "output_compression": 80, "deepcache": "off",
    }  # fmt: skip
    assert easel.seen[-1].parameters.items() >= expected.items()


@pytest.mark.parametrize("encoding", ["base64", "url"])
def test_a_picture_and_its_mask(client: Any, easel: Easel, worker: Worker, encoding: str) -> None:
    """As data URLs, and as files that the client uploads; white in the mask is drawn anew."""
    array, white = pixels(), np.zeros((128, 128, 3), np.uint8)
    white[:64] = 255
    pictures = {"image": io.BytesIO(as_file(array)), "mask": io.BytesIO(as_file(white))}
    client.predictions.create(
        version=MODEL, input={"prompt": "a hat", "prompt_strength": 0.5, **pictures}, file_encoding_strategy=encoding
    ).wait()
    claim = easel.seen[-1]
    image, mask = handed_on(worker, claim)
    assert claim.parameters["edit"]["strength"] == 0.5 and np.array_equal(image, array)
    assert mask is not None and (mask[:64] == 255).all() and (mask[64:] == 0).all()


def test_a_prediction_from_its_start_to_its_end(client: Any, worker: Worker) -> None:
    prediction = client.predictions.create(version="emoji-xl", input=INPUT)
    assert (prediction.status, prediction.output, prediction.model) == ("starting", None, MODEL)
    claim = worker.take(prediction.id)
    prediction.reload()
    assert prediction.status == "starting"
    worker.report(claim, 3)
    prediction.reload()
    assert prediction.status == "processing" and prediction.logs.startswith("Using seed: 7\n")
    assert (prediction.progress.current, prediction.progress.total, prediction.progress.percentage) == (3, 4, 0.75)
    worker.finish(claim)
    prediction.wait()
    assert (prediction.status, prediction.error, len(prediction.output)) == ("succeeded", None, 1)
    assert prediction.output[0].startswith("data:image/png;base64,") and prediction.progress.percentage == 1.0
    assert prediction.metrics["predict_time"] >= 0 and prediction.completed_at >= prediction.started_at


def test_a_wait_that_is_too_short_is_polled_on(client: Any, easel: Easel) -> None:
    """The client takes anything but `starting` for the end."""
    easel.step_s = 0.4
    assert len(client.run(MODEL, input=INPUT, wait=1)) == 1


def test_an_input_that_was_answered_is_an_input(client: Any, easel: Easel) -> None:
    first = client.predictions.create(version=MODEL, input={**INPUT, "output_format": "webp", "num_outputs": 2})
    second = client.predictions.create(version=MODEL, input=first.input)
    first.wait(), second.wait()
    assert easel.seen[-1].parameters == easel.seen[-2].parameters and second.input == first.input


def test_cancel(client: Any, worker: Worker) -> None:
    waiting, running = (predict(client) for _ in range(2))
    worker.take(running.id)
    for prediction in (waiting, running):
        prediction.cancel()
        assert prediction.status == "canceled" and worker.is_(prediction.id, JobState.CANCELLED)
    assert client.predictions.cancel(waiting.id).status == "canceled"


def test_a_failure_is_raised(client: Any, easel: Easel) -> None:
    easel.failing = True
    with pytest.raises(replicate.exceptions.ModelError, match="the engine failed at this job"):
        client.run(MODEL, input=INPUT)


def test_stream(client: Any, easel: Easel) -> None:
    easel.step_s = 0.05
    events = list(client.stream(MODEL, input={**INPUT, "num_outputs": 2}))
    kinds = [event.event.value for event in events]
    assert kinds[-3:] == ["output", "output", "done"] and set(kinds[:-3]) == {"logs"}
    assert opened(client._client.get(str(events[-2].data)).content).size == (64, 64)


def test_pages(client: Any, worker: Worker) -> None:
    for _ in range(3):
        predict(client)
    made = [prediction.id for page in replicate.pagination.paginate(client.predictions.list) for prediction in page]
    assert len(made) == len(set(made)) >= 3 and client.predictions.get(made[0]).input["prompt"] == "a cat"


def test_a_model_and_its_version(client: Any) -> None:
    model = client.models.get(MODEL)
    assert (model.owner, model.name, model.latest_version.id) == ("diptych", "emoji-xl", "emoji-xl")
    assert [version.id for version in model.versions.list()] == ["emoji-xl"]
    properties = model.versions.get("emoji-xl").openapi_schema["components"]["schemas"]["Input"]["properties"]
    assert properties["scheduler"]["enum"] == ["euler", "dpm++2m"] and properties["prompt"]["type"] == "string"
    assert client.accounts.current().username == "diptych"


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"num_inference_steps": 0}, "input.num_inference_steps: must be"),
        ({"width": 65}, "input.width: "),
        ({"scheduler": "PNDM"}, "input.scheduler: must be one of euler, dpm"),
        ({"image": "http://a.example/a.png"}, "input.image: "),
        ({"image": 5}, "input.image: must be the URL"),
        ({"nonsense": 5}, "input.nonsense: is not known"),
        ({"refine": "expert_ensemble_refiner"}, "input.refine: "),
        ({"prompt": None}, "input.prompt: must be given"),
    ],
)
def test_a_refusal_names_the_field_of_the_input(client: Any, fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(replicate.exceptions.ReplicateError) as caught:
        client.run(MODEL, input={**INPUT, **fields})
    assert caught.value.status == 422 and caught.value.detail.startswith(detail), caught.value


def test_models_are_listed_beside_openais_list(client: Any, api: Api) -> None:
    (listed,) = client.models.list().results
    assert (listed.owner, listed.name, listed.latest_version) == ("diptych", "emoji-xl", None)
    assert client.models.get(f"{listed.owner}/{listed.name}").latest_version.id == "emoji-xl"
    with client_of(api.url) as other:
        assert [model.id for model in other.models.list()] == ["emoji-xl"]


def test_a_version_of_another_service_is_told_what_a_version_is(client: Any) -> None:
    with pytest.raises(replicate.exceptions.ReplicateError, match="DIPTYCH_MODEL_ALIASES") as caught:
        client.run(f"stability-ai/sdxl:{'39ed52f2' * 8}", input=INPUT)
    assert caught.value.status == 404


def test_unknown_models_and_predictions(client: Any) -> None:
    for call in (
        lambda: client.run("diptych/none", input=INPUT),
        lambda: client.models.get("diptych/none"),
        lambda: client.run(f"{MODEL}:0123", input=INPUT),
        lambda: client.predictions.get("none"),
    ):
        with pytest.raises(replicate.exceptions.ReplicateError) as caught:
            call()
        assert caught.value.status == 404 and caught.value.detail


def heard(receiver: Receiver, client: Any) -> list[dict[str, Any]]:
    """The messages, each of which the client finds to be signed."""
    secret = client.webhooks.default.secret()
    for _, headers, body in receiver.heard:
        replicate.webhook.Webhooks.validate(headers=headers, body=body.decode(), secret=secret)
    assert len({headers["webhook-id"] for _, headers, _ in receiver.heard}) == len(receiver.heard)
    return [json.loads(body) for _, _, body in receiver.heard]


def test_a_webhook_is_told_of_start_logs_and_end(client: Any, worker: Worker) -> None:
    with Receiver() as receiver:
        prediction = predict(client, webhook=f"{receiver.url}/hook")
        claim = worker.take(prediction.id)
        eventually(lambda: len(receiver.heard) == 1)
        worker.report(claim, 2)
        eventually(lambda: len(receiver.heard) == 2)
        worker.finish(claim)
        eventually(lambda: len(receiver.heard) == 3)
        messages = heard(receiver, client)
    assert [message["status"] for message in messages] == ["starting", "processing", "succeeded"]
    assert " 2/4\n" in messages[1]["logs"] and messages[2]["output"][0].startswith("http")
    assert messages[2] == client._client.get("/v1/predictions").json()["results"][0]


@pytest.mark.parametrize(
    ("events", "statuses"),
    [
        (["start"], ["starting"]),
        (["logs"], ["processing"]),
        (["output"], ["succeeded"]),
        (["completed"], ["succeeded"]),
        (["start", "output", "completed"], ["starting", "succeeded"]),
    ],
)
def test_a_filter_selects_its_events(client: Any, worker: Worker, events: list[str], statuses: list[str]) -> None:
    with Receiver() as receiver, Receiver() as other:
        prediction = predict(client, webhook=receiver.url, webhook_events_filter=events)
        claim = worker.take(prediction.id)
        worker.report(claim, 2) if "logs" in events else None
        early = len(statuses) - any(status == "succeeded" for status in statuses)
        eventually(lambda: len(receiver.heard) == early)
        worker.finish(claim)
        # One that ends later is told of later: then nothing of the first is to come.
        last = predict(client, webhook_completed=other.url)
        worker.work(last.id)
        eventually(lambda: other.heard and not worker.redis.keys("diptych:webhook*"))
        assert [message["status"] for message in heard(receiver, client)] == statuses


def test_a_start_that_is_not_heard_costs_the_end_nothing(client: Any, worker: Worker) -> None:
    """It is not repeated, and neither is its failure counted."""
    with Receiver(500) as receiver:
        prediction = predict(client, webhook=receiver.url, webhook_events_filter=["start", "completed"])
        claim = worker.take(prediction.id)
        eventually(lambda: receiver.heard)
        worker.finish(claim)
        eventually(lambda: len(receiver.heard) == 2 and not worker.redis.keys("diptych:webhook*"))
        assert [json.loads(body)["status"] for _, _, body in receiver.heard] == ["starting", "succeeded"]
