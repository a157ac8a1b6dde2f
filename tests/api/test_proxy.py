"""The proxy of docs/operations.md, as nginx runs it: events come when they happen, links lead back, uploads fit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from deployment.redis import free_port
from tests.api.easel import Easel
from tests.api.test_edits import as_file, pixels
from tests.api.world import PATIENCE_S, Api, answers, eventually

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
NAME = "pictures.example.org"
SETTINGS = {"public_url": f"https://{NAME}"}

pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx (apt install nginx-light)")


@pytest.fixture(scope="module")
def client(shared: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of nginx with the page's server, without TLS and on other ports."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    (server,) = re.findall(r"^    server \{\n.*?^    \}\n", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    server = re.sub(r"ssl_certificate.*", "", server).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    server = server.replace("http://127.0.0.1:8000", shared.url)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/errors; events {{}}\n"
        f"http {{ access_log off; {paths}{server} }}"
    )
    words = [str(NGINX), "-p", str(folder), "-e", f"{folder}/errors", "-c", str(folder / "conf")]
    process = subprocess.Popen(words)
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, headers={"Host": NAME}, timeout=PATIENCE_S, verify=False) as client:
            eventually(lambda: answers(client) or process.poll() is not None)
            assert process.poll() is None, (folder / "errors").read_text()
            yield client
    finally:
        process.terminate()
        process.wait()


def test_events_come_when_they_happen(client: httpx2.Client, easel: Easel) -> None:
    """The first one while the picture cannot be finished."""
    easel.go.clear()
    body = {"type": "image", "prompt": "a cat", "steps": 2}
    id = client.post("/v1/jobs", json=body).json()["id"]
    with client.stream("GET", f"/v1/jobs/{id}/events") as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: queued"
        easel.go.set()
        assert [line for line in lines if line.startswith("event:")][-1] == "event: succeeded"


def test_links_begin_with_the_public_address(client: httpx2.Client, easel: Easel) -> None:
    answer = client.post("/v1/images/generations", json={"prompt": "a cat", "steps": 2, "response_format": "url"})
    url = answer.json()["data"][0]["url"]
    assert url.startswith(f"https://{NAME}/v1/jobs/")
    assert client.get(url.removeprefix(f"https://{NAME}")).headers["content-type"] == "image/png"


def test_the_largest_pictures_go_through(client: httpx2.Client, easel: Easel) -> None:
    """As long as the service takes them; it says what it does not."""
    picture = as_file(pixels()) + bytes(15 * 2**20)
    answer = client.post(
        "/v1/images/edits", data={"prompt": "a hat", "size": "128x128"}, files=[("image[]", picture)] * 6
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_images"
