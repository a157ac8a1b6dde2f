"""Turns request fields into a job: checks them against the model card, fills in defaults, estimates the work."""

from __future__ import annotations

import math
from collections.abc import Mapping

from api.cards import C, RegistrySnapshot
from api.errors import ApiError, invalid_as_api_error, invalid_field
from api.uploads import Upload
from contract import plan
from contract.bounds import PRIORITY
from contract.card import BySize, ImageCard, ModelCard, TextCard
from contract.image import ImageJob, image_job
from contract.image_fields import ImageFields
from core.jobs.broker import level
from core.jobs.record import JobDraft, QueueBacklog, new_id

_ENDPOINTS: dict[type[ModelCard], tuple[str, str]] = {
    ImageCard: ("an image", "/v1/images/generations"),
    TextCard: ("a text", "/v1/chat/completions"),
}


def image_draft(fields: ImageFields, card: ImageCard, upload: Upload | None = None) -> JobDraft:
    """Build the job for these fields on this model, without an owner. The source image (`upload`) is not stored yet.

    Raises `ApiError` (400) naming the field that the model does not offer.
    """
    size, masked = (None, False) if upload is None else (upload.size, upload.mask is not None)
    with invalid_as_api_error():
        job = image_job(fields, card.offer, size, masked=masked)
    return JobDraft(
        id=new_id(),
        modality="image",
        model=card.name,
        parameters=job.to_dict(),
        priority=PRIORITY if fields.priority is None else fields.priority,
        deadline_s=fields.deadline_s,
        work_ms=round(1000 * work_s(card, job)),
    )


def work_s(card: ImageCard, job: ImageJob) -> float:
    """Seconds that the job occupies one worker whose batches are full."""
    steps_s = _rows(card, job) * _steps_s(card, job, card.costs.row_step_s, card.costs.shallow_row_step_s)
    return job.n * (card.costs.encode_s + steps_s + card.costs.vae_s)


def solo_s(card: ImageCard, job: ImageJob) -> float:
    """Seconds that the job takes at best: on an idle worker, with its n images in one batch."""
    # Measured with two rows; one row takes at least half of that.
    steps_s = _rows(card, job) / 2 * _steps_s(card, job, card.costs.solo_step_s, card.costs.shallow_solo_step_s)
    return max(card.costs.encode_s + steps_s + card.costs.vae_s, work_s(card, job))


def _rows(card: ImageCard, job: ImageJob) -> float:
    """Of an image in each forward, on average."""
    if card.defaults.rows(job.picture.guidance_scale) == 1:
        return 1
    return 1 + sum(plan.guided(job.picture.guidance_interval, job.made)) / max(1, job.made)


def check_deadline(draft: JobDraft, card: ImageCard, backlog: QueueBacklog, ready: int) -> None:
    """Reject a deadline that is shorter than the best case. Raises `ApiError` (400) with the estimate in seconds.

    Without a ready worker there is no estimate: the job is accepted, and expires if no worker starts in time.
    """
    if draft.deadline_s is None or ready < 1:
        return
    best_s = solo_s(card, ImageJob.read(draft.parameters))
    if level(draft.priority) > 0:  # the most urgent jobs overtake the queue
        best_s += backlog.queued_ms / 1000 / ready
    if draft.deadline_s < best_s:
        message = f"cannot be met: with what is queued it takes {_rounded(best_s)} s at best"
        raise invalid_field("deadline_s", message, "deadline_hopeless")


def check_expansion(fields: ImageFields, expands: bool) -> None:
    """Reject prompt expansion where `expands` says that no worker offers it. Raises `ApiError` (400)."""
    if fields.expand_prompt and not expands:
        raise invalid_field("expand_prompt", "no text model is served beside this model", "no_text_model")


def retry_after_s(wait_s: float) -> int:
    """`Retry-After` for a full queue: the seconds until its work is done, clamped to 1 to 120."""
    return min(120, max(1, math.ceil(wait_s)))


def unknown_model() -> ApiError:
    return ApiError(404, "model: is not known; see GET /v1/models", param="model", code="model_not_found")


def no_such_model(now: RegistrySnapshot, name: str | None, kind: type[C]) -> ApiError | None:
    """The error for a name that no model of this kind has: another kind's, or unknown. None: no model of this kind was
    announced yet.
    """
    for other, (article, endpoint) in _ENDPOINTS.items():
        card = now.model(name, other) if name is not None and other is not kind else None
        if card is not None:
            words = f"{card.name} is {article} model; use POST {endpoint}"
            return invalid_field("model", words, "wrong_modality")
    return None if now.model(None, kind) is None else unknown_model()


def no_model() -> ApiError:
    message = "No worker has announced a model yet; see GET /readyz."
    return ApiError(503, message, code="no_model", headers={"Retry-After": "10"})


def _steps_s(card: ImageCard, job: ImageJob, deep_step_s: BySize, shallow_step_s: Mapping[str, BySize]) -> float:
    """Seconds of all steps that are run. Shallow steps without an announced cost count as deep."""
    made, (width, height) = job.made, job.size
    deep_s = _step_s(deep_step_s, width, height)
    cached = _schedule(card, job, made)
    table = None if cached is None else shallow_step_s.get(cached.depth)
    if cached is None or not table:
        return made * deep_s
    deep = sum(cached.plan(made))
    return deep * deep_s + (made - deep) * _step_s(table, width, height)


def _schedule(card: ImageCard, job: ImageJob, made: int) -> plan.DeepCache | None:
    """The job's DeepCache schedule, or else the worker's default. None: all steps are deep, or this version cannot read
    the schedule.
    """
    try:
        found = plan.read(card.deepcache if job.deepcache is None else job.deepcache)
    except ValueError:
        return None
    return found if found is not None and found.error_for(made) is None else None


def _step_s(table: BySize, width: int, height: int) -> float:
    """Seconds of one step at this size. An unmeasured size is scaled by area from the nearest measured one."""
    if not table:
        return 0.0
    exact = table.get(f"{width}x{height}")
    if exact is not None:
        return exact
    areas = {math.prod(map(int, size.split("x"))): seconds for size, seconds in table.items()}
    near = min(areas, key=lambda area: (abs(math.log(area / (width * height))), area))
    return areas[near] * width * height / near


def _rounded(seconds: float) -> str:
    """Rounded up to two digits, so that a deadline equal to the reported estimate is accepted."""
    digits = max(0, 1 - math.floor(math.log10(seconds)))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{digits}f}"
