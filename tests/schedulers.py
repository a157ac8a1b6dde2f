"""diffusers' own schedulers by the names of our samplers: the reference of every parity test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import (
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    TCDScheduler,
)

CLASSES: dict[str, Any] = {
    "euler": EulerDiscreteScheduler,
    "euler-ancestral": EulerAncestralDiscreteScheduler,
    "dpm++2m": DPMSolverMultistepScheduler,
    "dpm++2m-sde": DPMSolverMultistepScheduler,
    "lcm": LCMScheduler,
    "tcd": TCDScheduler,
    "edm-euler": EDMEulerScheduler,
}


def scheduler(config: Mapping[str, Any], name: str, **settings: Any) -> Any:
    """The scheduler as a user of diffusers makes it from a model's config."""
    if name == "dpm++2m-sde" or config.get("algorithm_type") == "sde-dpmsolver++":
        settings["algorithm_type"] = "dpmsolver++" if name == "dpm++2m" else "sde-dpmsolver++"
    return CLASSES[name].from_config(config, **settings)


def replaced(schedule_type: str | None) -> dict[str, Any]:
    """The settings that a request's schedule type stands for."""
    if schedule_type is None:
        return {}
    curves = {f"use_{curve}_sigmas": curve == schedule_type for curve in ("karras", "exponential", "beta")}
    return curves if any(curves.values()) else {**curves, "timestep_spacing": schedule_type}
