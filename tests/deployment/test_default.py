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
from openai.types import ImagesResponse
from PIL import Image

from core.config import EMBEDDED_MODEL, EMBEDDED_TEXT_MODEL
from tests.core.quant.stage import CACHE, kernels
from tests.deployment.served import READY_S, Served, ready

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
    with ready(
        tmp_path_factory.mktemp("served"), model=None, unset=unset, variables={"DIPTYCH_CACHE_DIR": str(CACHE.parent)}
    ) as service:
        yield service


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


def data_of(answer: ImagesResponse) -> bytes:
    assert answer.data is not None and answer.data[0].b64_json
    return base64.b64decode(answer.data[0].b64_json)


def draw(client: OpenAI, **fields: Any) -> bytes:
    return data_of(client.images.generate(**DRAWN, extra_body={**SEEDED, **fields}))  # type: ignore[arg-type]


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
    mask = Image.new("RGBA", (SIDE, SIDE), "white")
    mask.paste((0, 0, 0, 0), (0, 0, SIDE, SIDE // 2))  # transparent: the upper half is drawn anew
    stream = io.BytesIO()
    mask.save(stream, "PNG")
    answer = client.images.edit(
        image=("pizza.png", before), mask=("mask.png", stream.getvalue()), prompt="a red heart",
        response_format="b64_json", extra_body={**SEEDED, "strength": 0.9},
    )  # fmt: skip
    edited, fingerprint = opened(data_of(answer))
    assert fingerprint["executable"] == "kernels"
    assert np.array_equal(edited[SIDE // 2 :], levels[SIDE // 2 :])
    assert np.abs(edited[: SIDE // 2].astype(int) - levels[: SIDE // 2]).mean() > 5


def test_it_chats(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="emoji-lm", messages=[{"role": "user", "content": "a cat"}], temperature=0, max_tokens=40
    )
    assert "cat" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.completion_tokens > 3
