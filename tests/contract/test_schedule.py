"""Noise schedules of requests: what is taken, and that each refusal names its field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.schedule import TYPES, NoiseSchedule, schedule_of
from tests.contract.refused import refused


@given(st.lists(st.integers(0, 999), min_size=1, unique=True))
def test_any_descending_timesteps_are_taken_and_count_steps(values: list[int]) -> None:
    schedule = NoiseSchedule(timesteps=tuple(sorted(values, reverse=True)))
    schedule.check(len(values))
    assert schedule.steps == len(values)
    with pytest.raises(Invalid, match=f"^steps: must be {len(values)}, as many as timesteps gives, or absent$"):
        schedule.check(len(values) + 1)


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, unique=True), st.booleans())
def test_a_last_zero_is_no_step(values: list[float], end: bool) -> None:
    schedule = NoiseSchedule(sigmas=(*sorted(values, reverse=True), *((0.0,) if end else ())))
    schedule.check(len(values))
    assert schedule.steps == len(values)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"schedule_type": "sgm"}, "schedule_type"),
        ({"schedule_type": 3}, "schedule_type"),
        ({"timesteps": [], "schedule_type": "karras"}, "timesteps"),
        ({"timesteps": []}, "timesteps"),
        ({"timesteps": 4}, "timesteps"),
        ({"timesteps": "999"}, "timesteps"),
        ({"timesteps": [4, 4]}, "timesteps.1"),
        ({"timesteps": [4, 5]}, "timesteps.1"),
        ({"timesteps": [4.0]}, "timesteps.0"),
        ({"timesteps": [True]}, "timesteps.0"),
        ({"timesteps": [-1]}, "timesteps.0"),
        ({"timesteps": [*range(1001, -1, -1)]}, "timesteps"),
        ({"sigmas": [0.0]}, "sigmas"),
        ({"sigmas": [1, 0, 0]}, "sigmas.2"),
        ({"sigmas": [float("inf"), 1]}, "sigmas.0"),
        ({"sigmas": [float("nan")]}, "sigmas.0"),
        ({"sigmas": ["9"]}, "sigmas.0"),
        ({"sigmas": [9], "timesteps": [999]}, "timesteps"),
    ],
    ids=str,
)
def test_refusals_name_the_field(fields: dict[str, Any], wrong: str) -> None:
    with refused(wrong):
        schedule_of(fields).check(1)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_taken_with_any_steps(kind: str) -> None:
    NoiseSchedule(schedule_type=kind).check(7)
