"""Schedules: what is deep, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.plan import AUTO, DEPTHS, CacheFields, DeepCache, GuidanceSchedule, read_schedule, rows_and_depths
from tests.contract.refused import refused
from tests.core.present import present

SCHEDULES = st.builds(
    DeepCache,
    interval=st.integers(1, 8),
    depth=st.sampled_from(DEPTHS),
    first=st.integers(0, 30),
    last=st.integers(0, 30),
)


def _deep(schedule: DeepCache, steps: int) -> list[int]:
    return [step for step, deep in enumerate(schedule.plan(steps)) if deep]


def test_auto_runs_even_steps_deep_and_the_last() -> None:
    assert _deep(AUTO, 20) == [*range(0, 20, 2), 19]
    assert _deep(DeepCache(), 20) == list(range(0, 20, 2)), "as submitted to MLPerf"


@pytest.mark.parametrize(
    ("schedule", "deep"),
    [
        (DeepCache(interval=1), [0, 1, 2, 3, 4, 5, 6, 7]),
        (DeepCache(interval=3), [0, 3, 6]),
        (DeepCache(interval=3, first=1), [0, 3, 6]),
        (DeepCache(interval=3, first=2), [0, 1, 4, 7]),
        (DeepCache(interval=3, last=2), [0, 3, 6, 7]),
        (DeepCache(interval=5, first=9), [0, 1, 2, 3, 4, 5, 6, 7]),
        (DeepCache(interval=100), [0]),
        (DeepCache(deep_steps=(0, 1, 2, 5)), [0, 1, 2, 5]),
        (DeepCache(deep_steps=(7, 4)), [0, 4, 7]),
        (DeepCache(deep_steps=()), [0]),
    ],
)
def test_plans_of_eight_steps(schedule: DeepCache, deep: list[int]) -> None:
    assert schedule.error_for(8) is None
    assert _deep(schedule, 8) == deep


@given(SCHEDULES, st.integers(1, 60))
def test_every_plan_keeps_its_word(schedule: DeepCache, steps: int) -> None:
    plan = schedule.plan(steps)
    assert schedule.error_for(steps) is None
    assert len(plan) == steps and plan[0]
    assert all(plan[: schedule.first]) and all(plan[max(0, steps - schedule.last) :])
    deep = _deep(schedule, steps)
    assert all(after - before <= schedule.interval for before, after in zip(deep, [*deep[1:], steps], strict=True))


@pytest.mark.parametrize(
    ("schedule", "field"),
    [
        (DeepCache(interval=0), "interval"),
        (DeepCache(interval=True), "interval"),
        (DeepCache(interval=2.0), "interval"),  # type: ignore[arg-type]
        (DeepCache(interval=10**9), "interval"),
        (DeepCache(first=-1), "first"),
        (DeepCache(last=-1), "last"),
        (DeepCache(depth="deepest"), "depth"),
        (DeepCache(depth=None), "depth"),  # type: ignore[arg-type]
        (DeepCache(deep_steps=(20,)), "deep_steps"),
        (DeepCache(deep_steps=(-1,)), "deep_steps"),
        (DeepCache(deep_steps=(3, 3)), "deep_steps"),
        (DeepCache(deep_steps=("3",)), "deep_steps"),  # type: ignore[arg-type]
        (DeepCache(deep_steps=(3, False)), "deep_steps"),
        (DeepCache(interval=3, deep_steps=(3,)), "deep_steps"),
    ],
)
def test_what_is_wrong_is_named(schedule: DeepCache, field: str) -> None:
    assert present(schedule.error_for(20)).field == f"deepcache.{field}"


@pytest.mark.parametrize(
    ("value", "schedule"),
    [
        ("off", None),
        ("auto", AUTO),
        ("3", DeepCache(3)),
        ("3:resnet", DeepCache(3, "resnet")),
        ({"interval": 3, "depth": None}, DeepCache(3)),
        (CacheFields(interval=3), DeepCache(3)),
        (CacheFields(deep_steps=[0, 4]), DeepCache(deep_steps=(0, 4))),
    ],
)
def test_settings_requests_and_jobs_are_read_alike(value: object, schedule: DeepCache | None) -> None:
    assert read_schedule(value) == schedule


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("often", "deepcache"),
        ("0", "deepcache"),
        (7, "deepcache"),
        ({"rhythm": 3}, "deepcache.rhythm"),
        ({"deep_steps": 3}, "deepcache.deep_steps"),
        (CacheFields(interval=2, deep_steps=[0]), "deepcache.deep_steps"),
    ],
)
def test_what_cannot_be_read_is_named(value: object, field: str) -> None:
    with refused(field):
        read_schedule(value)


# -- guidance for a part of the steps ----------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 100))
def test_the_steps_of_an_interval_are_those_of_diffusers_guider(start: float, stop: float, steps: int) -> None:
    """An interval that `check_interval` accepts has one stretch of steps at least; any other is refused by name."""
    from diffusers.guiders import ClassifierFreeGuidance

    schedule = GuidanceSchedule((start, stop))
    found = schedule.guided(steps)
    if start <= stop and start < 1:  # diffusers knows no others
        guider = ClassifierFreeGuidance(guidance_scale=5.0, start=start, stop=stop)
        for step in range(steps):
            guider.set_state(step=step, num_inference_steps=steps, timestep=None)
            assert (guider.num_conditions == 2) is found[step]
    try:
        schedule.check(steps)
    except Invalid as wrong:
        assert wrong.field == "guidance_interval" and (start >= stop or not any(found))
    else:
        first, last = found.index(True), steps - found[::-1].index(True)
        assert all(found[first:last])


def test_without_an_interval_every_step_is_guided() -> None:
    assert GuidanceSchedule().guided(3) == GuidanceSchedule((0, 1)).guided(3) == (True, True, True)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_listed_steps_are_guided_and_no_others(given: tuple[int, set[int]]) -> None:
    steps, listed = given
    schedule = GuidanceSchedule(steps=tuple(listed))
    schedule.check(steps)
    assert [step for step, on in enumerate(schedule.guided(steps)) if on] == sorted(listed)


@given(st.sets(st.integers(0, 11)), SCHEDULES)
def test_where_guidance_begins_again_a_step_is_deep(listed: set[int], cached: DeepCache) -> None:
    found = rows_and_depths(cached, GuidanceSchedule(steps=tuple(listed)), 12, 2)
    assert [rows for rows, _ in found] == [2 if step in listed else 1 for step in range(12)]
    for step, (planned, (rows, deep)) in enumerate(zip(cached.plan(12), found, strict=True)):
        widens = step > 0 and rows > found[step - 1][0]
        assert deep == (planned or widens)


INTERVALS = (0.5, "0:1", [0.5], [0, 0.5, 1], [-0.1, 1], [0, 1.1], [0, True], [0, "1"], [0.6, 0.5])
LISTS = ((), "0", (10,), (-1,), (3, 3), (True,), (0.0,), ("3",), ([],))


@pytest.mark.parametrize(
    ("interval", "steps", "field"),
    [
        *((interval, None, "guidance_interval") for interval in INTERVALS),
        *((None, steps, "guided_steps") for steps in LISTS),
        ((0, 0.5), (0,), "guided_steps"),
    ],
)
def test_what_is_no_part_of_the_steps_is_refused_by_name(interval: Any, steps: Any, field: str) -> None:
    with refused(field):
        GuidanceSchedule(interval, steps).check(10)
