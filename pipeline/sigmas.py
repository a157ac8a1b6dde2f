"""Samplers as tables of seven numbers per step, so that rows at different steps, with different step counts and
samplers, are stepped together by one formula.

Model outputs, after guidance, and noise are arguments.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

SCHEDULERS: tuple[str, ...] = ("euler", "euler-ancestral", "dpm++2m", "lcm")  # of models with a noise schedule
FLOW_SCHEDULERS: tuple[str, ...] = ("flow-euler",)  # of models trained by flow matching
COLUMNS: tuple[str, ...] = ("c_in", "a_x", "a_m", "b_x", "b_0", "b_p", "b_n")

_CLASSES = {  # name -> (module, class), imported only when a table is first built
    "euler": ("scheduling_euler_discrete", "EulerDiscreteScheduler"),
    "euler-ancestral": ("scheduling_euler_ancestral_discrete", "EulerAncestralDiscreteScheduler"),
    "dpm++2m": ("scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler"),
    "lcm": ("scheduling_lcm", "LCMScheduler"),
    "flow-euler": ("scheduling_flow_match_euler_discrete", "FlowMatchEulerDiscreteScheduler"),
}

_OFF = (False, None)
_COMMON: dict[str, tuple[Any, ...]] = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "timestep_spacing": ("linspace", "leading", "trailing"),
    "final_sigmas_type": ("zero", "sigma_min"),
}
# The settings supported for each sampler. An absent field takes the class's default, which is always supported; a field
# not listed is harmless or, as when a diffusers pipeline switches schedulers, ignored.
_ACCEPTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "euler": {
        "prediction_type": ("epsilon", "v_prediction", "sample", "original_sample"),
        "interpolation_type": ("linear", "log_linear"),
        **_COMMON,
    },
    "euler-ancestral": {"prediction_type": ("epsilon", "v_prediction"), **_COMMON},
    "dpm++2m": {
        "prediction_type": ("epsilon", "v_prediction", "sample"),
        "algorithm_type": ("dpmsolver++", "deis"),  # diffusers reads deis as dpmsolver++
        "solver_order": (1, 2),
        "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),  # the last three are read as midpoint
        "thresholding": _OFF,  # a quantile of x0: not affine
        "variance_type": (None,),  # a learned variance doubles the output's channels
        "use_flow_sigmas": _OFF,
        **_COMMON,
    },
    "lcm": {
        "prediction_type": ("epsilon", "v_prediction", "sample"),
        "thresholding": _OFF,
        "clip_sample": _OFF,  # a clamp of x0: not affine
        **_COMMON,
    },
    "flow-euler": {
        "num_train_timesteps": (1000,),  # diffusers' pipeline divides by it in its own code
        "invert_sigmas": _OFF,
        "stochastic_sampling": _OFF,
    },
}


@dataclass(frozen=True, slots=True, eq=False)
class SamplerTable:
    """One sampler at one step count: what every step feeds to the model and how it moves the sample.

    Tables are cached and shared between requests: read them, never write to their tensors.

    name: one of `SCHEDULERS` or `FLOW_SCHEDULERS`.
    steps: S, the number of model calls.
    init_noise_sigma: factor on unit Gaussian noise that makes the first sample.
    timesteps: [S] fp32, what the model is given: on the training clock 0..num_train_timesteps, fractional where
        diffusers' are (Euler with linspace spacing or Karras sigmas); for flow matching the share of signal, 0..1.
        Never round them, never cast them to half precision.
    coefficients: [S, 7] fp32, the columns of `COLUMNS`.
    noisy: per step, whether diffusers draws noise of the sample's shape from the request's generator there:
        then the caller must too. Euler-ancestral draws at its last step as well, with b_n = 0.
    levels: [S + 1, 2] fp32, signal and noise: `signal · x0 + noise · eps` is a sample before each step, and (1, 0)
        after the last one.
    """

    name: str
    steps: int
    init_noise_sigma: float
    timesteps: torch.Tensor
    coefficients: torch.Tensor
    noisy: tuple[bool, ...]
    levels: torch.Tensor


def default_name(config: Mapping[str, Any], offered: Sequence[str] = SCHEDULERS) -> str:
    """The sampler that a scheduler_config.json names by its `_class_name`, if it is offered, else ValueError."""
    class_name = config.get("_class_name")
    for name in offered:
        if class_name == _CLASSES[name][1]:
            return name
    known_names = ", ".join(_CLASSES[name][1] for name in offered)
    raise ValueError(f"_class_name={class_name!r} is not a supported scheduler; supported: {known_names}")


def table(config: Mapping[str, Any], name: str, steps: int, begin: int = 0, tokens: int = 0) -> SamplerTable:
    """The table of sampler `name` for `steps` steps of the model whose scheduler_config.json is `config`.

    The first `begin` of these steps are left out, as by a pipeline that begins with a picture instead of noise.
    `tokens` is the number of a picture's tokens, by which a flow schedule with dynamic shift is shifted.

    `config` may have been saved by another scheduler class: it is read the way `Class.from_config` reads it
    when a pipeline switches schedulers, and timesteps and sigmas are those of the diffusers object.
    Coefficients are computed in float64 and follow Karras et al. 2022 (Euler; ancestral noise as in
    k-diffusion), Lu et al. 2022 (DPM-Solver++, multistep, order 1 or 2), Luo et al. 2023 (LCM) and Esser et al. 2024
    (rectified flow, section 5.3.2 for the shift). Cached.

    Raises ValueError, naming the field, for an unknown sampler, a step count that the schedule cannot give,
    a setting that is not affine or not supported, and a schedule whose coefficients are not finite.
    """
    if name not in _CLASSES:
        raise ValueError(f"scheduler={name!r} is not known; known: {', '.join(_CLASSES)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a whole number, 1 or more")
    if not 0 <= begin < steps:
        raise ValueError(f"begin={begin!r} must leave at least one of {steps} steps")
    tokens = tokens if config.get("use_dynamic_shifting") else 0
    return _table(json.dumps(dict(config), sort_keys=True, default=_plain), name, steps, begin, tokens)


def model_input(x: torch.Tensor, coefficients_rows: torch.Tensor) -> torch.Tensor:
    """What the denoiser gets for samples x [B, C, H, W] and their rows [B, 7]: c_in · x."""
    return coefficients_rows[:, 0].reshape(-1, 1, 1, 1) * x


def step(
    x: torch.Tensor,
    m: torch.Tensor,
    x0_previous: torch.Tensor,
    noise: torch.Tensor,
    coefficients_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves every row by one step of its own sampler.

    x0 = a_x · x + a_m · m
    x' = b_x · x + b_0 · x0 + b_p · x0_previous + b_n · noise

    x, m (the model's output, after guidance), x0_previous (the x0 that the row's last step returned;
    anything at its first) and noise (anything where the row draws none): fp32 [B, C, H, W].
    coefficients_rows: fp32 [B, 7], each row from its own table at its own step. Returns (x', x0), both
    fp32 [B, C, H, W]; x0 is the predicted clean latent for every sampler, at one scale, fit for previews.
    A row's bits do not depend on the other rows: eager mode rounds each product and sum of its elements.
    """
    _, a_x, a_m, b_x, b_0, b_p, b_n = coefficients_rows.reshape(-1, 7, 1, 1, 1).unbind(1)
    x0 = a_x * x + a_m * m
    # Selected, not multiplied by zero: a NaN left in a slot by a failed request must not reach this row.
    history = torch.where(b_p == 0, 0.0, b_p * x0_previous)
    drawn = torch.where(b_n == 0, 0.0, b_n * noise)
    return b_x * x + b_0 * x0 + history + drawn, x0


def _plain(value: Any) -> Any:
    """A JSON form of the numpy arrays and numbers that a live config may hold (`trained_betas`)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"scheduler config holds a {type(value).__name__}, which is no plain value")


@lru_cache(maxsize=256)
def _table(config_json: str, name: str, steps: int, begin: int, tokens: int) -> SamplerTable:
    config: dict[str, Any] = json.loads(config_json)
    scheduler = _scheduler(config, name, steps, tokens)
    size = len(scheduler.timesteps)
    if size != steps:
        # diffusers' "trailing" spacing, by rounding, adds a step at timestep -1 for 61, 103 and other counts.
        spacing = scheduler.config["timestep_spacing"]
        raise ValueError(f"steps={steps} with timestep_spacing={spacing!r} would give {size} timesteps")

    builders: dict[str, Callable[[Any, int], dict[str, torch.Tensor]]] = {
        "euler": _euler, "euler-ancestral": _euler_ancestral, "dpm++2m": partial(_dpm, begin=begin), "lcm": _lcm,
        "flow-euler": _flow_euler,
    }  # fmt: skip
    columns = {"c_in": torch.ones(steps, dtype=torch.float64), **builders[name](scheduler, steps)}
    zeros = torch.zeros(steps, dtype=torch.float64)
    coefficients = torch.stack([columns.get(column, zeros) for column in COLUMNS], dim=1).float()  # [S, 7]
    for i, column in (~coefficients.isfinite()).nonzero().tolist():
        raise ValueError(f"{name}, steps={steps}: {COLUMNS[column]} is not finite at step {i} of the schedule")
    levels = torch.stack([columns["signal"], columns["noise"]], dim=1)
    levels = torch.cat([levels, torch.tensor([[1.0, 0.0]], dtype=torch.float64)]).float()  # [S + 1, 2]
    flow = name in FLOW_SCHEDULERS
    init_noise_sigma = 1.0 if flow else float(scheduler.init_noise_sigma)  # after set_timesteps: Euler's depends on it
    if not math.isfinite(init_noise_sigma):
        raise ValueError(f"{name}, steps={steps}: init_noise_sigma is not finite")

    timesteps = scheduler.timesteps[begin:].float()
    return SamplerTable(
        name=name,
        steps=steps - begin,
        init_noise_sigma=init_noise_sigma,
        timesteps=(1000 - timesteps) / 1000 if flow else timesteps,
        coefficients=coefficients[begin:],
        noisy=tuple(name == "euler-ancestral" or (name == "lcm" and i < steps - 1) for i in range(begin, steps)),
        levels=levels[begin:],
    )


def _scheduler(config: dict[str, Any], name: str, steps: int, tokens: int) -> Any:
    """The diffusers object for `name`, its timesteps set; first rejects what the tables cannot express."""
    unused = config.get("_use_default_values", ())  # a live config lists what it never was given
    for field, accepted in _ACCEPTED[name].items():
        if field in config and field not in unused and config[field] not in accepted:
            options = ", ".join(map(repr, accepted))
            raise ValueError(f"{field}={config[field]!r} is not supported by {name}; supported: {options}")

    module, class_name = _CLASSES[name]
    try:
        cls = getattr(importlib.import_module(f"diffusers.schedulers.{module}"), class_name)
        # from_config, not cls(): Karras sigmas read sigma_min and sigma_max even where a class takes neither;
        # the rest of another class's fields would only be logged as unexpected.
        read = {*inspect.signature(cls).parameters, "sigma_min", "sigma_max", "_use_default_values"}
        with warnings.catch_warnings():
            # numpy 2 deprecates how diffusers copies tensors; a division by zero is rejected later, as not finite.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            scheduler = cls.from_config({key: config[key] for key in config.keys() & read})
            if steps > (most := scheduler.config["num_train_timesteps"]):
                raise ValueError(f"steps={steps} is more than num_train_timesteps={most}")
            if name == "lcm" and steps > (most := scheduler.config["original_inference_steps"]):
                raise ValueError(f"steps={steps} is more than original_inference_steps={most}")
            if name in FLOW_SCHEDULERS:
                given = torch.linspace(1.0, 1 / steps, steps).tolist()
                scheduler.set_timesteps(sigmas=given, mu=_shift(scheduler.config, tokens))
            else:
                scheduler.set_timesteps(steps)
    except ImportError as error:
        raise ValueError(f"{name}: use_beta_sigmas needs scipy, or diffusers is missing: {error}") from error
    except (ArithmeticError, LookupError, NotImplementedError, TypeError) as error:
        raise ValueError(f"{class_name} cannot be built from this config: {error}") from error
    return scheduler


def _x0(scheduler: Any, alpha: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a_x and a_m, [S], for a variance-preserving x = alpha · x0 + sigma · eps, by prediction type."""
    kind = scheduler.config["prediction_type"]
    if kind == "epsilon":
        return 1 / alpha, -sigma / alpha
    if kind == "v_prediction":
        return alpha, -sigma
    return torch.zeros_like(alpha), torch.ones_like(alpha)


def _sigmas(scheduler: Any, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(alpha, now, next), [S] float64: signal level and noise level at each step, and the level it steps to.

    now and next are noise over signal (the sigma of Karras et al. 2022). The object may hold more sigmas
    than steps + 1 (log_linear interpolation); diffusers reads the first of them.
    """
    sigmas = scheduler.sigmas[: steps + 1].double()
    now, following = sigmas[:-1], sigmas[1:]
    return 1 / (now**2 + 1).sqrt(), now, following


def _shift(config: Mapping[str, Any], tokens: int) -> float:
    """The shift mu of a picture of so many tokens, as diffusers' pipelines compute it (`calculate_shift`)."""
    few, many = config["base_image_seq_len"], config["max_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / (many - few)
    return float(tokens * slope + (config["base_shift"] - slope * few))


def _flow_euler(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    """Euler steps of a rectified flow x = (1 - sigma) · x0 + sigma · eps, whose model returns x0 - eps."""
    sigmas = scheduler.sigmas[: steps + 1].double()
    now, kept = sigmas[:-1], sigmas[1:] / sigmas[:-1]
    return {"a_x": torch.ones_like(now), "a_m": now, "b_x": kept, "b_0": 1 - kept, "signal": 1 - now, "noise": now}


def _euler(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    alpha, now, following = _sigmas(scheduler, steps)
    a_x, a_m = _x0(scheduler, alpha, now * alpha)
    kept = following / now
    # Euler's x is x0 + sigma · eps, so 1 / alpha times the variance-preserving one.
    own = {"signal": torch.ones_like(now), "noise": now}
    return {"c_in": alpha, "a_x": a_x * alpha, "a_m": a_m, "b_x": kept, "b_0": 1 - kept, **own}


def _euler_ancestral(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    _, now, following = _sigmas(scheduler, steps)
    ratio = following / now
    # sigma_down = next² / now, sigma_up = next · sqrt(1 - ratio²): diffusers', without the cancellation.
    up = following * (1 - ratio**2).sqrt()
    return {**_euler(scheduler, steps), "b_x": ratio**2, "b_0": 1 - ratio**2, "b_n": up}


def _dpm(scheduler: Any, steps: int, begin: int) -> dict[str, torch.Tensor]:
    alpha, now, following = _sigmas(scheduler, steps)
    a_x, a_m = _x0(scheduler, alpha, now * alpha)
    alpha_next = 1 / (following**2 + 1).sqrt()
    ratio = following / now  # exp(-h)
    first = alpha_next * (1 - ratio)
    config = scheduler.config
    lower_at_end = (
        config["euler_at_final"]
        or (config["lower_order_final"] and steps < 15)
        or config["final_sigmas_type"] == "zero"  # h is infinite there
    )
    last = steps - 1 if lower_at_end else steps
    # The first step has no history.
    second = slice(begin + 1, last if config["solver_order"] == 2 else begin + 1)
    h = (now / following)[second].log()
    h_previous = (now[:-1] / now[1:]).log()[begin : begin + len(h)]
    # Written without h in a denominator: it is 0 where Karras sigmas end in final_sigmas_type sigma_min.
    if config["solver_type"] == "heun":
        slope = alpha_next[second] * (ratio[second] - 1 + h) / h_previous
    else:
        slope = 0.5 * first[second] * h / h_previous
    correction = torch.zeros_like(first)
    correction[second] = slope
    return {
        "a_x": a_x,
        "a_m": a_m,
        "b_x": alpha_next * following / (alpha * now),
        "b_0": first + correction,
        "b_p": 0 - correction,  # not -correction: no negative zeros
        "signal": alpha,
        "noise": now * alpha,
    }


def _lcm(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    kept = scheduler.alphas_cumprod.double()[scheduler.timesteps]  # [S]
    alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
    a_x, a_m = _x0(scheduler, alpha, sigma)
    scaled = scheduler.timesteps.double() * scheduler.config["timestep_scaling"]
    sigma_data = 0.5
    c_skip = sigma_data**2 / (scaled**2 + sigma_data**2)
    c_out = scaled / (scaled**2 + sigma_data**2).sqrt()
    end = torch.ones(1, dtype=torch.float64)
    return {
        "a_x": c_out * a_x + c_skip,  # the boundary condition folds into x0
        "a_m": c_out * a_m,
        "b_x": torch.zeros(steps, dtype=torch.float64),
        "b_0": torch.cat([alpha[1:], end]),
        "b_n": torch.cat([sigma[1:], 0 * end]),
        "signal": alpha,
        "noise": sigma,
    }
