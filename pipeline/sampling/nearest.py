"""Reads a scheduler_config.json: of a diffusers scheduler without a sampler here it becomes the nearest one's config.

The noise schedule is the authors': betas, kind of prediction, spacing, offset, a terminal SNR of 0 and the curve of
sigmas are carried over, with the original class's defaults for what the file leaves out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contract.sampler_labels import NEAREST
from pipeline.sampling.samplers import EDM_SCHEDULERS, FLOW_SCHEDULERS, SAMPLERS

_EXACT = ("DDIMScheduler", "DDIMParallelScheduler")  # without noise, which is diffusers' default, DDIM is Euler
_SOLVER: Mapping[str, Mapping[Any, Any]] = {  # settings without a table, and the nearest that have one
    "algorithm_type": {
        "dpmsolver": "dpmsolver++", "sde-dpmsolver": "sde-dpmsolver++",
        "data_prediction": "dpmsolver++", "noise_prediction": "dpmsolver++",  # SA-Solver's
    },
    "solver_order": {3: 2},
    # Of DDPM's own noise.
    "variance_type": dict.fromkeys(("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log")),
}  # fmt: skip
_DROPPED = ("clip_sample", "thresholding")  # a clamp of x0: not affine, and of pixels, not of latents
_CURVES = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_SCHEDULE = (  # what a class's defaults say of the noise schedule
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
    "timestep_spacing", "steps_offset", "rescale_betas_zero_snr", *_CURVES, "sigma_min", "sigma_max", "sigma_data",
    "sigma_schedule", "rho", "final_sigmas_type", "shift",
)  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # of a class that diffusers has only beside torchsde
    "DPMSolverSDEScheduler": {
        "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "linear",
        "trained_betas": None, "prediction_type": "epsilon", "timestep_spacing": "linspace", "steps_offset": 0,
        **dict.fromkeys(_CURVES, False),
    },
}  # fmt: skip


class NearestScheduler(NamedTuple):
    """A config that `sigmas.table` reads, and why it is not the authors' own, or ""."""

    config: dict[str, Any]
    reason: str = ""


def nearest(config: Mapping[str, Any], offered: Sequence[str]) -> NearestScheduler:
    """Return `config` as it is if its class is one of `offered`, the samplers of a model's family; else the nearest's.

    Raises ValueError, naming the class and those that are supported, where no sampler draws alike: for flow matching in
    a model that predicts noise, the reverse, and classes for other data.
    """
    class_name = config.get("_class_name")
    flow = class_name in _solvers() and (
        bool(config.get("use_flow_sigmas")) or config.get("prediction_type") == "flow_prediction"
    )
    allowed = {*offered, *(EDM_SCHEDULERS if "euler" in offered else ())}
    own = [name for name in allowed if SAMPLERS[name].class_name == class_name]
    if own and not flow:
        return _supported_solver(config)
    name = FLOW_SCHEDULERS[0] if flow else NEAREST.get(str(class_name), ("",))[0]
    if name not in allowed:
        supported = [SAMPLERS[sampler].class_name for sampler in SAMPLERS if sampler in allowed]
        kind = " for flow matching" if flow else ""
        raise ValueError(
            f"_class_name={class_name!r}{kind} is not a supported scheduler; supported: "
            f"{', '.join(dict.fromkeys(supported))}, and those that are near them"
        )
    result = _read(str(class_name), config)
    if name == "euler-ancestral" and any(result.get(curve) for curve in _CURVES):
        name = "dpm++2m-sde"  # which reads them
    result |= {**_replaced(result), "_class_name": SAMPLERS[name].class_name, **SAMPLERS[name].settings}
    if flow:
        result["shift"] = config.get("flow_shift", 1.0)
    if class_name in _EXACT and not result.get("set_alpha_to_one", True):
        result["final_sigmas_type"] = "sigma_min"  # it ends at the first level, not without noise
    dropped = [key for key in _DROPPED if result.pop(key, None)]
    accepted = SAMPLERS[name].accepted.get("beta_schedule", ())
    if accepted and result.get("beta_schedule", accepted[0]) not in accepted and not result.get("trained_betas"):
        result["trained_betas"] = _betas(str(class_name), config)
        result["beta_schedule"] = accepted[0]
    same = class_name in _EXACT and result["timestep_spacing"] == "leading"  # else Euler reads fractions of timesteps
    how = "which takes the same steps" if same else "the nearest sampler"
    without = f", without {' and '.join(dropped)}" if dropped else ""
    return NearestScheduler(result, f"{class_name} is drawn by {name}, {how}{without}")


def _supported_solver(config: Mapping[str, Any]) -> NearestScheduler:
    """Return the config of a supported class, with the nearest settings of a solver where it has none of these.

    Another class's settings of a solver are for requests that choose the solver, and no reason.
    """
    replaced = _replaced(config)
    result = dict(config) | replaced
    read = {key: value for key, value in replaced.items() if value is not None}
    if not read or config["_class_name"] != SAMPLERS["dpm++2m"].class_name:
        return NearestScheduler(result)
    pairs = ", ".join(f"{key}={config[key]!r} by {value!r}" for key, value in read.items())
    return NearestScheduler(result, f"{config['_class_name']}: {pairs}, the nearest setting")


def _replaced(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: config[key] for key in _SOLVER if isinstance(config.get(key), str | int)}
    return {key: _SOLVER[key][value] for key, value in values.items() if value in _SOLVER[key]}


def _solvers() -> tuple[str, ...]:
    """Return the classes that solve a flow's equation where `use_flow_sigmas` asks for it."""
    return (
        "UniPCMultistepScheduler", "DEISMultistepScheduler", "DPMSolverSinglestepScheduler", "SASolverScheduler",
        SAMPLERS["dpm++2m"].class_name,
    )  # fmt: skip


def _class(name: str) -> Any:
    import diffusers.schedulers

    try:
        return getattr(diffusers.schedulers, name)
    except AttributeError:
        raise ValueError(f"_class_name={name!r} is not in diffusers {diffusers.__version__}") from None


def _read(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the class reads of a config, with its own defaults of the noise schedule."""
    defaults, unread = dict(_DEFAULTS.get(name, {})), set[str]()
    if not defaults:
        parameters = inspect.signature(_class(name)).parameters
        defaults = {key: parameters[key].default for key in _SCHEDULE if key in parameters}
    if defaults:  # else it is diffusers' stand-in for a class that lacks a library
        unread = {*_SCHEDULE} - defaults.keys()
    unread |= {"_use_default_values", *config.get("_use_default_values", ())}  # a live config's: never given
    values = {**defaults, **{key: value for key, value in config.items() if key not in unread}}
    return {key: value for key, value in values.items() if value is not None}


def _betas(name: str, config: Mapping[str, Any]) -> list[float]:
    """Return the betas of the class, of a schedule that the nearest sampler's class does not compute."""
    try:
        betas = _class(name).from_config(dict(config)).betas
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"beta_schedule={config.get('beta_schedule')!r}: {name} does not compute it") from error
    return [float(beta) for beta in betas]
