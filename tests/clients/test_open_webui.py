"""Open WebUI as PyPI has it, against a real service: OPEN_WEBUI names its command, which nothing here installs."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from PIL import Image

from deployment.redis import free_port
from tests.clients.programs import running
from tests.deployment.served import Served

COMMAND = os.environ.get("OPEN_WEBUI", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not COMMAND, reason="OPEN_WEBUI is not set: `pip install open-webui`, then its bin/open-webui"),
]


@pytest.fixture(scope="module")
def client(service: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A signed-in client of an Open WebUI whose chat and images are the service's."""
    folder, port = tmp_path_factory.mktemp("webui"), free_port()
    openai = {"OPENAI_API_BASE_URL": f"{service.url}/v1", "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "false"}
    images = {
        "ENABLE_IMAGE_GENERATION": "true", "IMAGE_GENERATION_ENGINE": "openai", "IMAGE_GENERATION_MODEL": "tiny",
        "IMAGE_SIZE": "32x32", "IMAGES_OPENAI_API_BASE_URL": f"{service.url}/v1",
        "ENABLE_IMAGE_EDIT": "true", "IMAGE_EDIT_ENGINE": "openai", "IMAGE_EDIT_MODEL": "tiny",
        "IMAGES_EDIT_OPENAI_API_BASE_URL": f"{service.url}/v1",
        "AUTOMATIC1111_BASE_URL": service.url,
    }  # fmt: skip
    offline = {"WEBUI_AUTH": "false", "OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai"}
    environment = openai | images | offline | {"DATA_DIR": str(folder)}
    command = [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with running(command, folder, folder, port, "/health", environment) as client:
        token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        client.headers["Authorization"] = f"Bearer {token}"
        yield client


def pictures(client: httpx2.Client, path: str, **body: Any) -> list[Image.Image]:
    """Those that the answer to a post names."""
    answer = client.post(f"/api/v1/images/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return [Image.open(io.BytesIO(client.get(named["url"]).content)) for named in answer.json()]


def test_it_draws(client: httpx2.Client) -> None:
    (picture,) = pictures(client, "generations", prompt="a cat", n=1)
    assert picture.size == (32, 32)


@pytest.mark.parametrize("several", [False, True])
def test_it_edits(client: httpx2.Client, several: bool) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(stream, "PNG")
    image = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    (picture,) = pictures(client, "edit", prompt="a hat", image=[image] if several else image)
    assert picture.size == (32, 32)


@pytest.fixture
def automatic1111(client: httpx2.Client) -> Iterator[None]:
    """The engine of images, set as its page of settings does."""
    config = client.get("/api/v1/images/config").json()

    def configure(engine: str) -> None:
        answer = client.post("/api/v1/images/config/update", json={**config, "IMAGE_GENERATION_ENGINE": engine})
        assert answer.status_code == 200, answer.text

    configure("automatic1111")
    yield
    configure(config["IMAGE_GENERATION_ENGINE"])


@pytest.mark.usefixtures("automatic1111")
def test_it_draws_by_automatic1111s_api(client: httpx2.Client) -> None:
    """With the models that it lists, steps and a negative prompt, several at once."""
    assert [model["id"] for model in client.get("/api/v1/images/models").json()] == ["tiny"]
    body = {"prompt": "a cat", "negative_prompt": "blurry", "n": 2, "steps": 3, "model": "tiny"}
    drawn = pictures(client, "generations", **body)
    assert [picture.size for picture in drawn] == [(32, 32)] * 2
    texts = [str(picture.info["parameters"]) for picture in drawn]
    assert all("Steps: 3," in text and "Negative prompt: blurry" in text for text in texts) and texts[0] != texts[1]


@pytest.mark.usefixtures("automatic1111")
def test_it_verifies_automatic1111s_address(client: httpx2.Client, service: Served) -> None:
    answer = client.post("/api/v1/images/verify", json={"engine": "automatic1111", "url": service.url})
    assert answer.status_code == 200, answer.text


def test_it_chats(client: httpx2.Client) -> None:
    assert {"emoji-lm", "tiny"} <= {model["id"] for model in client.get("/api/models").json()["data"]}
    body = {"model": "emoji-lm", "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 8}
    answer = client.post("/api/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
