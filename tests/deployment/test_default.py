"""The default service over HTTP: emoji-xl in INT8 on our own kernels and emoji-lm, started as the README says."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from core.config import EMBEDDED_MODEL, EMBEDDED_TEXT_MODEL
from tests.core.quant.stage import CACHE, kernels
from tests.deployment.served import READY_S, Served, wait_until

SIDE = 128
DRAWN = {"prompt": "a slice of pizza", "response_format": "b64_json"}
SEEDED = {"seed": 7, "steps": 10}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`diptych serve` without a model, a precision or a word about kernels; compiled code is kept with the tests'."""
    kernels()  # skips where there are none, with the reason
    for folder in (EMBEDDED_MODEL, EMBEDDED_TEXT_MODEL):
        if not folder.is_dir():
            pytest.skip(f"models/{folder.name} is not here")
    unset = ("DIPTYCH_KERNELS", "DIPTYCH_COMPILE", "DIPTYCH_TEXT_MODEL")
    service = Served(
        tmp_path_factory.mktemp("served"), model=None, unset=unset, variables={"DIPTYCH_CACHE_DIR": str(CACHE.parent)}
    )
    try:
        service.ready()
        yield service
    finally:
        service.close()


@pytest.fixture(scope="module")
def client(service: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0, timeout=READY_S) as client:
        yield client


def opened(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    """A PNG's levels, [H, W, 3], and its fingerprint."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert image.format == "PNG" and image.size == (SIDE, SIDE)
        fingerprint = json.loads(image.text["fingerprint"])  # type: ignore[attr-defined]
        return np.asarray(image.convert("RGB")), fingerprint


def decoded(text: str | None) -> bytes:
    assert text
    return base64.b64decode(text)


def draw(client: OpenAI, **fields: Any) -> bytes:
    answer = client.images.generate(**DRAWN, extra_body={**SEEDED, **fields})  # type: ignore[arg-type]
    assert answer.data is not None
    return decoded(answer.data[0].b64_json)


def test_it_says_what_it_serves_and_in_which_precision(service: Served) -> None:
    found = {model["id"]: model["diptych"] for model in service.json("/v1/models")["data"]}
    assert found.keys() == {"emoji-xl", "emoji-lm"}
    assert (found["emoji-xl"]["precision"], found["emoji-xl"]["device"]) == ("int8", "cpu")
    assert "emoji-xl, int8 on cpu" in service.out


def test_pictures_are_drawn_by_our_kernels_and_equal_for_equal_seeds(client: OpenAI) -> None:
    first = draw(client)
    levels, fingerprint = opened(first)
    assert fingerprint["executable"] == "kernels" and fingerprint["precision"] == "int8"
    assert levels.std() > 20, "a flat picture"
    assert draw(client) == first
    other, _ = opened(draw(client, seed=8))
    assert not np.array_equal(other, levels)


def test_an_edit_keeps_what_its_mask_keeps(client: OpenAI) -> None:
    before = draw(client)
    levels, _ = opened(before)
    mask = np.full((SIDE, SIDE, 4), 255, np.uint8)
    mask[: SIDE // 2, :, 3] = 0  # transparent: the upper half is drawn anew
    stream = io.BytesIO()
    Image.fromarray(mask).save(stream, "PNG")
    answer = client.images.edit(
        image=("pizza.png", before), mask=("mask.png", stream.getvalue()), prompt="a red heart",
        response_format="b64_json", extra_body={**SEEDED, "strength": 0.9},
    )  # fmt: skip
    assert answer.data is not None
    edited, fingerprint = opened(decoded(answer.data[0].b64_json))
    assert fingerprint["executable"] == "kernels"
    assert np.array_equal(edited[SIDE // 2 :], levels[SIDE // 2 :])
    assert np.abs(edited[: SIDE // 2].astype(int) - levels[: SIDE // 2]).mean() > 5


def test_a_streamed_picture_is_the_one_that_is_waited_for(client: OpenAI) -> None:
    events = list(
        client.images.generate(**DRAWN, stream=True, partial_images=2, extra_body=SEEDED)  # type: ignore[call-overload]
    )
    assert [event.type for event in events[:-1]] == ["image_generation.partial_image"] * (len(events) - 1)
    assert len(events) > 1 and events[-1].type == "image_generation.completed"
    whole, _ = opened(decoded(events[-1].b64_json))
    waited_for, _ = opened(draw(client))
    assert np.array_equal(whole, waited_for)


def test_it_chats_at_once_and_as_a_stream(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "emoji-lm", "messages": [{"role": "user", "content": "a cat"}], "temperature": 0, "max_tokens": 40,
    }  # fmt: skip
    answer = client.chat.completions.create(**asked)
    text = answer.choices[0].message.content
    assert text and "cat" in text and answer.usage is not None and answer.usage.completion_tokens > 3
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [answer.choices[0].finish_reason]


def test_a_cancelled_job_ends_amid_its_steps_and_others_are_drawn(service: Served, client: OpenAI) -> None:
    job = service.json("/v1/jobs", {"type": "image", "prompt": "a hen", "steps": 1000, "n": 4})
    path = f"/v1/jobs/{job['id']}"
    wait_until(lambda: (service.json(path)["progress"] or {}).get("steps_done"), "its first steps")
    assert service.json(f"{path}/cancel", {})["status"] == "cancelled"
    opened(draw(client, seed=9))
    ended = service.json(path)
    assert ended["status"] == "cancelled" and ended["progress"]["steps_done"] < ended["progress"]["steps"]
