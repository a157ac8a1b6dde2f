"""The proxy of docs/operations.md, as nginx runs it: events come when they happen, links lead back, uploads fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from core.config import Settings
from deployment.redis import free_port
from tests.api.easel import Easel
from tests.api.pictures.test_edits import as_file, pixels
from tests.api.world import PATIENCE_S, SERVE, Api, Worker, answers, eventually, process
from tests.http_server import Handler, LocalServer
from tests.https_server import make_certificate

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"

SETTINGS = {"webhook_private": True}

pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx (apt install nginx-light)")


@pytest.fixture(scope="module")
def client(shared: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of nginx with the page's server, on other ports and with a certificate of ours."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    certificate = make_certificate(folder)
    (server,) = re.findall(r"^    server \{\n.*?^    \}\n", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    server = server.replace("/etc/ssl/pictures.pem", str(certificate.file))
    server = server.replace("/etc/ssl/pictures.key", str(certificate.key))
    server = server.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
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
        url = f"https://localhost:{port}"
        with httpx2.Client(base_url=url, timeout=PATIENCE_S, verify=certificate.trusting) as client:
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


def links(value: Any) -> list[str]:
    """All addresses in an answer."""
    if isinstance(value, dict | list):
        return [link for each in (value.values() if isinstance(value, dict) else value) for link in links(each)]
    return [value] if isinstance(value, str) and value.startswith(("http:", "https:")) else []


def test_links_lead_back_through_the_proxy(client: httpx2.Client, easel: Easel) -> None:
    """With its scheme and its port, at every door that writes them."""
    body = {"prompt": "a cat", "steps": 2}
    picture = {"image": ("a.png", as_file(pixels()), "image/png")}
    edit = {**{name: str(value) for name, value in body.items()}, "response_format": "url", "size": "128x128"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": body}
    heard: list[dict[str, Any]] = []

    class Receiver(Handler):
        def respond(self) -> None:
            heard.append(json.loads(self.body()))
            self.answer(200)

    with LocalServer(Receiver) as receiver:
        drawn = client.post("/v1/images/generations", json={**body, "response_format": "url"}).json()
        edited = client.post("/v1/images/edits", data=edit, files=picture).json()
        job = client.post("/v1/jobs", json={**body, "type": "image", "webhook_url": receiver.url}).json()
        eventually(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded")
        prediction = client.post("/v1/predictions", json={"version": "emoji-xl", "input": {"prompt": "a cat"}}).json()
        file = client.post("/v1/files", files={"file": ("b.jsonl", json.dumps(line))}, data={"purpose": "batch"}).json()
        batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        id = client.post("/v1/batches", json=batch).json()["id"]
        ended = eventually(lambda: (b := client.get(f"/v1/batches/{id}").json())["status"] == "completed" and b)
        output = json.loads(client.get(f"/v1/files/{ended['output_file_id']}/content").text)
        eventually(lambda: heard)
    answers = (drawn, edited, client.get(f"/v1/jobs/{job['id']}").json(), prediction, output, heard)
    for answer in answers:
        addresses = [link for link in links(answer) if link != receiver.url]
        assert addresses and {urlsplit(link)[:2] for link in addresses} == {("https", client.base_url.netloc.decode())}
    url = drawn["data"][0]["url"]
    assert client.get(url).headers["content-type"] == "image/png"


@pytest.mark.parametrize(("trusted", "scheme"), [(None, "https"), ("192.0.2.1", "http"), ("127.0.0.0/8", "https")])
def test_only_trusted_proxies_decide_the_scheme_of_links(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, trusted: str | None, scheme: str
) -> None:
    """And nobody their host, but by `Host`."""
    if trusted is None:
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    else:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    said = {
        "X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil.example", "Host": "localhost:8443",
        "Forwarded": "proto=https;host=evil.example",
    }  # fmt: skip
    with Worker(settings) as worker, process(SERVE, settings) as (_, client):
        worker.announce()
        id = client.post("/v1/jobs", json={"type": "image", "prompt": "a cat"}).json()["id"]
        worker.work(id)
        (picture,) = client.get(f"/v1/jobs/{id}", headers=said).json()["images"]
        assert picture["url"].startswith(f"{scheme}://localhost:8443/v1/jobs/{id}")


def test_the_largest_pictures_go_through(client: httpx2.Client, easel: Easel) -> None:
    """As long as the service takes them; it says what it does not."""
    picture = as_file(pixels()) + bytes(15 * 2**20)
    answer = client.post(
        "/v1/images/edits", data={"prompt": "a hat", "size": "128x128"}, files=[("image[]", picture)] * 6
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_images"
