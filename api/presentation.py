"""How a job's record looks to clients. Knows records and URLs; reads nothing and decides nothing."""

from __future__ import annotations

from typing import Any

from core.jobs.record import Job, JobState


def job_object(job: Job, base_url: str) -> dict[str, Any]:
    """The public job object. `base_url` ends in a slash; pictures' addresses start with it."""
    return {
        "id": job.id,
        "object": "job",
        "status": job.state.value,
        "model": job.model,
        "created_at": job.created,
        "started_at": job.started,
        "completed_at": job.ended,
        "expires_at": job.deadline,
        "attempt": job.attempt,
        "progress": job.progress,
        "error": None if job.error is None else {"code": job.error.get("code"), "message": job.error.get("message")},
        "images": None if job.state is not JobState.SUCCEEDED else [
            {
                "url": image_url(job, k, base_url),
                **{name: image.get(name) for name in ("seed", "width", "height", "media_type", "size_bytes")},
                "warnings": image.get("warnings", []),
            }
            for k, image in enumerate(results(job))
        ],
    }  # fmt: skip


def results(job: Job) -> list[dict[str, Any]]:
    """What a job that succeeded made: of each picture its key and what is told of it."""
    images: list[dict[str, Any]] = (job.result or {}).get("images", [])
    return images


def image_url(job: Job, k: int, base_url: str) -> str:
    return f"{base_url}v1/jobs/{job.id}/images/{k}"
