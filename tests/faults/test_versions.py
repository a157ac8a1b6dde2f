"""Tests two versions side by side on one Redis: this tree's API and worker, and those of the previous commit.

Real processes and the real engine; only the model is a stand-in of noise, random:tiny.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import redis
from PIL import Image

from core.jobs import keys
from deployment.redis import RedisServer
from tests.children import python_path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # four processes import torch, beside whatever else the machine does
API = "import sys; from api.app import serve; from core.config import read; serve(read(), int(sys.argv[1]))"
WORKER = "import sys; from tests.workers.stage import main; sys.argv = ['worker', '--real']; sys.exit(main())"
T = TypeVar("T")


def eventually(look: Callable[[], T], what: str) -> T:
    until = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < until, f"{what} never came true"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the commit before; DIPTYCH_BEFORE names another."""
    commit = os.environ.get("DIPTYCH_BEFORE", "HEAD^")
    git = ["git", "-C", str(ROOT), "archive", commit]
    try:
        archive = subprocess.run(git, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git history here, and so no code of the commit before")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


class Process:
    """A part of one version."""

    def __init__(self, tree: Path, code: str, folder: Path, name: str, url: str, data: Path, *more: str) -> None:
        self.log = folder / f"{name}.log"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")},
            "PYTHONPATH": python_path(tree), "DIPTYCH_REDIS_URL": url, "DIPTYCH_DATA_DIR": str(data),
            "DIPTYCH_MODEL": "random:tiny", "DIPTYCH_COMPILE": "0", "DIPTYCH_KERNELS": "0", "DIPTYCH_THREADS": "1",
            "DIPTYCH_IMAGE_JOBS": "1", "OMP_NUM_THREADS": "1", "DIPTYCH_CACHE_DIR": str(folder / "cache"),
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *more], cwd=tree, env=environment, stdout=log, stderr=log,
                pass_fds=[int(one) for one in more],
            )  # fmt: skip

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair:
    """An API and a worker of each version."""

    def __init__(self, trees: dict[str, Path], folder: Path, stack: ExitStack) -> None:
        self.server = RedisServer(folder / "redis")
        self.server.start()
        stack.callback(self.server.kill)
        self.redis: Any = stack.enter_context(redis.Redis.from_url(self.server.url, decode_responses=True))
        self.workers, self.apis, self.clients = {}, {}, {}
        for name, tree in trees.items():
            self.workers[name] = Process(tree, WORKER, folder, f"worker-{name}", self.server.url, folder / "data")
            stack.callback(self.workers[name].end)
        for name, tree in trees.items():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            descriptor = str(listener.fileno())
            self.apis[name] = Process(tree, API, folder, f"api-{name}", self.server.url, folder / "data", descriptor)
            stack.callback(self.apis[name].end)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.clients[name] = stack.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE_S))
        for name in trees:
            ready = lambda name=name: self.status(name).get("workers", {}).get("ready") == 2  # noqa: E731
            eventually(ready, f"{name}: two workers seen")

    def status(self, name: str) -> dict[str, Any]:
        for part in (*self.workers.values(), *self.apis.values()):
            assert part.process.poll() is None, part.log.read_text("utf-8", "replace")
        try:
            return dict(self.clients[name].get("/readyz").json())
        except httpx2.TransportError:
            return {}

    def draw(self, name: str, seed: int) -> tuple[str, bytes]:
        """A picture by this API: which worker drew it, and its bytes, which the other API hands out as well."""
        client = self.clients[name]
        fields = {"type": "image", "prompt": "a fox", "steps": 2, "seed": seed, "deterministic": True}
        made = client.post("/v1/jobs", json=fields)
        assert made.status_code == 202, made.text
        id = made.json()["id"]
        eventually(lambda: self.redis.hget(keys.job(id), "state") not in ("queued", "running"), "its end")
        with client.stream("GET", f"/v1/jobs/{id}/events") as events:
            assert "event: succeeded" in "".join(events.iter_text())
        pictures = set()
        for other in self.clients.values():
            job = other.get(f"/v1/jobs/{id}").json()
            assert job["status"] == "succeeded", job
            assert id in {one["id"] for one in other.get("/v1/jobs").json()["data"]}
            picture = other.get(f"/v1/jobs/{id}/images/0")
            assert picture.status_code == 200
            pictures.add(picture.content)
        (picture,) = pictures
        worker = self.redis.hget(keys.job(id), "worker")
        pid = int(worker.split("-")[-2])
        return next(name for name, part in self.workers.items() if part.process.pid == pid), picture


def opened(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """A PNG's pixels and its fingerprint."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.tobytes(), json.loads(image.info["fingerprint"])


@pytest.fixture
def pair(before: Path, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair({"before": before, "now": ROOT}, tmp_path, stack)


def test_two_versions_serve_side_by_side_in_both_orders(pair: Pair) -> None:
    """Each worker generates each API's images with the same pixels, and each API lists and ends the other's jobs.

    Each worker's are equal to the byte; between workers a fingerprint may differ in code and version alone.
    """
    drawn: dict[tuple[str, str], set[bytes]] = {}
    for turn in range(40):
        name = ("before", "now")[turn // 2 % 2]  # Redis serves idle workers in turn
        worker, picture = pair.draw(name, 7)
        drawn.setdefault((name, worker), set()).add(picture)
        if len(drawn) == 4:
            break
    assert {("before", "now"), ("now", "before")} <= drawn.keys()
    by_worker: dict[str, set[bytes]] = {}
    for (_, worker), found in drawn.items():
        by_worker.setdefault(worker, set()).update(found)
    assert all(len(found) == 1 for found in by_worker.values()), "a worker's picture by whichever API"
    pixels, fingerprints = zip(*(opened(data) for (data,) in by_worker.values()), strict=True)
    assert len(set(pixels)) == 1, "the same picture by whomever"
    if len({(one.pop("code"), one.pop("version")) for one in fingerprints}) == 1:
        assert len(set().union(*by_worker.values())) == 1, "the same bytes by the same code"
    assert fingerprints[0] == fingerprints[-1]
    for client in pair.clients.values():
        assert all(model["diptych"]["live"] for model in client.get("/v1/models").json()["data"])
        waiting = client.post("/v1/jobs", json={"type": "image", "prompt": "a fox", "steps": 1000, "n": 10}).json()[
            "id"
        ]
        for other in pair.clients.values():
            assert other.post(f"/v1/jobs/{waiting}/cancel").json()["status"] == "cancelled"
            assert other.get("/v1/jobs?status=cancelled").json()["data"]
    for part in (*pair.workers.values(), *pair.apis.values()):
        assert "Traceback" not in part.log.read_text("utf-8", "replace")
