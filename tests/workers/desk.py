"""A worker's tasks on the test's own thread, with real models and a real store."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from contract.image import ImageJob, ImageParameters
from core.batching.engine import Engine
from core.batching.request import Request
from core.config import Settings
from core.jobs.broker import Envelope
from core.jobs.record import Claim, Job, JobState
from core.jobs.store import JobStore
from pipeline.checkpoints.tiny import TINY
from tests.workers.crew import Crew
from tests.workers.stage import handler_of
from workers.artifact_writer import ArtifactWriter
from workers.build import Runtime
from workers.claims.active_jobs import ActiveJobs
from workers.claims.publisher import ProgressPublisher
from workers.claims.shared_lock import SharedLock
from workers.claims.store_retry import StoreRetry
from workers.handlers import JobHandler, Output
from workers.stages.stage import JobStage, check_all, requested
from workers.tasks import WorkerTasks

JOB: dict[str, Any] = {
    "prompt": "a pizza", "n": 2, "seed": 5, "steps": 4, "guidance_scale": 5.0, "width": 32, "height": 32,
}  # fmt: skip


def torch_settings(**more: Any) -> Settings:
    """Settings of a tiny model on torch, with nothing compiled."""
    return Settings(**{"model": TINY, "device": "cpu", "compile": False, "kernels": False, "threads": 1, **more})


def drawn(works: Runtime, requests: Sequence[ImageParameters]) -> list[Any]:
    """The pictures of requests that are made at once."""
    futures = [works.engine.submit(Request(f"{k}", "image", one)) for k, one in enumerate(requests)]
    return [future.result(60) for future in futures]


def read(runtime: Runtime, parameters: Mapping[str, Any], key_action: str = "") -> ImageJob:
    """Return a job as the worker executes it; `key_action` is what its key has flagged pictures done to."""
    claim = Claim("id", 1, "image", TINY, {}, 5, None, suspect=False, checker=key_action)
    job = handler_of(runtime).read(parameters)
    assert isinstance(job, ImageJob)
    return check_all(runtime.stages, job, claim)


def result_of(runtime: Runtime, job: ImageJob, pictures: Sequence[Any], writer: ArtifactWriter) -> dict[str, Any]:
    """Return the result of a job whose pictures were drawn, after its stages."""
    outputs = [Output(picture) for picture in pictures]
    for stage in requested(runtime.stages, job):
        outputs = stage.after(job, outputs, lambda: False)
    return handler_of(runtime).build_result(job, outputs, writer)


def images(job: Job) -> list[dict[str, Any]]:
    """Of the result of a job that must have succeeded."""
    assert job.state is JobState.SUCCEEDED and job.result is not None, job.error
    return list(job.result["images"])


class Tasks:
    """A worker's tasks on the test's own thread, and all that they need."""

    def __init__(
        self, crew: Crew, store: JobStore, engine: Engine, handlers: Mapping[str, JobHandler],
        stages: Sequence[JobStage] = (),
    ) -> None:  # fmt: skip
        self.store, self.engine, self.sent = store, engine, list[Envelope]()
        self.shared_lock, self.active_jobs, store_retry = SharedLock(), ActiveJobs(), StoreRetry()
        self._publisher = ProgressPublisher(store.leases, store_retry, lambda: engine.ticks, self.active_jobs.abandon)
        self._publisher.start()
        self.tasks = WorkerTasks(
            "me", store, store_retry, self.shared_lock, self.active_jobs, self._publisher, crew.artifacts, engine,
            handlers, stages, self.sent.append,
        )  # fmt: skip

    def run(self, id: str) -> None:
        self.tasks.run(Envelope(id, "image", 5))

    def close(self) -> None:
        self._publisher.stop()
        self.store.close()


class Desk(Tasks):
    """With real models; `usual` are fields of all jobs."""

    def __init__(self, crew: Crew, works: Runtime, handlers: Mapping[str, JobHandler], **usual: Any) -> None:
        super().__init__(crew, JobStore(crew.url), works.engine, handlers, works.stages)
        self._crew, self._usual = crew, {"prompt": "a cat", "steps": 2, **usual}
        self._name = works.images.model.name

    def draw(self, **asked: Any) -> Job:
        id = self._crew.make(model=self._name, **{**self._usual, **asked})
        self.run(id)
        assert not self.active_jobs.works()
        return self._crew.job(id)

    def opened(self, image: dict[str, Any]) -> tuple[Image.Image, dict[str, Any], dict[str, Any]]:
        """The picture, and what its file says of its parameters and of what drew it."""
        picture: Any = Image.open(io.BytesIO(self._crew.artifacts.get(image["key"])))
        return picture, json.loads(picture.text["diptych"]), json.loads(picture.text["fingerprint"])

    def cancel_all(self) -> None:
        """Drop the jobs that run, as after their cancellation."""
        for work in self.active_jobs.works():
            work.abandon()
