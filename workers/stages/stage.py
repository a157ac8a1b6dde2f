"""The protocol of a stage around the engine: what it does before a job's requests run, and to what they came to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from contract.image import ImageJob
from workers.handlers import JobHandler, Output
from workers.images.handler import ImageJobHandler

if TYPE_CHECKING:
    from core.config import Settings
    from core.jobs.record import Claim
    from workers.job_run import JobRun


class StageFailed(Exception):
    """A stage fails a job. The message is for the client; `code` is the record's error code."""

    code: ClassVar[str]


class JobStage:
    """One stage of image jobs, under the `field` of those that ask for it. One for all models of a worker; thread-safe.

    Every stage overrides the methods that it needs; those of this class stand for a stage that changes nothing.
    """

    field: ClassVar[str] = ""

    @classmethod
    def open(cls, settings: Settings, device: str) -> Self:
        """Create the stage as the settings configure it. Raises `ModelError`."""
        return cls()

    def close(self) -> None:
        """End its threads."""

    def card(self, handler: ImageJobHandler, handlers: Mapping[str, JobHandler]) -> Mapping[str, Any]:
        """Return its fields of the card of this handler's model; `handlers` are those of all models that are served."""
        return {}

    def check(self, job: ImageJob, claim: Claim | None) -> ImageJob:
        """Return a job as it is to be executed, with what the service and the claim's key say of it. Without a claim
        it is the service's own. Raises `Invalid` and `StageFailed`.
        """
        return job

    def is_requested(self, job: ImageJob) -> bool:
        """Return whether a checked job takes this stage."""
        return bool(getattr(job, self.field, None))

    def before(self, run: JobRun, requests: dict[int, Any]) -> dict[int, Any]:
        """Return the parameters of the job's requests that are still to be run, by index. Raises as `ActiveJob.make`,
        and `Invalid`.
        """
        return requests

    def after(self, job: ImageJob, outputs: list[Output], stopped: Callable[[], bool]) -> list[Output]:
        """Return the outputs of all requests, in order, as they are to be shown. Raises `StageFailed`, and `Aborted`
        once `stopped`.
        """
        return outputs


def check_all(stages: Iterable[JobStage], job: ImageJob, claim: Claim | None = None) -> ImageJob:
    """Return the job as all stages check it. Raises as they do."""
    for stage in stages:
        job = stage.check(job, claim)
    return job


def requested(stages: Iterable[JobStage], job: ImageJob) -> Sequence[JobStage]:
    """Return the stages that a checked job takes."""
    return [stage for stage in stages if stage.is_requested(job)]


def card_fields(
    stages: Iterable[JobStage], handler: ImageJobHandler, handlers: Mapping[str, JobHandler]
) -> dict[str, Any]:
    """Return the fields of a model's card that all stages have."""
    return {name: value for stage in stages for name, value in stage.card(handler, handlers).items()}
