"""Calls of clients that are not installed here, as their sources make them: n8n's OpenAI node and LibreChat's tools."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.api.easel import Easel
from tests.api.pictures.test_edits import as_file, handed_on, pixels
from tests.api.world import Api, Worker
from tests.faults.payloads import form_body

MODELS = ["emoji-xl", "gpt-image-1"]
OPTIONS: dict[str, dict[str, Any]] = {
    "n8n": {"n": 1, "size": "auto", "quality": "medium"},
    "LibreChat": {"n": 1, "size": "auto", "quality": "auto", "background": "auto", "output_format": "png"},
}


def drawn(answer: Any) -> tuple[int, int]:
    assert answer.status_code == 200, answer.text
    return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).size


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("client", OPTIONS)
def test_generations(api: Api, easel: Easel, client: str, model: str) -> None:
    assert drawn(api.post("/v1/images/generations", prompt="a cat", model=model, **OPTIONS[client])) == (128, 128)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("declared", [True, False], ids=["n8n", "LibreChat"])
def test_edits(api: Api, easel: Easel, worker: Worker, declared: bool, model: str) -> None:
    """A form with `image[]`, whose length LibreChat does not declare: it streams the file."""
    array = pixels()
    fields = {"prompt": b"a hat", "model": model.encode(), "quality": b"auto", "size": b"auto"}
    form = form_body(fields, {"image[]": as_file(array)})
    headers = {"content-type": "multipart/form-data; boundary=edge"}
    content = form if declared else iter([form[:4000], form[4000:]])
    assert drawn(api.client.post("/v1/images/edits", content=content, headers=headers)) == (128, 128)
    assert np.array_equal(handed_on(worker, easel.seen[-1])[0], array)
