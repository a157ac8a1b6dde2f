"""What the names that AUTOMATIC1111's API has for samplers, noise schedules and models mean for a model here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from api.errors import invalid_field
from contract.card import ImageCard
from contract.sampler_labels import AUTOMATIC, SAMPLERS, SCHEDULES, label, scheduler_of, without_curve
from contract.schedule import CURVES, SPACINGS, TYPES

# Samplers that the model does not have: the first of these schedulers that it has is used, with a warning.
_SMOOTH, _NOISY = ("dpm++2m", "euler"), ("dpm++2m-sde", "euler-ancestral")
_NEAREST = {
    **dict.fromkeys(
        ("euler", "k_euler", "dpm++ 2m", "k_dpmpp_2m", "heun", "k_heun", "dpm2", "k_dpm_2", "lms", "k_lms", "dpm fast",
         "k_dpm_fast", "dpm adaptive", "k_dpm_ad", "ddim", "ddim cfg++", "plms", "unipc"), _SMOOTH,
    ),
    **dict.fromkeys(
        ("dpm++ sde", "k_dpmpp_sde", "dpm++ 2s a", "k_dpmpp_2s_a", "dpm++ 3m sde", "k_dpmpp_3m_sde",
         "dpm++ 2m sde heun", "k_dpmpp_2m_sde_heun", "dpm2 a", "k_dpm_2_a", "restart"), _NOISY,
    ),
}  # fmt: skip
_OTHER_SCHEDULES = ("polyexponential", "kl_optimal", "align_your_steps", "align_your_steps_gits", "turbo")
TAKEN: dict[str, tuple[str, ...]] = {
    "euler": TYPES, "dpm++2m": TYPES, "dpm++2m-sde": TYPES, "euler-ancestral": SPACINGS, "flow-euler": CURVES,
}  # fmt: skip
"""The schedules that each sampler takes; others take none."""
_AUTOMATIC = {"dpm++2m": "karras", "dpm++2m-sde": "exponential"}  # as the options of the web UI's samplers say


class Sampling(NamedTuple):
    """The fields of a request, None where it leaves them to the model, and warnings."""

    scheduler: str | None
    schedule_type: str | None
    warnings: list[str]


def sampling(card: ImageCard, sampler: str | None, schedule: str | None) -> Sampling:
    """What these two names mean for a model. Raises `ApiError` for a name that is unknown."""
    warnings: list[str] = []
    name, curve = (None, None) if not sampler else _sampler(card, sampler, warnings)
    schedule_type = curve or _schedule(schedule, warnings)
    ran = name or card.default_scheduler
    if schedule_type is None and name is not None and _key(schedule or AUTOMATIC) == AUTOMATIC:
        schedule_type = _AUTOMATIC.get(name)
    if schedule_type is not None and schedule_type not in TAKEN.get(ran, ()):
        warnings.append(f"scheduler: {ran} does not take {schedule_type}; the model's own noise schedule is used")
        schedule_type = None
    return Sampling(name, schedule_type, warnings)


def _key(name: str) -> str:
    return name.strip().lower()


def _sampler(card: ImageCard, name: str, warnings: list[str]) -> tuple[str | None, str | None]:
    """The scheduler, and the curve that the name ends with."""
    if _key(name) in card.schedulers:
        return _key(name), None
    if (exact := scheduler_of(name, card.schedulers)) is not None:
        return exact
    key, curve = without_curve(name)
    if key not in _keys():
        key, curve = _key(name), None
    if key not in _keys():
        known = ", ".join(label(scheduler) for scheduler in card.schedulers)
        raise invalid_field("scheduler", f"is no sampler that is known; this model has {known}")
    nearest = _first(_NEAREST.get(key, _NOISY), card.schedulers)
    warnings.append(f"sampler_name: is not offered; {label(nearest or card.default_scheduler)} is used")
    return nearest, curve


def _keys() -> set[str]:
    return {key for sampler, (_, aliases) in SAMPLERS.items() for key in (sampler.lower(), *aliases)} | _NEAREST.keys()


def _first(names: Iterable[str], offered: Collection[str]) -> str | None:
    return next((name for name in names if name in offered), None)


def _schedule(name: str | None, warnings: list[str]) -> str | None:
    key = _key(name or AUTOMATIC).replace(" ", "_")
    if key in ("use_same_scheduler", ""):
        key = AUTOMATIC
    if key in SCHEDULES:
        return SCHEDULES[key][1]
    if key in _OTHER_SCHEDULES:
        warnings.append("scheduler: is not offered; the model's own noise schedule is used")
        return None
    labels = ", ".join(label for label, _ in SCHEDULES.values())
    raise invalid_field("schedule_type", f"must be one of {labels}")


def model_names(title: str) -> Iterable[str]:
    """The names of a model that this title may mean: as it is, without its hash, without its folder and ending."""
    yield title
    bare = re.sub(r" \[[0-9a-f]{1,64}\]$", "", title.strip())
    yield bare
    bare = re.sub(r"\.(safetensors|ckpt)$", "", bare)
    yield bare
    yield re.split(r"[/\\]", bare)[-1]
