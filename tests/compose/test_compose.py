"""`docker-compose up` from a fresh clone, with a real engine: healthy, draws, scales, bears a kill, keeps its jobs.

One stack for the module, on a port and in a project of its own; taken down with its volumes in the end.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deployment.redis import free_port
from tests.deployment import served
from tests.deployment.served import ROOT, Client

AT_ONCE = 4  # jobs that a worker takes: those of one that is killed are drawn again one by one
BUILD_S, READY_S = 1800.0, 300.0
wait_until = partial(served.wait_until, timeout_s=READY_S)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def compose() -> list[str]:
    return ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]


class Stack(Client):
    """A clone and what was started from it."""

    def __init__(self, clone: Path, port: int) -> None:
        self.clone, self.project = clone, f"diptych-test-{port}"
        super().__init__(f"http://127.0.0.1:{port}", READY_S)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")},
            "PORT": str(port), "DIPTYCH_BUILD_NETWORK": "host", "DIPTYCH_THREADS": "1",
            "DIPTYCH_DRAIN_S": "5", "DIPTYCH_LEASE_S": "5",
            "DIPTYCH_IMAGE_JOBS": str(AT_ONCE), "REDIS_PASSWORD": secrets.token_hex(16),
        }  # fmt: skip

    def run(self, *words: str, timeout_s: float = READY_S) -> str:
        done = subprocess.run(
            [*compose(), "-p", self.project, *words], cwd=self.clone, env=self.environment, capture_output=True,
            text=True, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def containers(self, service: str) -> list[str]:
        return self.run("ps", "-q", service).split()

    def running(self, service: str) -> list[str]:
        return [id for id in self.containers(service) if inspect(id)["State"]["Running"]]

    def health(self, service: str) -> list[str]:
        return [inspect(id)["State"]["Health"]["Status"] for id in self.running(service)]

    def healthy(self, **counts: int) -> None:
        def well() -> bool:
            return all(self.health(service) == ["healthy"] * count for service, count in counts.items())

        wait_until(well, f"health of {counts}")

    def order(self, **fields: Any) -> str:
        return str(self.json("/v1/jobs", {"type": "image", "prompt": "a fox", "steps": 4, **fields})["id"])

    def job(self, id: str) -> dict[str, Any]:
        return self.json(f"/v1/jobs/{id}")

    def done(self, id: str) -> dict[str, Any]:
        job: dict[str, Any] = wait_until(
            lambda: (found := self.job(id))["status"] not in ("queued", "running") and found, f"the end of {id}"
        )
        assert job["status"] == "succeeded", job["error"]
        assert self.call(f"/v1/jobs/{id}/images/0")[1].startswith(SIGNATURE)
        return job


def inspect(container: str) -> dict[str, Any]:
    said = subprocess.run(["docker", "inspect", container], capture_output=True, check=True, timeout=60).stdout
    return dict(json.loads(said)[0])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    clone = tmp_path_factory.mktemp("clone")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    stack = Stack(clone, free_port())
    try:
        stack.run("build", "api", "worker", timeout_s=BUILD_S)
        stack.run("up", "-d")
        stack.healthy(redis=1, api=1, worker=1)
        wait_until(lambda: stack.answers("/readyz"), "a worker that the API sees")
        yield stack
    finally:
        stack.run("down", "--volumes", "--remove-orphans")


def test_it_draws_what_it_is_asked_for(stack: Stack) -> None:
    status, said = stack.call("/v1/images/generations", {"prompt": "a slice of pizza", "seed": 7, "steps": 8})
    assert status == 200, said
    assert json.loads(said)["model"] == "emoji-xl"
    assert stack.json("/readyz")["workers"]["ready"] == 1


def test_by_default_it_runs_int8_on_our_own_kernels(stack: Stack) -> None:
    cards = {model["id"]: model["diptych"] for model in stack.json("/v1/models")["data"]}
    assert cards["emoji-xl"]["precision"] == "int8" and cards["emoji-xl"]["device"] == "cpu"
    assert cards["emoji-xl"]["kernels"] in ("avx512-vnni", "avx2")
    id = stack.order(seed=7)
    stack.done(id)
    with Image.open(io.BytesIO(stack.call(f"/v1/jobs/{id}/images/0")[1])) as picture:
        fingerprint = json.loads(picture.info["fingerprint"])
    assert (fingerprint["precision"], fingerprint["executable"]) == ("int8", "kernels")


def test_an_answer_fits_a_json_schema(stack: Stack) -> None:
    """Which needs llguidance, of the extra `text`."""
    schema = {
        "type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"],
        "additionalProperties": False,
    }  # fmt: skip
    asked = {
        "model": "emoji-lm", "messages": [{"role": "user", "content": "a fox"}], "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}},
    }  # fmt: skip
    answer = stack.json("/v1/chat/completions", asked)["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert list(json.loads(answer["message"]["content"])) == ["fox"]


def test_parts_run_with_no_more_rights_than_they_need(stack: Stack) -> None:
    for service in ("redis", "api", "worker"):
        (id,) = stack.running(service)
        found = inspect(id)
        assert found["HostConfig"]["ReadonlyRootfs"]
        status = subprocess.run(["docker", "exec", id, "cat", "/proc/1/status"], capture_output=True, check=True).stdout
        uid = next(line.split()[1] for line in status.decode().splitlines() if line.startswith("Uid:"))
        assert uid != "0", service
    (api,) = stack.running("api")
    published = inspect(api)["HostConfig"]["PortBindings"]["8000/tcp"]
    assert [port["HostIp"] for port in published] == ["127.0.0.1"]
    torch = subprocess.run(["docker", "exec", api, "python", "-c", "import torch"], capture_output=True)
    assert torch.returncode == 1 and b"No module named 'torch'" in torch.stderr


def test_a_part_that_is_not_well_is_told_from_one_that_is(stack: Stack) -> None:
    (api,) = stack.running("api")
    probe = ["python", "-m", "deployment.probe", "api"]
    well = subprocess.run(["docker", "exec", api, *probe], capture_output=True, text=True)
    assert (well.returncode, well.stdout) == (0, "ok\n")
    away = subprocess.run(["docker", "exec", "-e", "DIPTYCH_PORT=6379", api, *probe], capture_output=True, text=True)
    assert away.returncode == 1


def test_three_workers_bear_the_loss_of_one(stack: Stack) -> None:
    stack.run("up", "-d", "--scale", "worker=3")
    stack.healthy(worker=3)
    ids = [stack.order(steps=40, seed=k) for k in range(3 * AT_ONCE)]
    running = lambda: [stack.job(id)["status"] for id in ids].count("running") > 2 * AT_ONCE  # noqa: E731
    wait_until(running, "work for all three")
    victim = stack.running("worker")[0]
    subprocess.run(["docker", "kill", victim], capture_output=True, check=True)
    jobs = [stack.done(id) for id in ids]
    assert max(job["attempt"] for job in jobs) > 1  # some were the victim's, and others drew them
    assert not inspect(victim)["State"]["Running"]


def test_down_and_up_again_keeps_what_was_accepted(stack: Stack) -> None:
    done = stack.order(seed=1)
    stack.done(done)
    waiting = [stack.order(steps=40, seed=k) for k in range(3)]
    stack.run("down")
    stack.run("up", "-d")
    stack.healthy(redis=1, api=1, worker=1)
    assert stack.job(done)["status"] == "succeeded"
    for id in [done, *waiting]:
        stack.done(id)
