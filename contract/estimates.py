"""Estimates of a job's seconds from the costs in its model's card."""

from __future__ import annotations

import math
from collections.abc import Mapping

from contract import plan
from contract.card import BySize, ImageCard
from contract.image import ImageJob


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
