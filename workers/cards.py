"""What a worker says of its model: name, sizes, limits, and what the measured cost curves mean for a whole picture.

Knows the image runner; knows nothing of Redis and of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.jobs.registry import ModelCard
from pipeline import parameters
from pipeline.execution import DEEP, ENCODE, VAE, VAE_ROWS, Group
from pipeline.runner import ImageRunner
from workers.panels import MAX_IMAGES

_STEPS = 20  # of the picture that capacity is counted in, with guidance
_WIDTHS = (2, 4, 8, 16, 32, 64, 128)


def image_card(runner: ImageRunner) -> ModelCard:
    """The card of the runner's model, with its costs as known now.

    Safe to call while the engine works, but for a KeyError or RuntimeError where a curve changes this very moment:
    the next call succeeds.
    """
    model = runner.model
    native = (model.native, model.native)
    # Only what was measured, and the native size in any case: others are told from these by their area.
    known = {size for phase, size, _ in runner.execution.costs() if phase == DEEP} | {native}
    solo_s = {size: runner.cost(Group(DEEP, size), 2) for size in known}
    row_s = {size: _best(runner, Group(DEEP, size), _WIDTHS) for size in known}
    encode_s = runner.cost(Group(ENCODE, (0, 0)), 2)  # two prompts, one picture
    vae_s = _best(runner, Group(VAE, native), range(1, VAE_ROWS + 1))
    return ModelCard(
        name=model.name,
        modality=runner.modality,
        precision=model.precision,
        device=str(model.device),
        native=model.native,
        sizes=[list(size) for size in runner.sizes],
        schedulers=list(runner.schedulers),
        default_scheduler=runner.default_scheduler,
        limits={
            "max_prompt_characters": parameters.MAX_PROMPT_CHARACTERS,
            "max_steps": parameters.MAX_STEPS,
            "max_guidance": parameters.MAX_GUIDANCE,
            "max_seed": parameters.MAX_SEED,
            "max_images": MAX_IMAGES,
        },
        costs={
            "encode_s": encode_s,
            "vae_s": vae_s,
            "solo_step_s": {f"{w}x{h}": seconds for (w, h), seconds in solo_s.items()},
            "row_step_s": {f"{w}x{h}": seconds for (w, h), seconds in row_s.items()},
        },
        capacity_per_s=1 / (encode_s + 2 * _STEPS * row_s[native] + vae_s),
    )


def _best(runner: ImageRunner, group: Group, widths: Iterable[int]) -> float:
    """Seconds of one row where the forward is as wide as is cheapest."""
    limit = runner.limit(group)
    return min(runner.cost(group, rows) / rows for rows in {*widths, limit} if rows <= limit)
