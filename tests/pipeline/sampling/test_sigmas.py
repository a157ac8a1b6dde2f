"""Holds the sampler tables against the diffusers schedulers that they replace, run on a nonlinear model."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import logging.handlers
import math
import queue
import re
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.schedule import TYPES, NoiseSchedule
from pipeline.sampling import samplers, sigmas
from tests.children import imports
from tests.schedulers import CLASSES, replaced
from tests.schedulers import scheduler as stock

Config = dict[str, Any]

# What stabilityai/stable-diffusion-xl-base-1.0 ships as scheduler/scheduler_config.json.
SDXL: Config = {
    "_class_name": "EulerDiscreteScheduler",
    "_diffusers_version": "0.19.0.dev0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "trained_betas": None,
    "use_karras_sigmas": False,
}
ZERO_SNR: Config = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
# A training clock of three steps, so that infinite and zero sigmas can be written down.
THREE: Config = {"num_train_timesteps": 3, "prediction_type": "sample", "steps_offset": 0}

# Lower orders end a run of less than 15 steps; more of them than that are more of the same.
FEW, STEPS = (1, 2, 3, 14, 15), (1, 2, 3, 4, 14, 15, 20)
SHAPE = (1, 4, 5, 7)  # odd sizes: vector kernels have a tail

_KERNEL = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(7)) / 6


def model(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A fixed nonlinear stand-in for the UNet: bounded, different at every timestep. x [1, 4, H, W], t []."""
    return torch.tanh(torch.nn.functional.conv2d(x, _KERNEL, padding=1) + torch.sin(t.float() / 150))


def unit_noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def theirs(
    config: Config, name: str, steps: int, seed: int = 0, given: NoiseSchedule = sigmas.OWN
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """diffusers' own loop, as its SDXL pipeline runs it; yields (sample, generator state) after each step."""
    scheduler = stock(config, name, **replaced(given.schedule_type))
    if given.steps is None:
        scheduler.set_timesteps(steps)
    elif given.timesteps is not None:
        scheduler.set_timesteps(timesteps=[*given.timesteps])
    elif given.sigmas is not None:
        scheduler.set_timesteps(sigmas=[*given.sigmas])
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(seed)
    draws: dict[str, Any] = {} if name == "euler" else {"generator": generator}
    if name == "tcd":
        draws["eta"] = given.eta or 0.0  # which diffusers' pipelines give where nobody does
    x = unit_noise(seed) * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        m = model(scheduler.scale_model_input(x, t), t)
        x = scheduler.step(m, t, x, **draws, return_dict=False)[0]
        yield x, generator.get_state()


def ours(
    config: Config, name: str, steps: int, seed: int = 0, given: NoiseSchedule = sigmas.OWN
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    table = sigmas.table(config, name, steps, schedule=given)
    generator = torch.Generator().manual_seed(seed)
    x = unit_noise(seed) * table.init_noise_sigma
    x0 = torch.full(SHAPE, math.nan)  # the first step must not read it
    for i in range(table.steps):
        row = table.coefficients[i : i + 1]
        m = model(sigmas.model_input(x, row), table.timesteps[i])
        noise = torch.randn(SHAPE, generator=generator) if table.noisy[i] else torch.full(SHAPE, math.nan)
        x, x0 = sigmas.step(x, m, x0, noise, row)
        yield x, generator.get_state()


def assert_parity(
    config: Config, name: str, steps: Iterable[int] = FEW, tolerance: float = 1e-5, given: NoiseSchedule = sigmas.OWN
) -> None:
    for count in steps:
        pairs = zip(theirs(config, name, count, given=given), ours(config, name, count, given=given), strict=True)
        for i, ((expected, their_state), (found, our_state)) in enumerate(pairs):
            error = ((found - expected).abs().max() / expected.abs().max()).item()
            assert error < tolerance, f"{name}, step {i} of {count}: {error:.1e} off; {config}"
            assert torch.equal(their_state, our_state), f"{name}, step {i} of {count}: noise drawn at another time"


@pytest.mark.parametrize("name", [name for name in CLASSES if name in samplers.SAMPLERS and name != "edm-euler"])
def test_a_table_that_begins_later_is_the_end_of_the_whole_one(name: str) -> None:
    """In all that is of a step, the draws of noise too; but a multistep sampler has no history at its first."""
    whole, late = sigmas.table(SDXL, name, 9), sigmas.table(SDXL, name, 9, begin=4)
    assert late.noisy == whole.noisy[4:] and late.steps == 5
    assert torch.equal(late.timesteps, whole.timesteps[4:]) and torch.equal(late.levels, whole.levels[4:])
    assert torch.equal(late.coefficients[1:], whole.coefficients[5:])


def variants(name: str) -> list[Config]:
    """Every combination of the settings that change a sampler's formula or its schedule."""
    grids: dict[str, dict[str, tuple[Any, ...]]] = {
        "euler": {"use_karras_sigmas": (False, True), "final_sigmas_type": ("zero", "sigma_min")},
        "euler-ancestral": {},
        "dpm++2m": {
            "use_karras_sigmas": (False, True),
            "final_sigmas_type": ("zero", "sigma_min"),
            "solver_type": ("midpoint", "heun"),
        },
        "lcm": {"timestep_scaling": (10.0, 0.01)},
        "tcd": {},
    }
    grids["dpm++2m-sde"] = grids["dpm++2m"]
    grid = grids[name]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


KARRAS_HEUN: Config = {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min", "solver_type": "heun"}
PREDICTIONS, SPACINGS = ("epsilon", "v_prediction", "sample"), ("linspace", "leading", "trailing")


@pytest.mark.quick(strength=2)
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", samplers.SCHEDULERS)
def test_trajectories_equal_diffusers(name: str, prediction: str, spacing: str) -> None:
    if name == "euler-ancestral" and prediction == "sample":  # refused by both
        config = {**SDXL, "prediction_type": prediction, "timestep_spacing": spacing}
        with pytest.raises(NotImplementedError, match="prediction_type not implemented yet: sample"):
            next(theirs(config, name, 4))
        with pytest.raises(ValueError, match="prediction_type='sample' is not supported by euler-ancestral"):
            sigmas.table(config, name, 4)
        return
    # Each pair of prediction and spacing, each prediction with every variant, and each spacing with every variant.
    paired = (prediction, spacing) in zip(PREDICTIONS, SPACINGS, strict=True)
    for number, variant in enumerate(variants(name) if paired else variants(name)[:1]):
        config = {**SDXL, "prediction_type": prediction, "timestep_spacing": spacing, **variant}
        if variant == KARRAS_HEUN:
            continue  # diffusers' last step divides zero by zero; see the test after the next
        assert_parity(config, name, STEPS if number == 0 else FEW)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("euler", {"use_exponential_sigmas": True}),
        ("euler", {"use_beta_sigmas": True}),
        ("euler", {"interpolation_type": "log_linear"}),
        ("euler", {"prediction_type": "original_sample"}),
        ("euler", {"timestep_type": "continuous", "prediction_type": "v_prediction"}),
        ("euler", {"use_karras_sigmas": True, "sigma_min": 0.02, "sigma_max": 20.0}),
        ("euler", {**ZERO_SNR, "timestep_spacing": "trailing"}),
        ("euler", {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
        ("euler", {"beta_schedule": "linear"}),
        ("euler", {"beta_schedule": "squaredcos_cap_v2"}),
        ("euler-ancestral", ZERO_SNR),
        ("euler-ancestral", {"use_karras_sigmas": True}),  # not this class's: ignored
        ("dpm++2m", {"use_exponential_sigmas": True}),
        ("dpm++2m", {"use_beta_sigmas": True}),
        ("dpm++2m", {"use_lu_lambdas": True}),
        ("dpm++2m", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 9.0}),  # another class's: read
        ("dpm++2m", {"solver_order": 1}),
        ("dpm++2m", {"solver_type": "bh2"}),
        ("dpm++2m", {"algorithm_type": "deis", "final_sigmas_type": "sigma_min"}),
        ("dpm++2m", {"euler_at_final": True, "final_sigmas_type": "sigma_min"}),
        ("dpm++2m", {"lower_order_final": False}),
        ("dpm++2m", {"lower_order_final": False, "final_sigmas_type": "sigma_min"}),
        ("dpm++2m", {"lambda_min_clipped": -5.1, "beta_schedule": "squaredcos_cap_v2"}),
        ("dpm++2m", ZERO_SNR),
        ("dpm++2m", {"clip_sample": True}),  # not this class's: ignored
        ("lcm", {**ZERO_SNR, "original_inference_steps": 100}),
        ("lcm", {"original_inference_steps": 1000}),
        ("tcd", {"original_inference_steps": 500}),
        ("tcd", ZERO_SNR),
        ("dpm++2m-sde", {"solver_order": 1}),
        ("dpm++2m-sde", {"use_lu_lambdas": True}),
        ("dpm++2m-sde", {"euler_at_final": True, "final_sigmas_type": "sigma_min"}),
        ("dpm++2m-sde", {"lower_order_final": False, "solver_type": "heun", "final_sigmas_type": "sigma_min"}),
        ("lcm", {"trained_betas": np.linspace(0.001, 0.01, 500), "num_train_timesteps": 500}),
    ],
    ids=str,
)
def test_further_settings_equal_diffusers(name: str, change: Config) -> None:
    # Zero terminal SNR starts Euler at sigma 4096; diffusers adds and subtracts a sample of that size.
    rounding = 1e-3 if name == "euler" and change.get("rescale_betas_zero_snr") else 1e-5
    assert_parity({**SDXL, **change}, name, tolerance=rounding)


def test_zero_terminal_snr_is_not_lost_in_rounding() -> None:
    """One step from sigma 4096 with v-prediction is x0 itself, to fp32's last digits."""
    table = sigmas.table({**SDXL, **ZERO_SNR, "timestep_spacing": "trailing"}, "euler", 1)
    x, m = unit_noise(0) * table.init_noise_sigma, unit_noise(1)
    sigma = torch.tensor(table.init_noise_sigma, dtype=torch.float64)
    exact = x.double() / (sigma**2 + 1) - m.double() * sigma / (sigma**2 + 1).sqrt()
    found, _ = sigmas.step(x, m, x, x, table.coefficients)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_karras_heun_ending_in_sigma_min_stays_finite() -> None:
    """The last two sigmas coincide, a step of no length: diffusers divides 0 by 0, ours stands still."""
    config = SDXL | KARRAS_HEUN
    for steps in (15, 20, 50):
        last = sigmas.table(config, "dpm++2m", steps).coefficients[-1]
        assert last[3:].tolist() == pytest.approx([1, 0, 0, 0], abs=1e-6)
        pairs = list(zip(theirs(config, "dpm++2m", steps), ours(config, "dpm++2m", steps), strict=True))[:-1]
        for (expected, _), (found, _) in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(samplers.SCHEDULERS),
    steps=st.integers(1, 50),
    changes=st.fixed_dictionaries(
        {
            "timestep_spacing": st.sampled_from(SPACINGS),
            "prediction_type": st.sampled_from(PREDICTIONS[:2]),
            "steps_offset": st.integers(0, 1),
            "beta_schedule": st.sampled_from(["linear", "scaled_linear"]),
            "num_train_timesteps": st.integers(50, 1200),
        }
    ),
)
def test_any_schedule_equals_diffusers(name: str, steps: int, changes: Config) -> None:
    config = SDXL | changes
    try:
        sigmas.table(config, name, steps)
    except ValueError as refusal:
        # Only where diffusers itself adds a timestep, or repeats one and divides by zero.
        assert "would give" in str(refusal) or "is not finite" in str(refusal)
        scheduler = CLASSES[name].from_config(config)
        scheduler.set_timesteps(steps)
        assert len(scheduler.timesteps) != steps or len(set(scheduler.timesteps.tolist())) < steps
        return
    assert_parity(config, name, [steps])


def test_rows_of_different_samplers_and_steps_are_stepped_together() -> None:
    """Every row's bits are those of its step alone, also beside a poisoned one."""
    tables = [
        sigmas.table({**SDXL, "solver_type": "heun", **change}, name, 4)
        for name, change in itertools.product(samplers.SCHEDULERS, ({}, {"prediction_type": "v_prediction"}))
    ]
    rows = torch.cat([table.coefficients for table in tables])
    x, m, previous, noise = torch.randn(4, len(rows), *SHAPE[1:], generator=torch.Generator().manual_seed(0)).unbind()
    m[3] = math.nan
    fed, together = sigmas.model_input(x, rows), sigmas.step(x, m, previous, noise, rows)
    for r in range(len(rows)):
        own = slice(r, r + 1)
        assert torch.equal(fed[own], sigmas.model_input(x[own], rows[own]))
        for found, alone in zip(
            together, sigmas.step(x[own], m[own], previous[own], noise[own], rows[own]), strict=True
        ):
            assert found[r].isnan().all() if r == 3 else torch.equal(found[own], alone)


@pytest.mark.parametrize(
    ("name", "change", "steps", "field"),
    [
        ("ddim", {}, 20, "scheduler"),
        ("euler", {}, 0, "steps"),
        ("euler", {}, True, "steps"),
        ("euler", {}, 20.0, "steps"),
        ("euler", {}, 1001, "num_train_timesteps"),
        ("lcm", {}, 51, "original_inference_steps"),
        ("lcm", {"original_inference_steps": 2000}, 4, "original_steps"),
        ("lcm", {"original_inference_steps": 0}, 4, "original_inference_steps"),
        ("lcm", {"clip_sample": True}, 4, "clip_sample"),
        ("lcm", {"thresholding": True}, 4, "thresholding"),
        ("euler", {"prediction_type": "flow_prediction"}, 4, "prediction_type"),
        ("euler", {"interpolation_type": "cubic"}, 4, "interpolation_type"),
        ("euler", {"timestep_spacing": "sideways"}, 4, "timestep_spacing"),
        ("euler", {"beta_schedule": "steep"}, 4, "beta_schedule"),
        ("euler", {"final_sigmas_type": "one"}, 4, "final_sigmas_type"),
        ("euler", {"use_karras_sigmas": True, "use_beta_sigmas": True}, 4, "use_karras_sigmas"),
        ("euler", {"use_karras_sigmas": True, "sigma_min": 0.0}, 4, "not finite at step 3"),
        ("euler", {"timestep_spacing": "trailing"}, 61, "timestep_spacing"),
        ("euler", {**THREE, "trained_betas": [0.5, 0.5, 1.0]}, 3, "init_noise_sigma"),
        ("euler", {**THREE, "trained_betas": [0.0, 0.5, 0.5]}, 3, "not finite at step 2"),
        ("euler-ancestral", {"prediction_type": "sample"}, 4, "prediction_type"),
        ("dpm++2m", {"thresholding": True}, 4, "thresholding"),
        ("dpm++2m-sde", {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"}, 4, "algorithm_type"),
        ("dpm++2m", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}, 4, "algorithm_type"),
        ("dpm++2m", {"solver_order": 3}, 4, "solver_order"),
        ("dpm++2m", {"solver_type": "ralston"}, 4, "solver_type"),
        ("dpm++2m", {"use_flow_sigmas": True}, 4, "use_flow_sigmas"),
        ("dpm++2m", {"variance_type": "learned"}, 4, "variance_type"),
        ("dpm++2m", {}, 1000, "not finite"),  # every timestep is the same one
        ("lcm", {"rescale_betas_zero_snr": True}, 4, "a_x is not finite at step 0"),
        ("euler", {"beta_start": object()}, 4, "object"),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),  # addresses differ between test processes
)
def test_refusals_name_the_field(name: str, change: Config, steps: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        sigmas.table({**SDXL, **change}, name, steps)


def test_the_models_own_sampler_is_found_by_its_class_name() -> None:
    assert samplers.default_name(SDXL) == "euler"
    for name, scheduler_class in CLASSES.items():
        saved = json.loads(scheduler_class().to_json_string())
        if name == "dpm++2m-sde":
            saved = json.loads(stock(saved, name).to_json_string())
        assert samplers.default_name(saved, samplers.offered(saved, samplers.SCHEDULERS)) == name
    for unknown in ({"_class_name": "DDIMScheduler"}, {}):
        with pytest.raises(ValueError, match="_class_name"):
            samplers.default_name(unknown)


@pytest.mark.parametrize("name", samplers.SCHEDULERS)
@pytest.mark.parametrize("origin", samplers.SCHEDULERS)
def test_a_live_config_is_read_as_from_config_reads_it(origin: str, name: str) -> None:
    """A live config marks values it was never given; the next class replaces them by its own defaults."""
    live = stock(CLASSES[origin](beta_end=0.012, beta_start=0.00085).config, origin)
    assert_parity(live.config, name, [6])


def test_a_default_of_another_class_is_no_reason_to_refuse() -> None:
    """DDIM clips by default and LCM must not; a config never given clip_sample does not ask for it."""
    config = DDIMScheduler(beta_end=0.012, beta_start=0.00085).config
    assert config["clip_sample"]
    assert_parity(config, "lcm", [4])
    with pytest.raises(ValueError, match="clip_sample"):
        sigmas.table(DDIMScheduler(clip_sample=True).config, "lcm", 4)


def test_tables_are_cached_by_what_the_config_says() -> None:
    table = sigmas.table(SDXL, "euler", 20)
    assert sigmas.table(dict(reversed(SDXL.items())), "euler", 20) is table
    assert sigmas.table(SDXL, "euler", 21) is not table
    betas = np.linspace(0.001, 0.01, 1000, dtype=np.float32)
    trained = sigmas.table({**SDXL, "trained_betas": betas}, "euler", 20)
    assert trained is sigmas.table({**SDXL, "trained_betas": betas.tolist()}, "euler", 20)
    assert not torch.equal(trained.coefficients, table.coefficients)


@pytest.mark.parametrize("name", samplers.SCHEDULERS)
def test_building_a_table_is_silent(name: str) -> None:
    """diffusers logs every field of another class that it ignores; an operator can do nothing about those."""
    records = queue.SimpleQueue[logging.LogRecord]()
    handler = logging.handlers.QueueHandler(records)
    logging.getLogger("diffusers").addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sigmas.table({**SDXL, "skip_prk_steps": True, "sigma_data": 1.0, "sigma_min": None}, name, 9)
            if "timesteps" in samplers.SAMPLERS[name].takes:
                sigmas.table(SDXL, name, 3, schedule=NoiseSchedule(timesteps=(998, 500, 1)))
    finally:
        logging.getLogger("diffusers").removeHandler(handler)
    assert records.empty()


def test_tables_of_many_threads_leave_loggers_as_they_were() -> None:
    logger = logging.getLogger("diffusers.configuration_utils")
    before = logger.disabled
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: sigmas.table({**SDXL, "beta_end": 0.012 + n * 1e-6}, "lcm", 4), range(64)))
    assert logger.disabled is before


def test_importing_the_module_does_not_import_diffusers() -> None:
    assert not imports("pipeline.sampling.sigmas", "diffusers")


# Steps that students were trained for: DMD2's, Hyper-SD's single one, and Align Your Steps' levels for SDXL.
LISTS = (
    NoiseSchedule(timesteps=(999, 749, 499, 249)),
    NoiseSchedule(timesteps=(800,)),
    NoiseSchedule(sigmas=(14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.38, 0.234, 0.113, 0.0)),
    NoiseSchedule(sigmas=(7.5, 0.25, 0.0)),
)


@pytest.mark.parametrize("given", LISTS, ids=str)
@pytest.mark.parametrize("name", samplers.SCHEDULERS)
def test_timesteps_and_sigmas_one_by_one_equal_diffusers(name: str, given: NoiseSchedule) -> None:
    field = "timesteps" if given.timesteps is not None else "sigmas"
    steps = given.steps
    assert steps is not None
    if field not in inspect.signature(CLASSES[name].set_timesteps).parameters:
        with pytest.raises(Invalid, match=re.escape(f"{field}: is not supported by {name}")):
            sigmas.table(SDXL, name, steps, schedule=given)
        return
    # What a model's config says of curves is replaced: diffusers would refuse to take both.
    for config in (SDXL, {**SDXL, "prediction_type": "v_prediction"}):
        assert_parity(config, name, [steps], given=given)
        table = sigmas.table({**config, "use_karras_sigmas": True}, name, steps, schedule=given)
        assert torch.equal(table.coefficients, sigmas.table(config, name, steps, schedule=given).coefficients)
    assert sigmas.table(SDXL, name, steps, schedule=given) is not sigmas.table(SDXL, name, steps)


def test_a_last_sigma_of_zero_may_be_left_out() -> None:
    short, long = (sigmas.table(SDXL, "euler", 2, schedule=NoiseSchedule(sigmas=s)) for s in ((7.5, 2), (7.5, 2, 0)))
    assert torch.equal(short.coefficients, long.coefficients)


def test_what_a_sampler_does_not_take_of_a_request_is_named() -> None:
    with pytest.raises(Invalid, match=r"timesteps.0: must be less than the model's num_train_timesteps=1000"):
        sigmas.table(SDXL, "lcm", 2, schedule=NoiseSchedule(timesteps=(1000, 3)))
    for name in set(samplers.SCHEDULERS) - {"tcd"}:
        with pytest.raises(Invalid, match=re.escape(f"eta: is not supported by {name}")):
            sigmas.table(SDXL, name, 4, schedule=NoiseSchedule(eta=0.5))


@pytest.mark.quick(strength=2)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", samplers.SCHEDULERS)
@pytest.mark.parametrize(
    "own", [{}, {"use_karras_sigmas": True}, {"use_beta_sigmas": True}, {"use_lu_lambdas": True}], ids=str
)
def test_a_schedule_type_is_that_of_the_scheduler_made_with_it(name: str, kind: str, own: Config) -> None:
    given = NoiseSchedule(schedule_type=kind)
    if kind not in samplers.SAMPLERS[name].schedule_types:
        with pytest.raises(Invalid, match=re.escape(f"schedule_type: {kind} is not supported by {name}; supported: ")):
            sigmas.table(SDXL, name, 5, schedule=given)
        return
    if "use_lu_lambdas" in own:  # which is no curve of the others, and goes with the model's own spacing only
        table = sigmas.table({**SDXL, **own}, name, 5, schedule=given)
        assert torch.equal(table.timesteps, sigmas.table(SDXL, name, 5, schedule=given).timesteps)
        return
    for config in ({**SDXL, **own}, CLASSES[name](beta_end=0.012, beta_start=0.00085, **own).config if not own else {}):
        if config:
            assert_parity(config, name, [1, 5, 20], given=given)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(eta=st.floats(0, 1), steps=st.integers(1, 50))
def test_tcd_equals_diffusers_at_any_eta(eta: float, steps: int) -> None:
    assert_parity(SDXL, "tcd", [steps], given=NoiseSchedule(eta=eta))


@pytest.mark.parametrize("final", ["zero", "sigma_min"])
@pytest.mark.parametrize("curve", ["karras", "exponential"])
@pytest.mark.parametrize(
    ("predicts", "data", "most"), [("epsilon", 0.5, 80.0), ("v_prediction", 1.0, 120.0), ("v_prediction", 0.7, 5.0)]
)
def test_edm_equals_diffusers(predicts: str, data: float, most: float, curve: str, final: str) -> None:
    config = {
        "_class_name": "EDMEulerScheduler", "prediction_type": predicts, "sigma_data": data, "sigma_max": most,
        "sigma_schedule": curve, "final_sigmas_type": final,
    }  # fmt: skip
    assert samplers.offered(config, samplers.SCHEDULERS) == samplers.EDM_SCHEDULERS == ("edm-euler",)
    # diffusers adds its step to a sample 100 times as large as the result, in fp32.
    assert_parity(config, "edm-euler", tolerance=1e-4)


def test_other_models_are_not_offered_edms_sampler() -> None:
    assert samplers.offered(SDXL, samplers.SCHEDULERS) == samplers.SCHEDULERS and "edm-euler" not in samplers.SCHEDULERS
    assert samplers.offered({"_class_name": "EDMEulerScheduler"}, ("flow-euler",)) == ("flow-euler",)
