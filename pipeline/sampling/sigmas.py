"""The samplers as tables of seven numbers per step, so that rows at different steps, with different step counts and
samplers, are stepped together by one formula.

Model outputs, after guidance, and noise are arguments.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from contract.errors import Invalid
from contract.schedule import CURVES, OWN, SPACINGS, NoiseSchedule
from pipeline.sampling.samplers import FLOW_SCHEDULERS, SAMPLERS, unsupported

_QUIET = threading.Lock()  # loggers are the process's

COLUMNS: tuple[str, ...] = ("c_in", "a_x", "a_m", "b_x", "b_0", "b_p", "b_n")


@dataclass(frozen=True, slots=True, eq=False)
class SamplerTable:
    """A sampler at one step count: what every step feeds to the model and how it moves the sample.

    Tables are cached and shared between requests: read them, never write to their tensors.

    name: one of `SAMPLERS`.
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


def table(
    config: Mapping[str, Any],
    name: str,
    steps: int,
    begin: int = 0,
    tokens: int = 0,
    schedule: NoiseSchedule = OWN,
) -> SamplerTable:
    """Return the table of sampler `name` for `steps` steps of the model whose scheduler_config.json is `config`.

    The first `begin` of these steps are left out, as by a pipeline that begins with a picture instead of noise.
    `tokens` is the number of a picture's tokens, by which a flow schedule with dynamic shift is shifted. `schedule`
    replaces what `config` says of timesteps and sigmas; its lists must give `steps` steps.

    `config` may have been saved by another scheduler class: it is read the way `Class.from_config` reads it
    when a pipeline switches schedulers, and timesteps and sigmas are those of the diffusers object.
    Coefficients are computed in float64 and follow Karras et al. 2022 (Euler; ancestral noise as in
    k-diffusion), Lu et al. 2022 (DPM-Solver++, multistep, order 1 or 2, and its SDE), Luo et al. 2023 (LCM), Zheng et
    al. 2024 (TCD) and Esser et al. 2024 (rectified flow, section 5.3.2 for the shift). Cached.

    Raises `Invalid` for a schedule that the sampler does not take, and ValueError, naming the field, for an unknown
    sampler, a step count that the schedule cannot give, a setting that is not affine or not supported, and a schedule
    whose coefficients are not finite.
    """
    if name not in SAMPLERS:
        raise ValueError(f"scheduler={name!r} is not known; known: {', '.join(SAMPLERS)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a whole number, 1 or more")
    if not 0 <= begin < steps:
        raise ValueError(f"begin={begin!r} must leave at least one of {steps} steps")
    tokens = tokens if config.get("use_dynamic_shifting") else 0
    return _table(json.dumps(dict(config), sort_keys=True, default=_plain), name, steps, begin, tokens, schedule)


def model_input(x: torch.Tensor, coefficients_rows: torch.Tensor) -> torch.Tensor:
    """Return what the denoiser reads of samples x [B, C, H, W] and their rows [B, 7]: c_in · x."""
    return coefficients_rows[:, 0].reshape(-1, 1, 1, 1) * x


def step(
    x: torch.Tensor,
    m: torch.Tensor,
    x0_previous: torch.Tensor,
    noise: torch.Tensor,
    coefficients_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move every row by one step of its own sampler.

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
    scaled_noise = torch.where(b_n == 0, 0.0, b_n * noise)
    return b_x * x + b_0 * x0 + history + scaled_noise, x0


def _plain(value: Any) -> Any:
    """Return a JSON form of the numpy arrays and numbers that a live config may hold (`trained_betas`)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"scheduler config holds a {type(value).__name__}, which is no plain value")


@lru_cache(maxsize=256)
def _table(config_json: str, name: str, steps: int, begin: int, tokens: int, schedule: NoiseSchedule) -> SamplerTable:
    sampler, config = SAMPLERS[name], json.loads(config_json)
    _check(config, name, schedule)
    scheduler = _scheduler(config | sampler.settings | _spacing(schedule), name, steps, tokens, schedule)
    size = len(scheduler.timesteps)
    if size != steps:
        # diffusers' "trailing" spacing, by rounding, adds a step at timestep -1 for 61, 103 and other counts.
        spacing = scheduler.config["timestep_spacing"]
        raise ValueError(f"steps={steps} with timestep_spacing={spacing!r} would give {size} timesteps")

    eta = schedule.eta or 0.0
    columns = {"c_in": torch.ones(steps, dtype=torch.float64), **sampler.columns(scheduler, steps, begin, eta)}
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
        noisy=tuple(sampler.noisy(i == steps - 1, eta) for i in range(begin, steps)),
        levels=levels[begin:],
    )


def _check(config: Mapping[str, Any], name: str, schedule: NoiseSchedule) -> None:
    """Reject what the tables cannot express, and what the sampler does not take of a request's schedule."""
    sampler = SAMPLERS[name]
    if schedule.schedule_type is not None and schedule.schedule_type not in sampler.schedule_types:
        supported = ", ".join(sampler.schedule_types) or "its own only"
        raise Invalid("schedule_type", f"{schedule.schedule_type} is not supported by {name}; supported: {supported}")
    for field in ("timesteps", "sigmas", "eta"):
        if getattr(schedule, field) is not None and field not in sampler.takes:
            raise Invalid(field, f"is not supported by {name}")
    if reason := unsupported(config, name):
        raise ValueError(reason)


def _spacing(schedule: NoiseSchedule) -> dict[str, Any]:
    """Return the settings of a diffusers scheduler that a request's schedule replaces."""
    if schedule.steps is None and schedule.schedule_type is None:
        return {}
    curves = {f"use_{curve}_sigmas": curve == schedule.schedule_type for curve in CURVES} | {"use_lu_lambdas": False}
    return curves | ({"timestep_spacing": schedule.schedule_type} if schedule.schedule_type in SPACINGS else {})


def _scheduler(config: dict[str, Any], name: str, steps: int, tokens: int, schedule: NoiseSchedule) -> Any:
    """Build the diffusers object for `name`, its timesteps set."""
    sampler = SAMPLERS[name]
    try:
        cls = sampler.load()
        # from_config, not cls(): Karras sigmas read sigma_min and sigma_max even where a class takes neither;
        # the rest of another class's fields would only be logged as unexpected.
        read = {*inspect.signature(cls).parameters, "sigma_min", "sigma_max", "_use_default_values"}
        if "_use_default_values" in config:
            unused = set(config["_use_default_values"]) - sampler.settings.keys() - _spacing(schedule).keys()
            config["_use_default_values"] = sorted(unused)
        with warnings.catch_warnings(), _silent(cls.__module__):
            # numpy 2 deprecates how diffusers copies tensors; a division by zero is rejected later, as not finite.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            scheduler = cls.from_config({key: config[key] for key in config.keys() & read})
            _set_timesteps(scheduler, name, steps, tokens, schedule)
    except ImportError as error:
        raise ValueError(f"{name}: use_beta_sigmas needs scipy, or diffusers is missing: {error}") from error
    except (ArithmeticError, LookupError, NotImplementedError, TypeError) as error:
        raise ValueError(f"{sampler.class_name} cannot be built from this config: {error}") from error
    return scheduler


def _set_timesteps(scheduler: Any, name: str, steps: int, tokens: int, schedule: NoiseSchedule) -> None:
    limit = scheduler.config["num_train_timesteps"]
    if steps > limit:
        raise ValueError(f"steps={steps} is more than num_train_timesteps={limit}")
    if schedule.timesteps is not None:
        if schedule.timesteps[0] >= limit:
            raise Invalid("timesteps.0", f"must be less than the model's num_train_timesteps={limit}")
        scheduler.set_timesteps(timesteps=[*schedule.timesteps])
        return
    sigmas = None if schedule.sigmas is None else [sigma for sigma in schedule.sigmas if sigma > 0]
    if name in FLOW_SCHEDULERS:
        if sigmas and sigmas[0] > 1:
            raise Invalid("sigmas.0", "must be at most 1 for flow matching, where it is the share of noise")
        sigmas = sigmas or torch.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=_shift(scheduler.config, tokens))
    elif sigmas is not None:
        scheduler.set_timesteps(sigmas=[*sigmas, 0.0])
    else:
        original = scheduler.config.get("original_inference_steps")  # of LCM and TCD
        if original is not None and steps > original:
            raise ValueError(f"steps={steps} is more than original_inference_steps={original}")
        scheduler.set_timesteps(steps)


@contextmanager
def _silent(module: str) -> Iterator[None]:
    """Silence diffusers' advice on ignored settings and untrained timesteps, which would come once for each table."""
    loggers = [logging.getLogger(name) for name in (module, "diffusers.configuration_utils")]
    with _QUIET:
        before = [logger.disabled for logger in loggers]
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


def _shift(config: Mapping[str, Any], tokens: int) -> float:
    """Return the shift mu of a picture of so many tokens, as diffusers' pipelines compute it (`calculate_shift`)."""
    few, many = config["base_image_seq_len"], config["max_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / (many - few)
    return float(tokens * slope + (config["base_shift"] - slope * few))
