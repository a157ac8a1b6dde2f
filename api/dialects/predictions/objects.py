"""Converts job records and model cards to the objects of Replicate's API. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from api.dialects.predictions import inputs
from api.jobs.presentation import results, shown
from api.pictures.inline_images import Inline
from api.pictures.links import ImageLinks
from contract.card import ImageCard
from contract.errors import Invalid
from contract.image import ImageJob
from core.artifacts import digest_of
from core.jobs.files import KEPT_S, File
from core.jobs.record import Job, JobState, Moment

FORM = "prediction"
"""The `form` of a webhook whose messages are predictions."""
EVENTS = {
    "start": Moment.STARTED, "output": Moment.SUCCEEDED, "logs": Moment.PROGRESSED, "completed": Moment.ENDED,
}  # fmt: skip
"""The events that a webhook may be told of."""
OWNER = "diptych"
_COG = "0.17.0"  # the version of Cog's HTTP API that is followed
_BAR = 10  # characters
_STATUS = {
    JobState.QUEUED: "starting",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "canceled",
    JobState.EXPIRED: "failed",
}


def receiver(events: Iterable[str]) -> dict[str, Any]:
    """What a webhook has that is told of these events, besides its address."""
    names = [*events]  # workers of 0.3.0 read them
    return {"form": FORM, "events": names, "moments": [EVENTS[name].value for name in names]}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Cog's or Replicate's API: the path of its predictions, and whether their output is always data URLs."""

    path: str
    inline: bool

    def inlines(self, links: ImageLinks) -> bool:
        """Return whether output is data URLs, also because Replicate's clients open https: and data: URLs alone."""
        return self.inline or not links.base.startswith("https:")


COG = Dialect("predictions", inline=True)
REPLICATE = Dialect("v1/predictions", inline=False)


def prediction(job: Job, links: ImageLinks, dialect: Dialect = REPLICATE, *, inline: bool = False) -> dict[str, Any]:
    """A job as a prediction. Its output is links, or with `inline` data URLs as `Inline` values.

    The input and the logs of a job whose parameters this version cannot read are empty.
    """
    id, base = links.job_id(job), links.base
    path = f"{base}{dialect.path}/{id}"
    request = _request(job)
    output = [
        Inline(image["key"], image.get("size_bytes"), f"data:{image['media_type']};base64,")
        if inline
        else links.image(job, k, image["key"])
        for k, image in enumerate(results(job))
        if shown(image)
    ]
    return {
        "id": id,
        "model": qualified(job.model),
        "version": job.model,
        "status": status(job),
        "input": {} if request is None else inputs.given_back(request.to_dict()),
        "output": output if job.state is JobState.SUCCEEDED else None,
        "error": error(job),
        "logs": "" if request is None else logs(job, request),
        "metrics": _metrics(job),
        "created_at": time(job.created),
        "started_at": time(job.started),
        "completed_at": time(job.ended),
        "source": "api",
        "data_removed": False,
        "urls": {
            "get": path,
            "cancel": f"{path}/cancel",
            "stream": f"{base}{REPLICATE.path}/{id}/stream",
        },
    }


def status(job: Job) -> str:
    """The status of a prediction: starting until its job has made progress."""
    if job.state is JobState.RUNNING:
        return "processing" if job.progress else "starting"
    return _STATUS[job.state]


def error(job: Job) -> str | None:
    """Why a prediction failed; None if it did not."""
    if job.state is JobState.EXPIRED:
        return "The deadline passed before the job was done."
    if job.state is not JobState.FAILED:
        return None
    return str((job.error or {}).get("message") or "The job failed.")


def _request(job: Job) -> ImageJob | None:
    """The job's parameters; None if this version cannot read them."""
    try:
        return ImageJob.read(job.parameters)
    except Invalid:
        return None


def logs(job: Job, request: ImageJob) -> str:
    """The seed, the progress as a bar that Replicate's clients parse, and warnings."""
    lines = [f"Using seed: {request.picture.seed}"]
    done, steps = ((job.progress or {}).get(name, 0) for name in ("steps_done", "steps"))
    if job.state is JobState.SUCCEEDED:
        done = steps = request.n * request.picture.made
    if steps:
        lines.append(bar(done, steps))
    lines += dict.fromkeys(warning for image in results(job) for warning in image.get("warnings", []))
    return "\n".join(lines) + "\n"


def bar(done: int, steps: int) -> str:
    """A line of progress in the form of tqdm."""
    filled = _BAR * done // steps
    return f"{100 * done // steps:3d}%|{'█' * filled}{' ' * (_BAR - filled)}| {done}/{steps}"


def qualified(model: str) -> str:
    """The model's name in the form owner/name."""
    return model if model.count("/") == 1 else f"{OWNER}/{model}"


def model_fields(card: ImageCard, owner: str, name: str, base: str, started: float) -> dict[str, Any]:
    """What Replicate's object of a model has besides OpenAI's."""
    return {**_model(owner, name, base), "latest_version": version(card, started)}


def listed_model(name: str, base: str) -> dict[str, Any]:
    """Replicate's object of a model in a list, without its version."""
    owner, slash, own = name.rpartition("/")
    return {**_model(owner if slash else OWNER, own, base), "latest_version": None}


def _model(owner: str, name: str, base: str) -> dict[str, Any]:
    unknown = ("description", "github_url", "paper_url", "license_url", "cover_image_url", "default_example")
    url = f"{base}v1/models/{owner}/{name}"
    return {"owner": owner, "name": name, "url": url, "visibility": "public", "run_count": 0, **dict.fromkeys(unknown)}


def version(card: ImageCard, started: float) -> dict[str, Any]:
    """The only version of a model, whose id is the model's name."""
    document = {
        "openapi": "3.0.2",
        "info": {"title": card.name, "version": card.precision},
        "paths": {},
        "components": {"schemas": inputs.components(card)},
    }
    return {"id": card.name, "created_at": time(started), "cog_version": _COG, "openapi_schema": document}


def file_object(file: File, media_type: str, base: str) -> dict[str, Any]:
    """Replicate's object of an uploaded file."""
    return {
        "id": file.id, "name": file.name, "content_type": media_type, "size": file.size, "etag": file.key,
        "metadata": {}, "checksums": {"sha256": digest_of(file.key)},
        "created_at": time(file.created), "expires_at": time(file.created + KEPT_S),
        "urls": {"get": f"{base}v1/files/{file.id}"},
    }  # fmt: skip


def time(seconds: float | None) -> str | None:
    """Seconds since 1970 in ISO 8601."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _metrics(job: Job) -> dict[str, float]:
    """The seconds that it ran, and that it took from its creation."""
    if job.ended is None:
        return {}
    ran_s = 0.0 if job.started is None else job.ended - job.started
    return {"predict_time": round(ran_s, 3), "total_time": round(job.ended - job.created, 3)}
