"""What the names that AUTOMATIC1111's API has for samplers, noise schedules and models mean for a model here."""

from __future__ import annotations

import re
from collections.abc import Iterable

from api.errors import invalid_field
from contract import sampler_labels
from contract.card import ImageCard
from contract.sampler_labels import AUTOMATIC, SCHEDULE_TYPES, SCHEDULES, Sampling, label

_OTHER_SCHEDULES = ("polyexponential", "kl_optimal", "align_your_steps", "align_your_steps_gits", "turbo")
_AUTOMATIC = {"dpm++2m": "karras", "dpm++2m-sde": "exponential"}  # as the options of the web UI's samplers say


def sampling(card: ImageCard, sampler: str | None, schedule: str | None) -> tuple[dict[str, str], list[str]]:
    """The fields that these two names mean for a model, without those that they leave to it; and warnings.

    Raises `ApiError` for a name that is unknown.
    """
    warnings: list[str] = []
    named = sampler_labels.read(sampler, card.schedulers) if sampler else Sampling(None)
    if named is None:
        known = ", ".join(map(label, card.schedulers))
        raise invalid_field("scheduler", f"is no sampler that is known; this model has {known}")
    name, ran = named.scheduler, named.scheduler or card.default_scheduler
    if not named.same:
        warnings.append(f"sampler_name: is not offered; {label(ran)} is used")
    key = (schedule or AUTOMATIC).strip().lower().replace(" ", "_")
    key = AUTOMATIC if key in ("use_same_scheduler", "") else key
    schedule_type = named.curve
    if schedule_type is None and key in SCHEDULES:
        schedule_type = SCHEDULES[key][1] if key != AUTOMATIC else _AUTOMATIC.get(name or "")
    elif schedule_type is None and key in _OTHER_SCHEDULES:
        warnings.append("scheduler: is not offered; the model's own noise schedule is used")
    elif schedule_type is None:
        raise invalid_field("schedule_type", f"must be one of {', '.join(label for label, _ in SCHEDULES.values())}")
    if schedule_type is not None and schedule_type not in SCHEDULE_TYPES.get(ran, ()):
        warnings.append(f"scheduler: {ran} does not take {schedule_type}; the model's own noise schedule is used")
        schedule_type = None
    fields = {"scheduler": name, "schedule_type": schedule_type}
    return {name: value for name, value in fields.items() if value is not None}, warnings


def model_names(title: str) -> Iterable[str]:
    """The names of a model that this title may mean: as it is, without its hash, without its folder and ending."""
    yield title
    bare = re.sub(r" \[[0-9a-f]{1,64}\]$", "", title.strip())
    yield bare
    bare = re.sub(r"\.(safetensors|ckpt)$", "", bare)
    yield bare
    yield re.split(r"[/\\]", bare)[-1]
