"""Tests two versions side by side on one Redis: this tree's API and worker, and those of the previous commit.

Real processes and the real engine; only the model is a stand-in of noise, random:tiny.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image

from tests.faults.histories.world import World, checkout
from tests.faults.parts import wait_for

PATIENCE_S = 300.0  # four processes import torch, beside whatever else the machine does
NAMES = ("now", "before")


class Pair:
    """An API and a worker of each version."""

    def __init__(self, world: World, clients: list[httpx2.Client]) -> None:
        self.world = world
        self.clients = dict(zip(NAMES, clients, strict=True))

    def draw(self, name: str, seed: int) -> tuple[str, bytes]:
        """A picture by this API: which worker drew it, and its bytes, which the other API hands out as well."""
        client = self.clients[name]
        fields = {"type": "image", "prompt": "a fox", "steps": 2, "seed": seed, "deterministic": True}
        made = client.post("/v1/jobs", json=fields)
        assert made.status_code == 202, made.text
        id = made.json()["id"]
        wait_for("its end", lambda: self._job(id).state.final, PATIENCE_S)
        with client.stream("GET", f"/v1/jobs/{id}/events") as events:
            assert "event: succeeded" in "".join(events.iter_text())
        pictures = set()
        for other in self.clients.values():
            job = other.get(f"/v1/jobs/{id}").json()
            assert job["status"] == "succeeded", job
            assert id in {listed["id"] for listed in other.get("/v1/jobs").json()["data"]}
            picture = other.get(f"/v1/jobs/{id}/images/0")
            assert picture.status_code == 200
            pictures.add(picture.content)
        (picture,) = pictures
        pid = int(self._job(id).worker.split("-")[-2])
        return next(name for name, part in zip(NAMES, self.world.crew, strict=True) if part.pid == pid), picture

    def _job(self, id: str) -> Any:
        return self.world.store.get(id)


def opened(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """A PNG's pixels and its fingerprint."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.tobytes(), json.loads(image.info["fingerprint"])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Beside this tree the commit before; DIPTYCH_BEFORE names another."""
    try:
        before = checkout(os.environ.get("DIPTYCH_BEFORE", "HEAD^"), tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git history here, and so no code of the commit before")
    with ExitStack() as stack:
        world = stack.enter_context(World(
            tmp_path / "world", replica=False, real=True, other=before, mixed=True, keyed=False, preload=True,
            settings={"image_jobs": "1", "lease_s": "15"},
        ))  # fmt: skip
        urls = world.urls()
        yield Pair(world, [stack.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE_S)) for url in urls])


@pytest.mark.long
def test_two_versions_serve_side_by_side_in_both_orders(pair: Pair) -> None:
    """Each worker generates each API's images with the same pixels, and each API lists and ends the other's jobs.

    Each worker's are equal to the byte; between workers a fingerprint may differ in code and version alone.
    """
    drawn: dict[tuple[str, str], set[bytes]] = {}
    for turn in range(40):
        name = NAMES[turn // 2 % 2]  # Redis serves idle workers in turn
        worker, picture = pair.draw(name, 7)
        drawn.setdefault((name, worker), set()).add(picture)
        if len(drawn) == 4:
            break
    assert {("before", "now"), ("now", "before")} <= drawn.keys()
    by_worker: dict[str, set[bytes]] = {}
    for (_, worker), pictures in drawn.items():
        by_worker.setdefault(worker, set()).update(pictures)
    assert all(len(pictures) == 1 for pictures in by_worker.values()), "a worker's picture by whichever API"
    pixels, fingerprints = zip(*(opened(data) for (data,) in by_worker.values()), strict=True)
    assert len(set(pixels)) == 1, "the same picture by whomever"
    if len({(printed.pop("code"), printed.pop("version")) for printed in fingerprints}) == 1:
        assert len(set().union(*by_worker.values())) == 1, "the same bytes by the same code"
    assert fingerprints[0] == fingerprints[-1]
    for client in pair.clients.values():
        assert all(model["diptych"]["live"] for model in client.get("/v1/models").json()["data"])
        fields = {"type": "image", "prompt": "a fox", "steps": 1000, "n": 10}
        waiting = client.post("/v1/jobs", json=fields).json()["id"]
        for other in pair.clients.values():
            assert other.post(f"/v1/jobs/{waiting}/cancel").json()["status"] == "cancelled"
            assert other.get("/v1/jobs?status=cancelled").json()["data"]
    for part in pair.world.parts:
        assert "Traceback" not in part.log.read_text("utf-8", "replace")
