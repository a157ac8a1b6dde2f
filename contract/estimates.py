"""Estimates of a job's seconds from the costs in its model's card."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from contract import control, plan
from contract.card import TINY, BySize, ImageCard, ImageCosts
from contract.image import PICTURES, ImageJob


def work_s(card: ImageCard, job: ImageJob) -> float:
    """Seconds that the job occupies one worker whose batches are full."""
    return _work_s(card, job, card.costs)


def solo_s(card: ImageCard, job: ImageJob) -> float:
    """Seconds that the job takes at best: on an idle worker, with its n images in one batch."""
    return _solo_s(card, job, card.costs)


def least_s(card: ImageCard, job: ImageJob) -> float:
    """Seconds that the job takes at best, as far as iterations have shown it: 0 before any ran."""
    return _solo_s(card, job, card.least_costs, share=0.0)


def _work_s(card: ImageCard, job: ImageJob, costs: ImageCosts, share: float = 1.0) -> float:
    """Return `work_s` by these costs; `share` of what an extension without a cost is taken for counts."""
    steps_s = _steps_s(card, job, costs, costs.row_step_s, costs.shallow_row_step_s, share)
    return job.n * (costs.encode_s + steps_s + _vae_s(card, job, costs))


def _solo_s(card: ImageCard, job: ImageJob, costs: ImageCosts, share: float = 1.0) -> float:
    # Measured with two rows; one row takes at least half of that.
    steps_s = _steps_s(card, job, costs, costs.solo_step_s, costs.shallow_solo_step_s, share) / 2
    return max(costs.encode_s + steps_s + _vae_s(card, job, costs), _work_s(card, job, costs, share))


def _vae_s(card: ImageCard, job: ImageJob, costs: ImageCosts) -> float:
    """Seconds of an image's decoding and upscaling; by a tiny decoder without an announced cost as by the VAE."""
    tiny = job.picture.vae == TINY and card.costs.vae_tiny_s
    by_network = job.picture.upscale is not None and not job.picture.upscale.is_filter
    enlarged = math.prod(job.picture.size) * 1e-6 * costs.upscale_megapixel_s if by_network else 0
    return enlarged + (costs.vae_tiny_s if tiny else costs.vae_s)


def _steps_s(
    card: ImageCard, job: ImageJob, costs: ImageCosts, deep_step_s: BySize, shallow_step_s: Mapping[str, BySize],
    share: float,
) -> float:  # fmt: skip
    """Seconds of all rows of all steps that are run. Shallow steps without an announced cost count as deep."""
    step_count, (width, height) = job.picture.made, job.picture.size
    cached = _schedule(card, job, step_count)
    table = None if cached is None else shallow_step_s.get(cached.depth)
    deep_s = _step_s(deep_step_s, width, height)
    shallow_s = _step_s(table, width, height) if table else deep_s
    row_count = card.defaults.rows(job.picture.guidance_scale)
    steps, depths = plan.rows_and_depths(cached, job.picture.guidance, step_count, row_count), job.picture.own_steps
    planned = [(rows, deep or step >= depths) for step, (rows, deep) in enumerate(steps)]  # a refiner's are deep
    measured = {control.FIELD: _step_s(costs.control_row_step_s, width, height)}
    added_s = sum(
        kind.deep_rows(getattr(job.picture, field), planned, depths)
        * (measured.get(field) or share * deep_s * kind.SHARE)
        for field, kind in PICTURES.items()
    )
    return added_s + sum(n * rows * (deep_s if deep else shallow_s) for (rows, deep), n in Counter(planned).items())


def _schedule(card: ImageCard, job: ImageJob, steps: int) -> plan.DeepCache | None:
    """The job's DeepCache schedule, or else the worker's default. None: all steps are deep, or this version cannot read
    the schedule.
    """
    try:
        schedule = plan.read_schedule(card.deepcache if job.deepcache is None else job.deepcache)
    except ValueError:
        return None
    return schedule if schedule is not None and schedule.error_for(steps) is None else None


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
