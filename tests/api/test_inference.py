"""huggingface_hub's InferenceClient, unmodified, against a running API: pictures, parameters, errors and keys."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from api.body import MAX_BYTES
from core.jobs.keyring import Keyring
from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.test_edits import as_file, handed_on, hole, pixels
from tests.api.test_picture_decoder import service_of
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually, opened, settings_of


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite keeps huggingface_hub offline; here it calls this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def picture(side: int = 40, noisy: bool = False) -> bytes:
    stream = io.BytesIO()
    image = Image.effect_noise((side, side), 90).convert("RGB") if noisy else Image.new("RGB", (side, side), "red")
    image.save(stream, "PNG")
    return stream.getvalue()


def addresses(api: Api) -> list[dict[str, str]]:
    """What the client takes for an address: it posts to that very one."""
    named = f"{api.url}/v1/models/emoji-xl"
    return [{"base_url": api.url}, {"base_url": f"{api.url}/v1"}, {"model": f"{api.url}/"}, {"model": named}]


@pytest.mark.parametrize("number", range(4))
def test_text_to_image(shared: Api, easel: Easel, number: int) -> None:
    client = InferenceClient(**addresses(shared)[number], timeout=PATIENCE_S)  # type: ignore[arg-type]
    made = client.text_to_image("a cat", seed=number)
    assert made.format == "PNG" and made.size == (128, 128)
    assert easel.seen[-1].parameters["prompt"] == "a cat" and easel.seen[-1].model == "emoji-xl"


def test_every_parameter_reaches_the_job(shared: Api, easel: Easel) -> None:
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    made = client.text_to_image(
        "a cat", negative_prompt="a dog", height=64, width=64, num_inference_steps=3, guidance_scale=2.5,
        scheduler="dpm++2m", seed=7, extra_body={"deterministic": True, "deepcache": "off", "priority": 1},
    )  # fmt: skip
    assert made.size == (64, 64)
    given = easel.seen[-1].parameters
    expected = {
        "prompt": "a cat", "negative_prompt": "a dog", "height": 64, "width": 64, "steps": 3, "guidance_scale": 2.5,
        "scheduler": "dpm++2m", "seed": 7, "n": 1, "deterministic": True, "deepcache": "off",
    }  # fmt: skip
    assert given == {**given, **expected} and easel.seen[-1].priority == 1


def test_it_is_what_openais_endpoint_makes(shared: Api, easel: Easel) -> None:
    made = InferenceClient(base_url=shared.url, timeout=PATIENCE_S).text_to_image(
        "a cat", seed=9, num_inference_steps=2
    )
    other = shared.draw(prompt="a cat", seed=9, steps=2).json()["data"][0]["b64_json"]
    assert made.tobytes() == Image.open(io.BytesIO(base64.b64decode(other))).tobytes()
    assert easel.seen[-1].parameters == easel.seen[-2].parameters


@pytest.mark.parametrize("named", [False, True])
def test_image_to_image(shared: Api, easel: Easel, named: bool) -> None:
    client = InferenceClient(**addresses(shared)[3 if named else 0], timeout=PATIENCE_S)  # type: ignore[arg-type]
    made = client.image_to_image(
        picture(), prompt="a hat", negative_prompt="a dog", num_inference_steps=4, guidance_scale=3.0, strength=0.5,
        seed=3, target_size={"width": 64, "height": 64},
    )  # type: ignore[arg-type] # fmt: skip
    assert made.size == (64, 64)
    given = easel.seen[-1].parameters
    expected = {
        "prompt": "a hat",
        "negative_prompt": "a dog",
        "steps": 4,
        "guidance_scale": 3.0,
        "seed": 3,
        "width": 64,
    }
    assert given == {**given, **expected} and given["edit"]["strength"] == 0.5
    begun = Image.open(io.BytesIO(easel.worker.artifacts.get(given["edit"]["image"])))
    assert begun.size == (64, 64) and begun.getpixel((5, 5)) == (255, 0, 0)


def test_a_picture_with_transparent_pixels_is_changed_as_a_whole(shared: Api, easel: Easel) -> None:
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    client.image_to_image(as_file(hole()), prompt="a hat", num_inference_steps=2)
    assert easel.seen[-1].parameters["edit"].keys() == {"image", "strength"}
    assert easel.seen[-1].parameters["edit"]["strength"] == 0.8


def test_a_picture_of_more_than_other_bodies_may_have(shared: Api, easel: Easel) -> None:
    data = picture(900, noisy=True)
    assert len(data) > 2**20
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    assert client.image_to_image(data, prompt="a hat", num_inference_steps=2).size == (128, 128)


def refusal(call: Any) -> tuple[int, str]:
    """The status, and what the client tells people."""
    with pytest.raises(HfHubHTTPError) as refused:
        call()
    return refused.value.response.status_code, str(refused.value)


def test_a_large_body_is_its_picture_and_little_else(shared: Api, easel: Easel) -> None:
    """Its picture is kept apart: no other thread runs while a JSON parser reads twenty megabytes."""
    array = pixels(700, 700)
    text = json.dumps({"inputs": base64.b64encode(as_file(array)).decode(), "parameters": {"prompt": "x"}})
    assert len(text) > MAX_BYTES
    headers = {"Content-Type": "application/json"}
    lines = json.dumps(base64.encodebytes(as_file(array)).decode())[1:-1]
    folded = text.replace(base64.b64encode(as_file(array)).decode(), lines)
    for raw in (
        text,
        folded,
        folded.replace("\\n", "\\r\\n"),
        text.replace("/", "\\/"),
        text.replace('"inputs": ', '"inputs" :\n'),
    ):
        answer = shared.client.post("/", content=raw, headers=headers)
        assert answer.status_code == 200, answer.text
        image, _ = handed_on(easel.worker, easel.seen[-1])
        assert np.array_equal(image, np.asarray(Image.fromarray(array).resize((128, 128), Image.Resampling.LANCZOS)))
    for raw, status, param in (
        (text.replace('"prompt": "x"', '"prompt": null'), 400, "parameters.prompt"),
        (json.dumps({"inputs": "word " * 300_000}), 413, None),
        (json.dumps({"inputs": "A" * 2**21}), 400, "parameters.prompt"),
        (json.dumps({"inputs": "x", "parameters": {"prompt": "word " * 300_000}}), 413, None),
        (json.dumps({"inputs": "x", "parameters": {"inputs": "y", "prompt": "word " * 300_000}}), 413, None),
        (json.dumps({"parameters": {"inputs": "A" * 2**21, "prompt": "x"}, "inputs": "x"}), 400, None),
        (text.replace("iVBOR", "iV=OR"), 400, "inputs"),
        (text.replace("A", "é", 1), 413, None),  # which no encoder writes
    ):
        answer = shared.client.post("/", content=raw.encode(), headers=headers)
        assert (answer.status_code, answer.json()["param"]) == (status, param or answer.json()["param"]), answer.text


def test_what_is_refused_is_told_in_the_clients_words(shared: Api) -> None:
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    draw, edit = client.text_to_image, client.image_to_image
    told: list[tuple[Any, str]] = [
        (lambda: draw(""), "inputs: must not be empty"),
        (
            lambda: draw("a", num_inference_steps=5000),
            "parameters.num_inference_steps: must be between 1 and 1000, not",
        ),
        (lambda: draw("a", num_inference_steps=0), "parameters.num_inference_steps: must be at least 1"),
        (lambda: draw("a", height=64), "parameters.width: must be given too"),
        (lambda: draw("a", height=65, width=65), "parameters.width: is not offered; offered: "),
        (lambda: draw("a", height=1.5, width=64), "parameters.height: must be a whole number"),  # type: ignore[arg-type]
        (lambda: draw("a", scheduler="none"), "parameters.scheduler: must be one of euler, dpm++2m"),
        (lambda: draw("a", seed=-2), "parameters.seed: must be between 0 and 9223372036854775807, not -2"),
        (lambda: draw("a", extra_body={"n": 2}), "parameters.n: is not known"),
        (lambda: draw("a", extra_body={"target_size": 5}), "parameters.target_size: must be an object"),
        (lambda: draw("a", extra_body={"width": {}, "height": {}}), "parameters.width: must be a whole number"),
        (lambda: draw("a", extra_body={"cfg_scale": 1000}), "parameters.cfg_scale: must be between 0 and 100"),
        (lambda: draw("a", extra_body={"refiner": {"model": "x"}}), "parameters.refiner.model: "),
        (lambda: edit(picture()), "parameters.prompt: must say what"),
        (lambda: edit(picture(), guidance_scale=2.0), "parameters.prompt: must say what"),
        (lambda: edit(b"no picture", prompt="a"), "inputs: must be a PNG, JPEG or WebP image"),
        (lambda: edit(picture(), prompt=" "), "parameters.prompt: must not be empty"),
        (lambda: edit(picture(), prompt="a", strength=2.0), "parameters.strength: must be between 0 and 1, not 2"),
        (lambda: draw("a", extra_body={"prompt": "b"}), "inputs: must be a PNG, JPEG or WebP image in base64, since"),
    ]
    for call, words in told:
        status, message = refusal(call)
        assert status == 400 and words in message, (words, message)
        assert "Request ID: req_" in message and "{" not in message, message
    status, message = refusal(lambda: InferenceClient(f"{shared.url}/v1/models/none").text_to_image("a"))
    assert status == 404 and "model: is not known" in message
    for body, code in (
        ({}, "missing_required_parameter"), ({"inputs": "a", "more": 1}, "unknown_parameter"),
        ({"inputs": {"picture": 0}}, "invalid_value"), ({"inputs": 5}, "invalid_type"),
    ):  # fmt: skip
        assert shared.post("/", **body).json()["code"] == code
    assert shared.client.post("/", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert shared.client.post("/", content=b"a", headers={"content-type": "text/plain"}).status_code == 415


@pytest.mark.parametrize("accept", ["image/png", "image/webp", "image/jpeg", "*/*", "text/html"])
def test_the_format_is_the_one_that_is_accepted(shared: Api, worker: Worker, accept: str) -> None:
    """The easel draws PNG only: the job says what it was asked for."""
    before = worker.ids()
    with Easel(worker) as easel:
        answer = shared.client.post("/", json={"inputs": "a cat"}, headers={"Accept": accept})
        assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
        (id,) = worker.ids() - before
        asked = next(claim for claim in easel.seen if claim.id == id).parameters.get("output_format", "png")
    assert asked == (accept.removeprefix("image/") if accept in ("image/webp", "image/jpeg") else "png")


def test_a_job_that_fails_and_one_whose_client_leaves(shared: Api, easel: Easel) -> None:
    easel.failing = True
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    status, message = refusal(lambda: client.text_to_image("a cat"))
    assert status == 500 and "the engine failed at this job" in message
    easel.go.clear()
    before = easel.worker.ids()
    with pytest.raises(TimeoutError):
        InferenceClient(base_url=shared.url, timeout=0.5).text_to_image("a cat")
    (id,) = easel.worker.ids() - before
    eventually(lambda: easel.worker.is_(id, JobState.CANCELLED))


def test_chats_were_there_already(shared: Api) -> None:
    """Its chat completions go to OpenAI's endpoint below the same address; with no text model they say so."""
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    status, message = refusal(lambda: client.chat_completion([{"role": "user", "content": "a"}], model="emoji-xl"))
    assert status == 400 and "emoji-xl is an image model; use POST /v1/images/generations" in message
    check_error(shared.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}]), 503, code="no_model")


@pytest.mark.parametrize("padding", [0, MAX_BYTES // 2])
def test_a_prompt_waits_for_no_picture(shared: Api, easel: Easel, padding: int) -> None:
    """Though the same key's picture is being decoded."""
    service, held, go = service_of(shared), threading.Event(), threading.Event()

    async def hold() -> None:
        async with service.pictures._turns.turn("", 1):
            held.set()
            while not go.is_set():
                await asyncio.sleep(0.01)

    holds = service.submit(hold())
    try:
        assert held.wait(PATIENCE_S)
        content = json.dumps({"inputs": "a cat"}).encode() + b" " * padding
        answer = shared.client.post("/", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
    finally:
        go.set()
    holds.result(PATIENCE_S)


TASKS: list[tuple[str, tuple[Any, ...]]] = [
    ("text_generation", ("a",)), ("feature_extraction", ("a",)), ("summarization", ("a",)), ("fill_mask", ("a",)),
    ("text_to_speech", ("a",)), ("image_classification", (picture(),)), ("image_to_text", (picture(),)),
    ("question_answering", ("a", "b")), ("zero_shot_classification", ("a", ["b"])),
    ("visual_question_answering", (picture(), "a")),
]  # fmt: skip


@pytest.mark.parametrize(("task", "arguments"), TASKS, ids=lambda value: value if isinstance(value, str) else "")
def test_tasks_without_pictures_are_refused(shared: Api, easel: Easel, task: str, arguments: tuple[Any, ...]) -> None:
    """The client sends them all to one address; nothing is drawn for them."""
    before = len(easel.seen)
    client = InferenceClient(base_url=shared.url, timeout=PATIENCE_S)
    status, message = refusal(lambda: getattr(client, task)(*arguments))
    assert status == 400 and "text_to_image" in message and "/v1/chat/completions" in message
    assert len(easel.seen) == before


@pytest.mark.parametrize("accept", ["application/json", "Application/JSON; charset=utf-8, text/plain"])
def test_who_accepts_json_alone_is_answered_with_it(shared: Api, easel: Easel, accept: str) -> None:
    fields = {"inputs": "a cat", "parameters": {"seed": 3, "num_inference_steps": 2, "width": 64, "height": 64}}
    answer = shared.client.post("/", json=fields, headers={"accept": accept})
    (image,) = answer.json()["data"]
    assert answer.headers["content-type"] == "application/json" and image["seed"] == 3
    assert Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))).size == (64, 64)
    for others in ("*/*", "application/json, text/plain, */*"):  # as curl and axios ask
        drawn = shared.client.post("/", json=fields, headers={"accept": others})
        assert drawn.headers["content-type"] == "image/png" and drawn.content == base64.b64decode(image["b64_json"])


def test_keys_hold(redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    keyring = Keyring.of(settings)
    drawing, writing = (keyring.add(name, [name])[1] for name in ("images", "text"))
    keyring.close()
    with opened(settings) as (api, worker), Easel(worker):
        worker.announce()
        eventually(lambda: api.client.get("/readyz").status_code == 200)
        client = InferenceClient(base_url=api.url, api_key=drawing, timeout=PATIENCE_S)
        assert client.text_to_image("a cat", num_inference_steps=2).size == (128, 128)
        status, message = refusal(lambda: InferenceClient(base_url=api.url, api_key=writing).text_to_image("a cat"))
        assert status == 403 and "lacks the scope images" in message
        for key in ("dpt_none", "hf_none"):
            status, message = refusal(lambda key=key: InferenceClient(base_url=api.url, api_key=key).text_to_image("a"))
            assert status == 401 and "This key is not known" in message
        assert api.client.post("/", json={"inputs": "a"}).status_code == 401
        assert len(worker.ids()) == 1
