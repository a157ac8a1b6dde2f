"""The request that draws a job's images again."""

from __future__ import annotations

from typing import Any

from contract.image import ImageJob
from contract.plan import OFF


def redraw(job: ImageJob, model: str, deepcache: Any) -> dict[str, Any] | None:
    """Fields for `POST /v1/jobs` in which nothing is left to chance or to defaults; None for one that reads
    pictures.

    `deepcache` is the schedule that was followed, in the form of the request's field. The plan is "off", since what it
    said is among the fields.
    """
    if job.picture.edit is not None or job.picture.pictures:
        return None
    fields = job.to_dict()
    size = f"{fields.pop('width')}x{fields.pop('height')}"
    fields |= {"type": "image", "model": model, "size": size, "plan": OFF, "deepcache": deepcache}
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in known.items()}
