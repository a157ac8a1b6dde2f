"""The samplers: which scheduler of diffusers each one is, what settings it has, and what it takes of a request."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contract.sampler_labels import SCHEDULE_TYPES
from contract.schedule import CURVES, SPACINGS, NoiseSchedule

if TYPE_CHECKING:
    import torch

_OFF = (False, None)
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_COMMON: dict[str, tuple[Any, ...]] = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "timestep_spacing": SPACINGS,
    "final_sigmas_type": ("zero", "sigma_min"),
}
_UNCLIPPED = {"thresholding": _OFF, "clip_sample": _OFF}  # a quantile or a clamp of x0: not affine


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler.

    module, class_name: of diffusers' scheduler.
    formula: the function of `pipeline.sampling.coefficients`, and which of `begin` and `eta` it takes.
    accepted: the settings supported. An absent one takes the class's default, which is always supported; one that is
        not listed is harmless or, as when a diffusers pipeline switches schedulers, ignored.
    settings: what it sets itself.
    schedule_types: those of a request that it takes.
    takes: which other fields of a request's schedule.
    noise: whether diffusers draws noise at a step: "" never, or "every", or "inner" not at the last.
    """

    module: str
    class_name: str
    formula: tuple[str, ...]
    accepted: Mapping[str, tuple[Any, ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    schedule_types: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    noise: str = ""

    def load(self) -> Any:
        """Import diffusers' class."""
        return getattr(importlib.import_module(f"diffusers.schedulers.{self.module}"), self.class_name)

    def columns(self, scheduler: Any, steps: int, begin: int, eta: float) -> dict[str, torch.Tensor]:
        """Return its coefficients for a scheduler whose timesteps are set."""
        from pipeline.sampling import coefficients

        name, *names = self.formula
        arguments = {"begin": begin, "eta": eta}
        columns: dict[str, torch.Tensor] = getattr(coefficients, name)(
            scheduler, steps, *(arguments[key] for key in names)
        )
        return columns

    def noisy(self, last: bool, eta: float) -> bool:
        """Return whether it draws noise at a step."""
        if "eta" in self.takes and eta == 0:
            return False
        return self.noise == "every" or (self.noise == "inner" and not last)


_DPM: dict[str, tuple[Any, ...]] = {
    "prediction_type": _PREDICTIONS,
    "algorithm_type": ("dpmsolver++", "sde-dpmsolver++", "deis"),  # diffusers reads deis as dpmsolver++
    "solver_order": (1, 2),
    "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),  # the last three are read as midpoint
    "thresholding": _OFF,
    "variance_type": (None,),  # a learned variance doubles the output's channels
    "use_flow_sigmas": _OFF,
    **_COMMON,
}
_SDE = {"algorithm_type": "sde-dpmsolver++"}

SAMPLERS: Mapping[str, Sampler] = {
    "euler": Sampler(
        "scheduling_euler_discrete", "EulerDiscreteScheduler", ("euler",),
        {
            "prediction_type": (*_PREDICTIONS, "original_sample"),
            "interpolation_type": ("linear", "log_linear"),
            **_COMMON,
        },
        schedule_types=SCHEDULE_TYPES["euler"], takes=("timesteps", "sigmas"),
    ),
    "euler-ancestral": Sampler(
        "scheduling_euler_ancestral_discrete", "EulerAncestralDiscreteScheduler", ("euler_ancestral",),
        {"prediction_type": ("epsilon", "v_prediction"), **_COMMON},
        schedule_types=SCHEDULE_TYPES["euler-ancestral"], noise="every",
    ),
    "dpm++2m": Sampler(
        "scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler", ("dpm", "begin"), _DPM,
        {"algorithm_type": "dpmsolver++"}, SCHEDULE_TYPES["dpm++2m"], ("timesteps",),
    ),
    "dpm++2m-sde": Sampler(
        "scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler", ("dpm", "begin"), _DPM,
        _SDE, SCHEDULE_TYPES["dpm++2m-sde"], ("timesteps",), noise="every",
    ),
    "lcm": Sampler(
        "scheduling_lcm", "LCMScheduler", ("lcm",), {"prediction_type": _PREDICTIONS, **_UNCLIPPED, **_COMMON},
        takes=("timesteps",), noise="inner",
    ),
    "tcd": Sampler(
        "scheduling_tcd", "TCDScheduler", ("tcd", "eta"), {"prediction_type": _PREDICTIONS, **_UNCLIPPED, **_COMMON},
        takes=("timesteps", "eta"), noise="inner",
    ),
    "edm-euler": Sampler(
        "scheduling_edm_euler", "EDMEulerScheduler", ("edm_euler",),
        {
            "prediction_type": ("epsilon", "v_prediction"),
            "sigma_schedule": ("karras", "exponential"),
            "final_sigmas_type": ("zero", "sigma_min"),
        },
    ),
    "flow-euler": Sampler(
        "scheduling_flow_match_euler_discrete", "FlowMatchEulerDiscreteScheduler", ("flow_euler",),
        {
            "num_train_timesteps": (1000,),  # diffusers' pipeline divides by it in its own code
            "invert_sigmas": _OFF,
            "stochastic_sampling": _OFF,
        },
        schedule_types=SCHEDULE_TYPES["flow-euler"], takes=("sigmas",),
    ),
}  # fmt: skip
FLOW_SCHEDULERS: tuple[str, ...] = ("flow-euler",)  # of models trained by flow matching
EDM_SCHEDULERS: tuple[str, ...] = ("edm-euler",)  # of models trained with EDM's noise levels and preconditioning
SCHEDULERS: tuple[str, ...] = tuple(name for name in SAMPLERS if name not in (*FLOW_SCHEDULERS, *EDM_SCHEDULERS))


def offered(config: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the samplers of a model whose scheduler_config.json is `config`, by those that its family offers.

    A model trained as EDM says (Karras et al., 2022, table 1) reads other timesteps, and takes none of the others.
    Those of the config's own class are returned even where they do not support one of its settings.
    """
    class_name = config.get("_class_name")
    is_edm = class_name in [SAMPLERS[name].class_name for name in EDM_SCHEDULERS]
    if is_edm and "euler" in names:
        return EDM_SCHEDULERS
    return tuple(name for name in names if SAMPLERS[name].class_name == class_name or not unsupported(config, name))


def schedule_type(config: Mapping[str, Any], name: str, schedule: NoiseSchedule) -> str | None:
    """Return the schedule type that draws as the sampler does by a model's config and a request's schedule.

    None: the sampler takes no types of requests. "": none does.
    """
    types = SAMPLERS[name].schedule_types
    if not types or schedule.schedule_type is not None:
        return schedule.schedule_type
    settings = inspect.signature(SAMPLERS[name].load()).parameters

    def own(setting: str) -> Any:
        default = settings[setting].default if setting in settings else None
        unused = setting not in settings or setting in config.get("_use_default_values", ())
        return default if unused else config.get(setting, default)

    curve = next((curve for curve in CURVES if own(f"use_{curve}_sigmas")), None)
    if schedule.steps is not None or (own("use_lu_lambdas") and curve != "karras"):
        return ""
    spacing = own("timestep_spacing")
    return curve or (spacing if spacing in types else None)


def unsupported(config: Mapping[str, Any], name: str) -> str:
    """Return which setting of a scheduler_config.json the sampler does not support, and those that it does, or ""."""
    unused = config.get("_use_default_values", ())  # a live config lists what it never was given
    for setting, accepted in SAMPLERS[name].accepted.items():
        if setting in config and setting not in unused and config[setting] not in accepted:
            options = ", ".join(map(repr, accepted))
            return f"{setting}={config[setting]!r} is not supported by {name}; supported: {options}"
    return ""


def default_name(config: Mapping[str, Any], offered: Sequence[str] = SCHEDULERS) -> str:
    """Return the sampler that a scheduler_config.json names by its `_class_name`, if it is offered, else ValueError."""
    class_name = config.get("_class_name")
    matches = [name for name in offered if SAMPLERS[name].class_name == class_name]
    if matches:
        sde = config.get("algorithm_type") == _SDE["algorithm_type"]
        return matches[-1] if sde else matches[0]
    known_names = ", ".join(dict.fromkeys(SAMPLERS[name].class_name for name in offered))
    raise ValueError(f"_class_name={class_name!r} is not a supported scheduler; supported: {known_names}")
