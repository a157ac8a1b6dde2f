"""Few-step students of diffusion models: recognised by a model's configs or a LoRA's name, and how they are drawn.

Imports no torch. Methods: adversarial diffusion distillation (Turbo, Sauer et al., 2023), SDXL-Lightning (Lin et al.,
2024), Hyper-SD (Ren et al., 2024), latent consistency (LCM, Luo et al., 2023), trajectory consistency (TCD, Zheng et
al., 2024) and distribution matching (DMD2, Yin et al., 2024).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from contract import loras
from contract.card import MAX_GUIDANCE, ImageDefaults
from contract.schedule import OWN, NoiseSchedule, schedule_of


@dataclass(frozen=True, slots=True)
class _Method:
    """The way to draw with the students of one method, as their authors publish it."""

    scheduler: str
    steps: int = 4
    most_steps: int = 8
    schedule: NoiseSchedule = OWN


_TRAILING = NoiseSchedule("trailing")
_METHODS = {
    "turbo": _Method("euler-ancestral", most_steps=4, schedule=_TRAILING),
    "lightning": _Method("euler", schedule=_TRAILING),
    "hyper": _Method("euler", schedule=_TRAILING),  # published with DDIM, which Euler equals
    "lcm": _Method("lcm"),
    "tcd": _Method("tcd", schedule=NoiseSchedule(eta=0.3)),
    "dmd2": _Method("lcm", most_steps=4, schedule=NoiseSchedule(timesteps=(999, 749, 499, 249))),
}
_NAME = re.compile(rf"(?<![a-z])({'|'.join(_METHODS)})(?![a-z])")
_MODELS = re.compile(r"(?:sd|xl)[ _-]?(?:hyper|turbo|lightning)|hyper[ _-]?sd")  # alone they may be words of a style
_STEPS = re.compile(r"(?<![0-9])([0-9]{1,2})[ _-]?steps?(?![a-z])")
_GUIDED = re.compile(r"(?<![a-z])cfg(?![a-z])")  # Hyper-SD's that keep guidance, of 5 to 8
_CLASSES = {"LCMScheduler": "lcm", "TCDScheduler": "tcd"}
_EULER = ("EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler")


def of_model(name: str, scheduler: Mapping[str, Any], denoiser: Mapping[str, Any]) -> ImageDefaults | None:
    """Return how this model is drawn if it is a student, by its scheduler_config.json and its denoiser's config.json.

    A guidance embedding, a scheduler of consistency models, and an ancestral sampler with trailing timesteps of a model
    for 512 pixels (Turbo's) are signs of one. Where the scheduler is an ordinary one the name must say the method and,
    unless its timesteps are trailing, the steps.
    """
    if denoiser.get("time_cond_proj_dim") is not None:  # Luo et al., 2023, section 4.2
        return replace(_defaults("lcm", _words(name)[1]), guidance_scale=8.0, guided_above=MAX_GUIDANCE)
    method, steps = _method_of(name, scheduler, denoiser)
    if method == "hyper" and steps == 1:
        return replace(_defaults("lcm", 1), timesteps=(800,), student=method)
    return _defaults(method, steps) if method else None


def _method_of(name: str, scheduler: Mapping[str, Any], denoiser: Mapping[str, Any]) -> tuple[str, int | None]:
    """The method of a student by its sampler and name, "" for none, and the steps in its name."""
    words, steps = _words(name)
    class_name = str(scheduler.get("_class_name"))
    trailing = (
        scheduler.get("timestep_spacing") == "trailing"
        and scheduler.get("prediction_type", "epsilon") == "epsilon"
        and not scheduler.get("rescale_betas_zero_snr")
    )
    if (method := _CLASSES.get(class_name)) is not None:
        fits = words and _METHODS[words].scheduler == method
        return words if fits else method, steps  # a scheduler says more than a name of another method
    if trailing and class_name == "EulerAncestralDiscreteScheduler" and (denoiser.get("sample_size") or 128) <= 64:
        return words or "turbo", steps
    return words if words and (steps or (trailing and class_name in _EULER)) else "", steps


def of_lora(name: str) -> ImageDefaults | None:
    """Return how pictures are drawn with a LoRA of this name, if it makes a student of its model."""
    method, steps = _words(name)
    if method == "hyper" and steps == 1:  # one LoRA for one to eight steps
        return replace(_defaults("tcd", None), eta=1.0, student=method)
    if not method or not (steps or method in ("lcm", "tcd", "dmd2") or _MODELS.search(name.lower())):
        return None
    defaults = _defaults(method, steps)
    return replace(defaults, guidance_scale=5.0) if _GUIDED.search(name.lower()) else defaults


def of_loras(text: str, schedulers: Collection[str]) -> ImageDefaults | None:
    """Return the same for a selection of LoRAs, which `loras.read` must have accepted: the first that is a student's,
    of a method that these samplers can draw.
    """
    defaults = (of_lora(reference.name) for reference in loras.read(text) if reference.scale > 0)
    return next(
        (reference for reference in defaults if reference is not None and reference.scheduler in schedulers), None
    )


def fill(values: Mapping[str, Any], defaults: ImageDefaults) -> dict[str, Any]:
    """The fields of a request with `defaults` where it leaves steps, guidance, or sampler and schedule open."""
    filled = {name: value for name, value in values.items() if value is not None}
    if "scheduler" not in filled and replace(schedule_of(filled), eta=None) == OWN:  # eta alone is the student's own
        named = {name: getattr(defaults, name) for name in ("scheduler", "schedule_type", "eta")}
        if len(defaults.timesteps or ()) == filled.get("steps", defaults.steps):
            named["timesteps"] = defaults.timesteps
        filled = {name: value for name, value in named.items() if value is not None} | filled
    filled.setdefault("steps", schedule_of(filled).steps or defaults.steps)
    filled.setdefault("guidance_scale", defaults.guidance_scale)
    return filled


def warnings(
    defaults: ImageDefaults, schedulers: Collection[str], lora: str, steps: int, guidance_scale: float
) -> list[str]:
    """Return what to tell a user whose picture has more steps than its student was made for, or guidance."""
    student = of_loras(lora, schedulers) or defaults
    if not student.student:
        return []
    unguided = student.guidance_scale <= student.guided_above
    guided = unguided and guidance_scale > student.guided_above
    if steps <= student.most_steps and not guided:
        return []
    source = "a LoRA of this request" if student is not defaults else "the model"
    free = not unguided or student.guided_above >= MAX_GUIDANCE  # of what guidance it takes
    conditions = f"up to {student.most_steps} steps" + ("" if free else " without guidance")
    had = f"{steps} steps" + (f" with guidance {guidance_scale:g}" if guided else "")
    return [f"{source} is a few-step student ({student.student}) for {conditions}; this image had {had}"]


def _words(name: str) -> tuple[str, int | None]:
    """The method and the number of steps that a name says; "" and None."""
    lower = name.lower()
    method, steps = _NAME.search(lower), _STEPS.search(lower)
    count = int(steps[1]) if steps else 0
    return method[1] if method else "", count if 1 <= count <= 16 else None


def _defaults(method: str, steps: int | None) -> ImageDefaults:
    of = _METHODS[method]
    count = steps or of.steps
    timesteps = of.schedule.timesteps if count == of.steps else None
    return ImageDefaults(
        steps=count, guidance_scale=1.0, scheduler=of.scheduler, schedule_type=of.schedule.schedule_type,
        timesteps=timesteps, eta=of.schedule.eta, student=method, most_steps=steps or of.most_steps,
    )  # fmt: skip
