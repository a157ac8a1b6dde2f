"""The samplers and noise schedules of other servers and of diffusers, and what each is here.

One table for all that read requests, model files and pictures.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from contract.schedule import CURVES, SPACINGS, TYPES

AUTOMATIC = "automatic"
SAMPLERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Euler": (("euler", "flow-euler", "edm-euler"), ("k_euler",)),
    "Euler a": (("euler-ancestral",), ("k_euler_a", "k_euler_ancestral", "euler ancestral", "euler_ancestral")),
    "DPM++ 2M": (("dpm++2m",), ("k_dpmpp_2m", "dpmsolvermultistep", "dpmpp_2m")),
    "DPM++ 2M SDE": (("dpm++2m-sde",), ("k_dpmpp_2m_sde", "dpm++2msde", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu")),
    "LCM": (("lcm",), ("k_lcm",)),
    "TCD": (("tcd",), ()),
    "DDIM": (("euler",), ()),  # without noise, which is the default everywhere, DDIM is Euler's method
}
"""By AUTOMATIC1111's label: the samplers that take the same steps, of which a model has one, and other names."""
# What a sampler is drawn with where a model has none that takes the same steps: the first of these that it has.
_SOLVER, _NOISY = ("dpm++2m", "euler"), ("dpm++2m-sde", "euler-ancestral")
NEAREST: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (  # history of the steps before, or solvers of order 2
            "euler", "dpm++ 2m", "heun", "k_heun", "dpm2", "k_dpm_2", "lms", "k_lms", "dpm fast", "k_dpm_fast",
            "dpm adaptive", "k_dpm_ad", "ddim cfg++", "plms", "unipc",
            "heunpp2", "dpm_2", "dpm_fast", "dpm_adaptive", "uni_pc", "uni_pc_bh2", "ipndm", "ipndm_v", "deis",
            "res_multistep", "gradient_estimation",
            "PNDMScheduler", "LMSDiscreteScheduler", "UniPCMultistepScheduler", "DEISMultistepScheduler",
            "DPMSolverSinglestepScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler",
        ), _SOLVER,
    ),
    **dict.fromkeys(
        (  # noise at every step
            "euler a", "dpm++ 2m sde", "lcm", "tcd", "dpm++ sde", "k_dpmpp_sde", "dpm++ 2s a", "k_dpmpp_2s_a",
            "dpm++ 3m sde", "k_dpmpp_3m_sde", "dpm++ 2m sde heun", "k_dpmpp_2m_sde_heun", "dpm2 a", "k_dpm_2_a",
            "restart", "dpm_2_ancestral", "dpmpp_sde", "dpmpp_sde_gpu", "dpmpp_2s_ancestral", "dpmpp_3m_sde",
            "dpmpp_3m_sde_gpu", "ddpm",
            "DPMSolverSDEScheduler", "SASolverScheduler",
        ), _NOISY,
    ),
    **dict.fromkeys(
        ("DDPMScheduler", "DDPMParallelScheduler", "KDPM2AncestralDiscreteScheduler"), ("euler-ancestral",)
    ),
    **dict.fromkeys(("ddim", "DDIMScheduler", "DDIMParallelScheduler"), ("euler", "dpm++2m")),
    "EDMDPMSolverMultistepScheduler": ("edm-euler",),
    **dict.fromkeys(("FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"), ("flow-euler",)),
}  # fmt: skip
"""By AUTOMATIC1111's names in lower case, and by diffusers' classes, which are drawn with the first alone."""
SCHEDULES: Mapping[str, tuple[str, str | None]] = {
    AUTOMATIC: ("Automatic", None), "uniform": ("Uniform", "linspace"), "karras": ("Karras", "karras"),
    "exponential": ("Exponential", "exponential"), "sgm_uniform": ("SGM Uniform", "trailing"),
    "beta": ("Beta", "beta"), "normal": ("Normal", "linspace"), "ddim": ("DDIM", "leading"),
    "simple": ("Simple", "trailing"),
}  # fmt: skip
"""AUTOMATIC1111's noise schedules by name: the label, and the `schedule_type`."""
SCHEDULE_LABELS: Mapping[str, str] = {
    "linspace": "Normal", "leading": "DDIM", "trailing": "SGM Uniform",
    **{curve: label for label, curve in SCHEDULES.values() if curve in CURVES},
}  # fmt: skip
"""What a schedule type is called in a picture's parameters."""
SCHEDULE_TYPES: Mapping[str, tuple[str, ...]] = {
    "euler": TYPES, "dpm++2m": TYPES, "dpm++2m-sde": TYPES, "euler-ancestral": SPACINGS, "flow-euler": CURVES,
}  # fmt: skip
"""The schedule types that each sampler takes of a request; others take none."""
# A sampler and its curve in one name, as before version 1.9: "DPM++ 2M Karras", "k_dpmpp_2m_ka"; and Replicate's.
_SUFFIX = re.compile(r"(?P<sampler>.*\S)[ _](?P<curve>karras|exponential|ka)")
_KARRAS, _CURVES = {"karrasdpm": "dpm++ 2m karras"}, {"ka": "karras"}
_LABELS = {name: label for label, (_, names) in SAMPLERS.items() for name in (label.lower(), *names)}


class Sampling(NamedTuple):
    """A sampler of a model, None if it has none that is near; the curve that goes with the name; and whether it takes
    the same steps as the one that was named.
    """

    scheduler: str | None
    curve: str | None = None
    same: bool = True


def label(scheduler: str) -> str:
    """Return AUTOMATIC1111's name of a scheduler; the scheduler's own where there is none."""
    return next((name for name, (schedulers, _) in SAMPLERS.items() if scheduler in schedulers), scheduler)


def read(name: str, offered: Collection[str]) -> Sampling | None:
    """Return what a name is for a model that has these samplers; None for a name that is unknown."""
    key = name.strip().lower()
    own = next((scheduler for scheduler in offered if scheduler.lower() == key), None)
    if own is not None:
        return Sampling(own)
    suffix = _SUFFIX.fullmatch(_KARRAS.get(key, key))
    key, curve = (key, None) if suffix is None else (suffix["sampler"], _CURVES.get(suffix["curve"], suffix["curve"]))
    known = _LABELS.get(key)
    if known is None and key not in NEAREST:
        return None
    same = next((scheduler for scheduler in SAMPLERS[known][0] if scheduler in offered), None) if known else None
    if same is not None:
        return Sampling(same, curve)
    chain = NEAREST[known.lower() if known else key]
    return Sampling(next((scheduler for scheduler in chain if scheduler in offered), None), curve, same=False)
