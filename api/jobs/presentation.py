"""Converts job records to the JSON objects that clients see. No I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from api.errors import refused_picture
from api.pictures.links import ImageLinks
from contract.content import images_of
from contract.errors import Invalid
from contract.image import ImageFacts, ImageJob
from core.jobs.record import Job, JobPage, JobState


@dataclass(frozen=True, slots=True)
class QueueForecast:
    """A live job's queue position: jobs served before it, and estimated seconds until it starts and ends."""

    position: int | None = None
    start_s: float | None = None
    end_s: float | None = None


def running_forecast(job: Job) -> QueueForecast | None:
    """When a running job will end, by its progress; None if it does not run."""
    if job.state is not JobState.RUNNING:
        return None
    done = (job.progress or {}).get("steps_done", 0) / max(1, (job.progress or {}).get("steps", 1))
    elapsed_s = time.time() - (job.started or time.time())
    return QueueForecast(end_s=max(0.0, elapsed_s) * (1 - done) / done if done else job.work_ms / 1000)


def job_object(job: Job, links: ImageLinks, forecast: QueueForecast | None = None) -> dict[str, Any]:
    """The public job object; its images are links."""
    queue_forecast = forecast or QueueForecast()
    return {
        "id": links.job_id(job),
        "object": "job",
        "status": job.state.value,
        "model": job.model,
        "created_at": job.created,
        "started_at": job.started,
        "completed_at": job.ended,
        "expires_at": job.deadline,
        "position": queue_forecast.position,
        "estimated_start_s": _rounded(queue_forecast.start_s),
        "estimated_end_s": _rounded(queue_forecast.end_s),
        "priority": job.priority,
        "attempt": job.attempt,
        "progress": job.progress,
        "error": None if job.error is None else {"code": job.error.get("code"), "message": job.error.get("message")},
        "images": None if job.state is not JobState.SUCCEEDED else [
            {
                "url": links.image(job, k, image["key"]) if shown(image) else None,
                **{name: image.get(name) for name in ("seed", "width", "height", "media_type", "size_bytes")},
                "warnings": warnings(job, image),
                **facts(image),
            }
            for k, image in enumerate(results(job))
        ],
    }  # fmt: skip


def retrieved(job: Job, content: dict[str, Any]) -> dict[str, Any]:
    """The object of one job, with `request`, which draws it again, and its images' fingerprints."""
    result = job.result or {}
    if job.state is not JobState.SUCCEEDED or "deepcache" not in result:  # an older worker's
        return content
    fingerprints = (image.get("fingerprint") for image in results(job))
    images = [
        {**image, "fingerprint": fingerprint}
        for image, fingerprint in zip(content["images"], fingerprints, strict=True)
    ]
    request = None
    with suppress(Invalid):  # parameters of a newer version
        request = ImageJob.read(job.parameters).redraw(job.model, result["deepcache"])
    return {**content, "images": images} | ({} if request is None else {"request": request})


def next_page(jobs: JobPage, links: ImageLinks) -> str:
    """The id after which the next page of a list begins. The last job that was examined need not be on the page."""
    last = jobs.jobs[-1] if jobs.jobs else None
    return jobs.after if last is None or last.id != jobs.after else links.job_id(last)


def results(job: Job) -> list[dict[str, Any]]:
    """The images of a succeeded job: metadata of each, and its key if it is `shown`."""
    return images_of(job.result or {})


def shown(image: Mapping[str, Any]) -> bool:
    """Return whether there is a file of this image of a result: the service's checker did not refuse it."""
    return "key" in image


def size(job: Job, request: ImageJob) -> str:
    """Width and height of a job's images: of the first one, or else as asked for."""
    width, height = next(((image["width"], image["height"]) for image in results(job)), request.picture.size)
    return f"{width}x{height}"


def warnings(job: Job, image: dict[str, Any]) -> list[str]:
    """What people are told of an image: of its request, and of how it was drawn."""
    return [*job.parameters.get("warnings", []), *image.get("warnings", [])]


def facts(image: dict[str, Any]) -> dict[str, Any]:
    """What stages tell of an image (`contract.image.ImageFacts`), and OpenAI's error of a refused one."""
    names: dict[str, Any] = {name: image[name] for name in ImageFacts.model_fields if name in image}
    return names if shown(image) else {**names, "error": refused_picture().content["error"]}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 2)
