"""Hires stage workers (tests/workers/stage.py) for a test, gives them jobs as the API would, and waits for what comes.

Talks to the real Redis through the real store; knows nothing of what happens inside a worker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import kombu.pools
import redis

from core.artifacts import Artifacts
from core.config import Settings
from core.jobs.broker import Envelope
from core.jobs.cards import WorkerCard
from core.jobs.holders import FileHolders
from core.jobs.record import Claim, Job, JobDraft, JobState, new_id
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from tests.forks import WORKER, Fork, forker
from tests.json_lines import whole_lines
from tests.workers.stage import MODEL
from workers.app import WorkerApplication, create

PATIENCE_S = 60.0  # how long anything may take before a test fails
T = TypeVar("T")


def eventually(look: Callable[[], T], what: str = "it") -> T:
    """The first truthy value of `look`. Fails if there is none in a generous time."""
    until = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < until, f"{what} never came true"
        time.sleep(0.005)
    return found


class Hired:
    def __init__(self, process: subprocess.Popen[bytes] | Fork, folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def log(self) -> str:
        return (self._folder / "stderr").read_text("utf-8", "replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it has noted with --log."""
        return whole_lines(self._folder / "events")

    def noted(self, event: str, job: str = "") -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event and e["request"].startswith(job)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    @property
    def well(self) -> bool:
        """Whether it runs, and nothing has surprised it."""
        return self.process.poll() is None and "Traceback" not in self.log

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()


class Crew:
    """Workers and jobs on one Redis."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.store = JobStore(url)
        self.registry = Registry(url)
        self.holders = FileHolders(url)
        self.redis = redis.Redis.from_url(url, decode_responses=True)
        self.artifacts_url = (folder / "artifacts").as_uri()
        self.artifacts = Artifacts(self.artifacts_url)
        self.hired: list[Hired] = []
        self._sender: WorkerApplication | None = None

    def hire(
        self, *switches: str, ready: bool = True, command: tuple[str, ...] = (), imported: tuple[str, ...] = WORKER,
        **settings: Any,
    ) -> Hired:  # fmt: skip
        """Start a worker; with `ready` wait until it takes jobs. `settings` become DIPTYCH_*."""
        folder = self.folder / f"worker-{len(self.hired)}"
        folder.mkdir()
        given = {"redis_url": self.url, "artifacts_url": self.artifacts_url, "compile": False, "threads": 1, **settings}
        environment = {**os.environ, **{f"DIPTYCH_{name.upper()}": str(value) for name, value in given.items()}}
        words = ("-m", "tests.workers.stage", "--log", str(folder / "events"), *switches)
        process: subprocess.Popen[bytes] | Fork
        with (folder / "stderr").open("wb") as log:
            if command:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            else:
                start = forker(*imported).start
                process = start(words, env=environment, stderr=log.fileno(), start_new_session=True)
        self.hired.append(hired := Hired(process, folder))
        if ready:
            eventually(lambda: self._is_ready(hired), "a worker's readiness")
        return hired

    def _is_ready(self, hired: Hired) -> bool:
        assert hired.process.poll() is None, hired.log
        card = self.card(hired)
        return card is not None and card.state == "ready"

    def card(self, hired: Hired) -> WorkerCard | None:
        return next((card for card in self.registry.workers() if card.pid == hired.process.pid), None)

    def make(
        self,
        modality: str = "image",
        *,
        model: str = "",
        deadline_s: float | None = None,
        priority: int = 5,
        owner: str = "",
        **asked: Any,
    ) -> str:
        """A job's record, without a message."""
        if modality == "image":
            usual: dict[str, Any] = {
                "prompt": "a pizza", "negative_prompt": None, "n": 1, "seed": 7, "steps": 3, "guidance_scale": 5.0,
                "width": 32, "height": 32, "scheduler": None, "deterministic": False,
            }  # fmt: skip
        else:
            usual = {"prompt": "hello", "steps": 2}
        model = model or (MODEL if modality == "image" else "stage-text")
        parameters = {**usual, **asked}
        draft = JobDraft(new_id(), modality, model, parameters, priority=priority, deadline_s=deadline_s, owner=owner)
        return self.store.create(draft).id

    @property
    def sender(self) -> WorkerApplication:
        if self._sender is None:
            self._sender = create(Settings(redis_url=self.url, artifacts_url="memory://"))
        return self._sender

    def send(self, id: str, queue: str = "image", priority: int = 5) -> None:
        model: Any = self.redis.hget(f"diptych:job:{id}", "model")
        self.sender.post(Envelope(id, queue, priority, model=model or ""))

    def offer(self, id: str, to: Hired) -> None:
        """A message of an image job to one worker, for a minute."""
        card = eventually(lambda: self.card(to), "a worker's card")
        envelope = Envelope(id, "image", 5, card.id)
        assert self.store.leases.offer({envelope: self.sender.message(envelope)}, 60)

    def ask(self, modality: str = "image", **asked: Any) -> str:
        """A job with its message."""
        id = self.make(modality, **asked)
        self.send(id, modality, asked.get("priority", 5))
        return id

    def job(self, id: str) -> Job:
        job = self.store.get(id)
        assert job is not None
        return job

    def claimed(self, id: str) -> Claim:
        """The claim of the worker `me`."""
        claim = self.store.leases.claim(id, "me")
        assert claim is not None
        return claim

    def ended(self, id: str) -> Job:
        eventually(lambda: self.job(id).state.final, "a job's end")
        return self.job(id)

    def succeeded(self, id: str) -> Job:
        job = self.ended(id)
        assert job.state is JobState.SUCCEEDED, job.error
        return job

    def running(self, id: str) -> Job:
        """The job once a worker has begun with its steps. Where it must not have ended yet, give it many."""
        eventually(lambda: self.job(id).progress is not None, "a job's progress")
        return self.job(id)

    def events(self, id: str) -> list[tuple[str, dict[str, Any]]]:
        entries: Any = self.redis.xrange(f"diptych:events:{id}")
        return [(fields["type"], json.loads(fields["data"])) for _, fields in entries]

    def acknowledged(self) -> None:
        """Wait until no message is in any worker's hand."""
        eventually(lambda: self.redis.hlen("unacked") == 0, "all acknowledgements")

    def close(self) -> None:
        for hired in self.hired:
            hired.process.kill()
            hired.process.wait()
        if self._sender is not None:
            self._sender.close()
            # They are shared by all applications with one URL, and stay closed once closed.
            kombu.pools.reset()  # type: ignore[no-untyped-call]
        self.redis.close()
        self.registry.close()
        self.holders.close()
        self.store.close()
