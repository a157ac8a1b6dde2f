"""Tests an upgrade of `diptych serve` from the release before, with work under way: its folders are taken over whole.

The release's code runs on the packages of DIPTYCH_BEFORE_PYTHON, an interpreter with those that it pinned, or on ours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.children import python_path
from tests.deployment.served import Served, environment, wait_until
from tests.faults.histories.world import checkout
from tests.stores import stores

pytestmark = pytest.mark.long

RELEASE = "8c0d904d5a5b5bfc6a70c3778412d9aa5e49e7af"  # 0.2.0
PYTHON = os.environ.get("DIPTYCH_BEFORE_PYTHON", sys.executable)
ENDED_S = 600.0
IMAGE = {"type": "image", "prompt": "a red hat", "steps": 40, "seed": 7}
LINES = {
    "/v1/images/generations": {"prompt": "a blue cat", "steps": 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a hat"}], "max_tokens": 16},
}


class Service:
    """A `diptych serve` of one folder, of either version, and its clients with a key."""

    def __init__(self, folder: Path, before: Path) -> None:
        self.folder, self.before = folder, before
        # Not the release's own embedded model but a user's, with the INT8 variant that the release made.
        self.model = shutil.copytree(before / "models" / "emoji-xl", folder / "my-model")
        self.headers: dict[str, str] = {}
        self.served: Served | None = None
        # The release takes a `redis-server` of the PATH: here the oldest of this machine, such as it bundled.
        self.servers = folder / "servers"
        self.servers.mkdir()
        (self.servers / "redis-server").symlink_to(stores()[-1].path)

    def start(self, *, old: bool) -> None:
        if old:
            path = {"PYTHONPATH": str(self.before), "PATH": f"{self.servers}:{os.environ['PATH']}"}
        else:
            path = {"PYTHONPATH": python_path(Path(__file__).parents[2])}
        self.served = Served(
            self.folder, model=str(self.model), program=[PYTHON if old else sys.executable, "-m", "diptych"],
            unset=["DIPTYCH_TEXT_MODEL", "DIPTYCH_KERNELS"],
            variables={**path, "DIPTYCH_CACHE_DIR": str(self.folder / "cache"), "DIPTYCH_DRAIN_S": "1",
                       "DIPTYCH_IMAGE_JOBS": "4"},
        )  # fmt: skip
        self.served.ready()
        with self.client() as client:

            def live() -> set[str]:
                cards = [model["diptych"] for model in client.get("/v1/models").json().get("data", [])]
                return {card["modality"] for card in cards if card["live"]}

            wait_until(lambda: live() == {"image", "text"}, "both models")

    def keys(self, *words: str) -> str:
        """The output of the release's `diptych keys`."""
        command = [PYTHON, "-m", "diptych", "keys", *words, "--data", str(self.folder / "data")]
        paths = environment(PYTHONPATH=str(self.before))
        return subprocess.run(command, cwd=self.folder, env=paths, capture_output=True, text=True, check=True).stdout

    def client(self) -> httpx2.Client:
        assert self.served is not None
        return httpx2.Client(base_url=self.served.url, headers=self.headers, timeout=60)


class Load(threading.Thread):
    """Posts jobs, each until it is accepted, whichever version answers; `accepted` has their ids by their keys."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.service, self.accepted, self.closing = service, dict[str, str](), threading.Event()

    def run(self) -> None:
        while not self.closing.is_set():
            key = f"load-{len(self.accepted)}"
            try:
                with self.service.client() as client:
                    answer = client.post("/v1/jobs", json=IMAGE, headers={"Idempotency-Key": key})
                if answer.status_code == 202:
                    self.accepted[key] = answer.json()["id"]
            except httpx2.HTTPError:
                pass  # neither version is there
            time.sleep(2)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    try:
        before = checkout(RELEASE, tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git history here, and so no code of the release before")
    made = Service(tmp_path / "service", before)
    yield made
    if made.served is not None:
        made.served.close()


def post(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, **body)
    assert answer.status_code < 300, answer.text
    found: dict[str, Any] = answer.json()
    return found


def state(client: httpx2.Client, path: str) -> str:
    """The state in which a job or a batch ends."""

    def ended() -> str:
        status = str(client.get(path).json()["status"])
        return "" if status in ("queued", "running", "validating", "in_progress", "finalizing") else status

    return wait_until(ended, f"the end of {path}", ENDED_S)


def lines(endpoint: str) -> str:
    """A batch's input of six lines."""
    each = {"method": "POST", "url": endpoint, "body": LINES[endpoint]}
    return "\n".join(json.dumps({"custom_id": str(number), **each}) for number in range(6))


def make_batch(client: httpx2.Client, endpoint: str) -> tuple[str, str]:
    """A new batch's id, and that of its input file."""
    form = {"files": {"file": ("lines.jsonl", lines(endpoint).encode())}, "data": {"purpose": "batch"}}
    file = post(client, "/v1/files", **form)["id"]
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    return post(client, "/v1/batches", json=body)["id"], file


def test_an_upgrade_loses_nothing(service: Service) -> None:
    service.start(old=True)
    token, revoked = (service.keys("add", name).split()[0] for name in ("studio", "former"))
    listed = service.keys("list")
    (former,) = (line.split()[0] for line in listed.splitlines() if "former" in line)
    service.keys("revoke", former)
    service.headers = {"Authorization": f"Bearer {token}"}
    with service.client() as client:
        wait_until(lambda: client.get("/v1/jobs").status_code == 200, "the key")
        ended = post(client, "/v1/jobs", json=IMAGE)["id"]
        wait_until(lambda: client.get(f"/v1/jobs/{ended}").json()["status"] == "succeeded", "a picture")
        picture = client.get(f"/v1/jobs/{ended}/images/0").content
        queued = [post(client, "/v1/jobs", json=IMAGE)["id"] for _ in range(12)]
        batches = {endpoint: make_batch(client, endpoint) for endpoint in LINES}
        load = Load(service)
        load.start()
        wait_until(lambda: len(load.accepted) >= 2, "two more jobs")
        assert client.get(f"/v1/jobs/{queued[-1]}").json()["status"] == "queued"
    assert service.served is not None and service.served.stop(signal.SIGTERM) == 0
    accepted_before = dict(load.accepted)
    try:
        service.start(old=False)
        wait_until(lambda: len(load.accepted) >= len(accepted_before) + 2, "jobs by the new version")
    finally:
        load.closing.set()
        load.join()
    with service.client() as client:
        assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {revoked}"}).status_code == 401
        assert client.get("/v1/jobs", headers={"Authorization": ""}).status_code == 401
        for key, id in accepted_before.items():
            assert post(client, "/v1/jobs", json=IMAGE, headers={"Idempotency-Key": key})["id"] == id
        ids = {ended, *queued, *load.accepted.values()}
        assert len(ids) == 1 + len(queued) + len(load.accepted)

        assert {state(client, f"/v1/jobs/{id}?wait_s=30") for id in ids} == {"succeeded"}
        assert client.get(f"/v1/jobs/{ended}/images/0").content == picture
        for endpoint, (batch, file) in batches.items():
            path = f"/v1/batches/{batch}"
            assert state(client, path) == "completed"
            found = client.get(path).json()
            assert found["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
            output = client.get(f"/v1/files/{found['output_file_id']}/content").text
            assert {json.loads(line)["custom_id"] for line in output.splitlines()} == {str(n) for n in range(6)}
            assert client.get(f"/v1/files/{file}/content").text == lines(endpoint)
        for id in (ended, queued[0]):
            with client.stream("GET", f"/v1/jobs/{id}/events") as events:
                assert "event: succeeded" in "".join(events.iter_text())
        (card,) = (model["diptych"] for model in client.get("/v1/models").json()["data"] if model["id"] == "my-model")
        assert card["precision"] == "int8"
    assert "Traceback" not in service.served.err
