"""Flow-matching tables: trajectories of diffusers' `ZImagePipeline`, with static and dynamic shift."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas
from hypothesis import assume, given
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.schedule import NoiseSchedule
from pipeline.sampling import sigmas
from tests.pipeline.sampling.test_sigmas import SHAPE, model, unit_noise

TURBO: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}
CONFIGS = st.fixed_dictionaries(
    {
        "_class_name": st.just("FlowMatchEulerDiscreteScheduler"),
        "num_train_timesteps": st.just(1000),
        "shift": st.sampled_from([1.0, 3.0, 6.0]),
        "use_dynamic_shifting": st.booleans(),
    },
    optional={
        "time_shift_type": st.sampled_from(["exponential", "linear"]),
        "base_shift": st.sampled_from([0.5, 0.25]),
        "max_shift": st.sampled_from([1.15, 2.0]),
        "base_image_seq_len": st.sampled_from([256, 64]),
        "max_image_seq_len": st.sampled_from([4096, 1024]),
        "use_karras_sigmas": st.booleans(),
        "shift_terminal": st.sampled_from([None, 0.02]),
    },
)


def stock(config: dict[str, Any], steps: int, tokens: int) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    own = scheduler.config
    mu = calculate_shift(tokens, own.base_image_seq_len, own.max_image_seq_len, own.base_shift, own.max_shift)
    scheduler.set_timesteps(sigmas=get_default_z_image_sigmas(steps), mu=mu)
    scheduler.set_begin_index(0)
    return scheduler


def theirs(config: dict[str, Any], steps: int, tokens: int) -> Iterator[torch.Tensor]:
    """The loop of `ZImagePipeline`: the model gets 1 - sigma, and returns the negative of what the scheduler gets."""
    scheduler, x = stock(config, steps, tokens), unit_noise(0)
    for t in scheduler.timesteps:
        m = model(x, (1000 - t) / 1000)
        x = scheduler.step(-m, t, x, return_dict=False)[0]
        yield x


def ours(table: sigmas.SamplerTable) -> Iterator[torch.Tensor]:
    x, x0, nothing = unit_noise(0) * table.init_noise_sigma, torch.full(SHAPE, math.nan), torch.full(SHAPE, math.nan)
    for i in range(table.steps):
        row = table.coefficients[i : i + 1]
        x, x0 = sigmas.step(x, model(sigmas.model_input(x, row), table.timesteps[i]), x0, nothing, row)
        yield x
    assert torch.equal(x, x0), "the last step ends at the estimate"


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@given(config=CONFIGS, steps=st.integers(1, 50), tokens=st.integers(1, 8192))
def test_trajectories_equal_diffusers(config: dict[str, Any], steps: int, tokens: int) -> None:
    timesteps = stock(config, steps, tokens).timesteps
    # The linear shift of few tokens can be negative, and then noise levels are no levels.
    assume(not timesteps.isfinite().all() or (timesteps.min() > 0 and timesteps.max() <= 1000))
    if not timesteps.isfinite().all():  # a single step cannot end at `shift_terminal`
        with pytest.raises(ValueError, match="not finite"):
            sigmas.table(config, "flow-euler", steps, tokens=tokens)
        return
    table = sigmas.table(config, "flow-euler", steps, tokens=tokens)
    assert torch.equal(table.timesteps, (1000 - timesteps) / 1000)
    for expected, found in zip(theirs(config, steps, tokens), ours(table), strict=True):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@given(steps=st.integers(1, 30), begin=st.integers(0, 29), tokens=st.integers(1, 4096))
def test_a_picture_is_noised_as_diffusers_noises_it(steps: int, begin: int, tokens: int) -> None:
    begin = min(begin, steps - 1)
    config = {**TURBO, "use_dynamic_shifting": True}
    whole = sigmas.table(config, "flow-euler", steps, tokens=tokens)
    table = sigmas.table(config, "flow-euler", steps, begin, tokens)
    scheduler = stock(config, steps, tokens)
    scheduler.set_begin_index(begin)
    image, noise = unit_noise(1), unit_noise(2)
    expected = scheduler.scale_noise(image, scheduler.timesteps[begin : begin + 1], noise)
    signal, level = table.levels[0]
    torch.testing.assert_close(signal * image + level * noise, expected, rtol=0, atol=1e-6)
    assert torch.equal(table.coefficients, whole.coefficients[begin:]) and table.levels[-1].tolist() == [1.0, 0.0]


def test_only_a_dynamic_shift_depends_on_the_picture() -> None:
    assert sigmas.table(TURBO, "flow-euler", 8, tokens=64) is sigmas.table(TURBO, "flow-euler", 8, tokens=4096)
    dynamic = {**TURBO, "use_dynamic_shifting": True}
    small, large = (sigmas.table(dynamic, "flow-euler", 8, tokens=tokens) for tokens in (64, 4096))
    assert (small.levels[1:-1, 1] < large.levels[1:-1, 1]).all(), "a larger picture keeps its noise for longer"


@pytest.mark.parametrize(
    "change", [{"invert_sigmas": True}, {"stochastic_sampling": True}, {"num_train_timesteps": 500}]
)
def test_refusals_name_the_field(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        sigmas.table({**TURBO, **change}, "flow-euler", 4)


def test_sigmas_are_shares_of_noise() -> None:
    """As a request gives them they are what diffusers' pipeline is given."""
    given = (1.0, 0.6, 0.25)
    found = sigmas.table(TURBO, "flow-euler", 3, schedule=NoiseSchedule(sigmas=(*given, 0.0)))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(TURBO)
    scheduler.set_timesteps(sigmas=[*given])
    torch.testing.assert_close(found.timesteps, (1000 - scheduler.timesteps) / 1000)
    with pytest.raises(Invalid, match=r"sigmas\.0: must be at most 1"):
        sigmas.table(TURBO, "flow-euler", 3, schedule=NoiseSchedule(sigmas=(14.6, 3.8, 0.9)))
