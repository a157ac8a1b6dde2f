"""DeepCache as a request asks for it: what is passed on to the worker, what it costs, and what is refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import admission
from api.errors import ApiError
from api.schemas import read
from contract import plan
from contract.card import ImageCard
from contract.image import ImageJob
from contract.image_request import ImageRequest
from contract.plan import AUTO, DEPTHS, DeepCache
from core.jobs.record import JobDraft, QueueBacklog
from tests.api.world import CARD
from workers.handlers import pictures

CACHED = replace(
    CARD,
    costs=replace(
        CARD.costs,
        shallow_solo_step_s={"block": {"128x128": 0.04}, "resnet": {"128x128": 0.02}},
        shallow_row_step_s={"block": {"128x128": 0.015, "64x64": 0.004}, "resnet": {"128x128": 0.006}},
    ),
)
SCHEDULES = st.sampled_from(["off", "auto"]) | st.fixed_dictionaries(
    {},
    optional={
        "interval": st.integers(1, 9),
        "depth": st.sampled_from(DEPTHS),
        "first": st.integers(0, 20),
        "last": st.integers(0, 20),
    },
)


def draft_of(card: ImageCard = CACHED, **fields: Any) -> JobDraft:
    return admission.image_draft(read(ImageRequest, {"prompt": "a cat", **fields}), card)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (None, None),
        ("off", None),
        ("auto", AUTO),
        ({"interval": 5, "depth": "resnet", "first": 2, "last": None}, DeepCache(5, "resnet", 2)),
        ({"deep_steps": [0, 7, 19], "depth": "resnet"}, DeepCache(depth="resnet", deep_steps=(0, 7, 19))),
    ],
)
def test_a_worker_reads_what_was_asked_for(value: Any, meant: DeepCache | None) -> None:
    """Or is left to decide."""
    schedule = draft_of(deepcache=value).parameters.get("deepcache")
    assert (schedule is None) if value is None else plan.read_schedule(schedule) == meant


@given(SCHEDULES | st.none(), SCHEDULES, st.integers(1, 60), st.sampled_from([1.0, 5.0]), st.integers(1, 3))
def test_the_estimate_counts_every_step_as_its_worker_makes_it(
    asked: Any, usual: Any, steps: int, guidance: float, n: int
) -> None:
    """`usual` is the worker's own, for who does not say."""
    card = replace(CACHED, deepcache=usual)
    draft = draft_of(card, steps=steps, deepcache=asked, guidance_scale=guidance, n=n)
    made = pictures(ImageJob.read(draft.parameters), plan.read_schedule(usual))
    each_s = {"block": 0.015, "resnet": 0.006}
    step_s = [
        0.03 if deep or picture.deepcache is None else each_s[picture.deepcache.depth]
        for picture in made
        for deep in ((True,) * steps if picture.deepcache is None else picture.deepcache.plan(steps))
    ]
    rows = 2 if guidance > 1 else 1
    assert draft.work_ms == pytest.approx(1000 * (0.3 * n + rows * sum(step_s)), abs=1)
    assert draft.work_ms <= draft_of(CARD, steps=steps, guidance_scale=guidance, n=n).work_ms


def test_steps_without_guidance_count_half() -> None:
    """Of 30 ms a row, and 300 ms beside the steps; nothing is left out where there is no guidance."""
    for interval, rows in ((None, 20), ([0, 0.5], 15), ([0.2, 1], 18), ([0, 1], 20)):
        assert draft_of(steps=10, guidance_interval=interval).work_ms == 300 + 30 * rows
    assert draft_of(steps=10, guided_steps=[0, 4, 9]).work_ms == 300 + 30 * 13
    assert draft_of(steps=10, guidance_scale=1.0, guidance_interval=[0, 0.5]).work_ms == 300 + 30 * 10


def test_a_tiny_decoder_counts_as_it_is_announced() -> None:
    both = replace(CARD, vaes=("full", "tiny"))
    measured = replace(both, costs=replace(both.costs, vae_tiny_s=0.02))
    assert [draft_of(card, steps=10, vae="tiny").work_ms for card in (both, measured)] == [300 + 600, 120 + 600]
    assert draft_of(measured, steps=10).work_ms == 300 + 600


@given(SCHEDULES, st.integers(1, 60), st.floats(0.1, 1.0))
def test_an_edit_is_counted_by_the_steps_it_makes(asked: Any, steps: int, strength: float) -> None:
    parameters = {**draft_of(steps=steps).parameters, "deepcache": asked}
    whole = ImageJob.read({**parameters, "steps": int(steps * strength)})
    edited = ImageJob.read({**parameters, "edit": {"strength": strength}})
    for seconds in (admission.work_s, admission.solo_s):
        assert seconds(CACHED, edited) == pytest.approx(seconds(CACHED, whole))


def test_a_size_that_was_not_measured_is_told_from_another() -> None:
    named = {"depth": "block", "interval": 2}
    assert draft_of(steps=10, size="64x64", deepcache=named).work_ms == 300 + 2 * (5 * 10 + 5 * 4)
    at_depth = {**named, "depth": "resnet"}  # measured at 128x128 alone
    assert draft_of(steps=10, size="64x64", deepcache=at_depth).work_ms == 300 + 2 * (5 * 10 + 5 * 1.5)


@pytest.mark.parametrize(
    "card",
    [
        CARD,
        replace(CACHED, costs=replace(CACHED.costs, shallow_row_step_s={"block": {}})),
        replace(CACHED, deepcache={"rhythm": 3}),
        replace(CACHED, deepcache={"interval": 0}),
        replace(CACHED, deepcache=7),
    ],
    ids=["silent", "unmeasured", "newer", "wrong", "no schedule"],
)
def test_what_nobody_can_tell_counts_as_deep(card: Any) -> None:
    asked = {"deepcache": "auto"} if card.deepcache == "off" else {}
    assert draft_of(card, steps=10, **asked).work_ms == 300 + 10 * 2 * 30


def test_a_deadline_is_held_against_the_steps_that_are_made() -> None:
    """All deep it takes 1.9 s at best; by "auto" 11 of 20 steps are deep: 0.3 + 11 × 0.08 + 9 × 0.02 s."""
    for schedule, most_s in (("off", 1.9), ("auto", 1.36)):
        for deadline_s, refused in ((most_s + 0.02, False), (most_s - 0.02, True)):
            draft = draft_of(priority=0, deadline_s=deadline_s, deepcache=schedule)
            with pytest.raises(ApiError, match=f"{most_s:.1f} s at best") if refused else nullcontext():
                admission.check_deadline(draft, CACHED, QueueBacklog(0, 0, 0, 0), 1)
