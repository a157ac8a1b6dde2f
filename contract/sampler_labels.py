"""AUTOMATIC1111's names of samplers and noise schedules, which clients send and files have, and what they are here."""

from __future__ import annotations

import re
from collections.abc import Collection

from contract.schedule import CURVES

AUTOMATIC = "automatic"
# The web UI's samplers that are offered: the schedulers here, of which a model has one, and the web UI's other names.
SAMPLERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Euler": (("euler", "flow-euler", "edm-euler"), ("k_euler",)),
    "Euler a": (("euler-ancestral",), ("k_euler_a", "k_euler_ancestral", "euler ancestral")),
    "DPM++ 2M": (("dpm++2m",), ("k_dpmpp_2m",)),
    "DPM++ 2M SDE": (("dpm++2m-sde",), ("k_dpmpp_2m_sde",)),
    "LCM": (("lcm",), ("k_lcm",)),
    "TCD": (("tcd",), ()),
}
SCHEDULES: dict[str, tuple[str, str | None]] = {
    AUTOMATIC: ("Automatic", None), "uniform": ("Uniform", "linspace"), "karras": ("Karras", "karras"),
    "exponential": ("Exponential", "exponential"), "sgm_uniform": ("SGM Uniform", "trailing"),
    "beta": ("Beta", "beta"), "normal": ("Normal", "linspace"), "ddim": ("DDIM", "leading"),
    "simple": ("Simple", "trailing"),
}  # fmt: skip
"""The web UI's noise schedules by name: the label, and the `schedule_type`."""
CURVE_LABELS = {curve: label for label, curve in SCHEDULES.values() if curve in CURVES}
# A sampler and its curve in one name, as before version 1.9: "DPM++ 2M Karras", "k_dpmpp_2m_ka".
_SUFFIX = re.compile(r"(?P<sampler>.*\S)[ _](?P<curve>karras|exponential|ka)")


def label(scheduler: str) -> str:
    """The web UI's name of a scheduler; the scheduler's own where there is none."""
    return next((name for name, (schedulers, _) in SAMPLERS.items() if scheduler in schedulers), scheduler)


def without_curve(name: str) -> tuple[str, str | None]:
    """A sampler's name in lower case without the curve that it may end with, and that."""
    key = name.strip().lower()
    suffix = _SUFFIX.fullmatch(key)
    return (
        (key, None) if suffix is None else (suffix["sampler"], {"ka": "karras"}.get(suffix["curve"], suffix["curve"]))
    )


def scheduler_of(name: str, offered: Collection[str]) -> tuple[str, str | None] | None:
    """The scheduler of these that the web UI calls so, and the curve that the name ends with; None: there is none."""
    key, curve = without_curve(name)
    for sampler, (schedulers, aliases) in SAMPLERS.items():
        if key in (sampler.lower(), *aliases):
            return next(((scheduler, curve) for scheduler in schedulers if scheduler in offered), None)
    return None
