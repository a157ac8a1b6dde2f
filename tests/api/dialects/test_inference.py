"""huggingface_hub's InferenceClient, unmodified, against a running API: pictures, parameters, errors and keys."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from api.http.body import MAX_BYTES
from core.config import Settings
from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.pictures.test_decoder import service_of
from tests.api.pictures.test_edits import PNG, as_file, handed_on, pixels
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually, token_of


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite keeps huggingface_hub offline; here it calls this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def hub(shared: Api, **options: Any) -> InferenceClient:
    """The client, of the root unless an address is given."""
    return InferenceClient(**{"base_url": shared.url, "timeout": PATIENCE_S, **options})


@pytest.mark.parametrize(
    ("option", "path"), [("base_url", ""), ("base_url", "/v1"), ("model", "/"), ("model", "/v1/models/emoji-xl")]
)
def test_text_to_image(shared: Api, easel: Easel, option: str, path: str) -> None:
    """What the client takes for an address it posts to."""
    client = InferenceClient(**{option: shared.url + path}, timeout=PATIENCE_S)  # type: ignore[arg-type]
    made = client.text_to_image("a cat", seed=1)
    assert made.format == "PNG" and made.size == (128, 128)
    assert easel.last["prompt"] == "a cat" and easel.seen[-1].model == "emoji-xl"


def test_every_parameter_reaches_the_job(shared: Api, easel: Easel) -> None:
    made = hub(shared).text_to_image(
        "a cat", negative_prompt="a dog", height=64, width=64, num_inference_steps=3, guidance_scale=2.5,
        scheduler="dpm++2m", seed=7, extra_body={"deterministic": True, "deepcache": "off", "priority": 1},
    )  # fmt: skip
    assert made.size == (64, 64)
    given = easel.last
    expected = {
        "prompt": "a cat", "negative_prompt": "a dog", "height": 64, "width": 64, "steps": 3, "guidance_scale": 2.5,
        "scheduler": "dpm++2m", "seed": 7, "n": 1, "deterministic": True, "deepcache": "off",
    }  # fmt: skip
    assert given == {**given, **expected} and easel.seen[-1].priority == 1


def test_image_to_image(shared: Api, easel: Easel) -> None:
    """Of a picture of more than other bodies may have."""
    array = pixels(700, 700)
    made = hub(shared, base_url=f"{shared.url}/v1").image_to_image(
        as_file(array), prompt="a hat", negative_prompt="a dog", num_inference_steps=4, guidance_scale=3.0,
        strength=0.5, seed=3, target_size={"width": 64, "height": 64},
    )  # type: ignore[arg-type] # fmt: skip
    assert made.size == (64, 64)
    given = easel.last
    assert given.items() >= {"prompt": "a hat", "negative_prompt": "a dog", "steps": 4, "seed": 3, "width": 64}.items()
    assert given["guidance_scale"] == 3.0 and given["edit"]["strength"] == 0.5
    image, _ = handed_on(easel.worker, easel.seen[-1])
    assert np.array_equal(image, np.asarray(Image.fromarray(array).resize((64, 64), Image.Resampling.LANCZOS)))


def test_a_picture_with_transparent_pixels_is_changed_as_a_whole(shared: Api, easel: Easel) -> None:
    small = as_file(np.zeros((40, 40, 4), np.uint8))
    hub(shared).image_to_image(small, prompt="a hat", num_inference_steps=2)
    assert easel.last["edit"].keys() == {"image", "strength"}
    assert easel.last["edit"]["strength"] == 0.8


def refusal(call: Any) -> tuple[int, str]:
    """The status, and what the client tells people."""
    with pytest.raises(HfHubHTTPError) as refused:
        call()
    return refused.value.response.status_code, str(refused.value)


def test_a_large_body_is_its_picture_and_little_else(shared: Api, easel: Easel) -> None:
    """Its picture is kept apart: no other thread runs while a JSON parser reads twenty megabytes."""
    picture = as_file(pixels(700, 700))
    text = json.dumps({"inputs": base64.b64encode(picture).decode(), "parameters": {"prompt": "x"}})
    folded = json.dumps({"inputs": base64.encodebytes(picture).decode(), "parameters": {"prompt": "x"}})
    for raw, status, param in (
        (folded, 200, None),
        (text.replace('"prompt": "x"', '"prompt": null'), 400, "parameters.prompt"),
        (json.dumps({"inputs": "word " * 300_000}), 413, None),
        (json.dumps({"inputs": "A" * 2**21}), 400, "parameters.prompt"),
        (json.dumps({"parameters": {"inputs": "A" * 2**21, "prompt": "x"}, "inputs": "x"}), 400, None),
        (text.replace("iVBOR", "iV=OR"), 400, "inputs"),
        (text.replace("A", "é", 1), 413, None),  # which no encoder writes
    ):
        answer = shared.client.post("/", content=raw.encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        assert param is None or answer.json()["param"] == param


def test_what_is_refused_is_told_in_the_clients_words(shared: Api) -> None:
    draw, edit = hub(shared).text_to_image, hub(shared).image_to_image
    told: list[tuple[Any, str]] = [
        (lambda: draw(""), "inputs: must not be empty"),
        (lambda: draw("a", num_inference_steps=5000), "parameters.num_inference_steps: must be between 1 and 1000"),
        (lambda: draw("a", height=64), "parameters.width: must be given too"),
        (lambda: draw("a", height=65, width=65), "parameters.width: is not offered; offered: "),
        (lambda: draw("a", extra_body={"n": 2}), "parameters.n: is not known"),
        (lambda: draw("a", extra_body={"target_size": 5}), "parameters.target_size: must be an object"),
        (lambda: draw("a", extra_body={"cfg_scale": 1000}), "parameters.cfg_scale: must be between 0 and 100"),
        (lambda: draw("a", extra_body={"refiner": {"model": "x"}}), "parameters.refiner.model: "),
        (lambda: edit(PNG), "parameters.prompt: must say what"),
        (lambda: edit(PNG, guidance_scale=2.0), "parameters.prompt: must say what"),
        (lambda: edit(b"no picture", prompt="a"), "inputs: must be a PNG, JPEG or WebP image"),
        (lambda: edit(PNG, prompt="a", strength=2.0), "parameters.strength: must be between 0 and 1, not 2"),
        (lambda: draw("a", extra_body={"prompt": "b"}), "inputs: must be a PNG, JPEG or WebP image in base64, since"),
    ]
    for call, words in told:
        status, message = refusal(call)
        assert status == 400 and words in message, (words, message)
        assert "Request ID: req_" in message and "{" not in message, message
    status, message = refusal(lambda: InferenceClient(f"{shared.url}/v1/models/none").text_to_image("a"))
    assert status == 404 and "model: is not known" in message
    for body, code in (({}, "missing_required_parameter"), ({"inputs": {"picture": 0}}, "invalid_value")):
        assert shared.post("/", **body).json()["code"] == code
    assert shared.client.post("/", content=b"a", headers={"content-type": "text/plain"}).status_code == 415
    chat = {"messages": [{"role": "user", "content": "a"}]}  # of the same client, below the same address
    check_error(shared.post("/v1/chat/completions", **chat), 503, code="no_model")


@pytest.mark.parametrize(("accept", "asked"), [("image/webp", "webp"), ("image/jpeg", "jpeg"), ("text/html", "png")])
def test_the_format_is_the_one_that_is_accepted(shared: Api, easel: Easel, accept: str, asked: str) -> None:
    """The easel draws PNG only: the job says what it was asked for."""
    answer = shared.client.post("/", json={"inputs": "a cat"}, headers={"Accept": accept})
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
    assert easel.last.get("output_format", "png") == asked


def test_a_job_that_fails_and_one_whose_client_leaves(shared: Api, easel: Easel) -> None:
    easel.failing = True
    status, message = refusal(lambda: hub(shared).text_to_image("a cat"))
    assert status == 500 and "the engine failed at this job" in message
    easel.go.clear()
    before = easel.worker.ids()
    with pytest.raises(TimeoutError):
        hub(shared, timeout=0.5).text_to_image("a cat")
    (id,) = easel.worker.ids() - before
    eventually(lambda: easel.worker.is_(id, JobState.CANCELLED))


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


@pytest.mark.parametrize(
    ("task", "arguments"),
    [("text_generation", ("a",)), ("text_to_speech", ("a",)), ("image_to_text", (PNG,)),
     ("zero_shot_classification", ("a", ["b"])), ("visual_question_answering", (PNG, "a"))],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_tasks_without_pictures_are_refused(shared: Api, easel: Easel, task: str, arguments: tuple[Any, ...]) -> None:
    """The client sends them all to one address; nothing is drawn for them."""
    before = len(easel.seen)
    status, message = refusal(lambda: getattr(hub(shared), task)(*arguments))
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


def test_keys_hold(settings: Settings, alone: tuple[Api, Worker]) -> None:
    api, worker = alone
    drawing, writing = (token_of(settings, scopes=[scope]) for scope in ("images", "text"))
    with Easel(worker):
        assert hub(api, api_key=drawing).text_to_image("a cat", num_inference_steps=2).size == (128, 128)
        for key, expected, words in (
            (writing, 403, "lacks the scope images"), ("dpt_none", 401, "This key is not known"),
            ("hf_none", 401, "This key is not known"),
        ):  # fmt: skip
            client = hub(api, api_key=key)
            status, message = refusal(lambda client=client: client.text_to_image("a cat"))
            assert status == expected and words in message
        assert len(worker.ids()) == 1
