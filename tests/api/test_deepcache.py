"""DeepCache as a request asks for it: what is passed on to the worker, what it costs, and what is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import admission
from api.errors import ApiError
from api.schemas import read
from contract import plan
from contract.image import ImageJob
from contract.image_request import ImageRequest
from contract.plan import AUTO, DEPTHS, DeepCache
from core.jobs.record import JobDraft, QueueBacklog
from tests.api.world import CARD, Api, Worker, check_error, eventually
from workers.handlers import pictures


def _passed_on(value: Any, steps: int = 20) -> Any:
    fields = read(ImageRequest, {"prompt": "a cat", "steps": steps, "deepcache": value})
    return admission.image_draft(fields, CARD).parameters.get("deepcache")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("off", None),
        ("auto", AUTO),
        ({}, DeepCache()),
        ({"interval": 3, "depth": None}, DeepCache(interval=3)),
        ({"interval": 5, "depth": "resnet", "first": 2, "last": 1}, DeepCache(5, "resnet", 2, 1)),
        ({"deep_steps": [0, 7, 19], "depth": "resnet"}, DeepCache(depth="resnet", deep_steps=(0, 7, 19))),
        ({"deep_steps": []}, DeepCache(deep_steps=())),
    ],
)
def test_a_worker_reads_what_was_asked_for(value: Any, meant: DeepCache | None) -> None:
    assert plan.read_schedule(_passed_on(value)) == meant


def test_who_does_not_say_leaves_it_to_the_worker() -> None:
    assert _passed_on(None) is None


# -- what it costs -------------------------------------------------------------------------------------------------

CACHED = dataclasses.replace(
    CARD,
    costs=dataclasses.replace(
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


def _draft(card: Any = CACHED, **asked: Any) -> JobDraft:
    return admission.image_draft(read(ImageRequest, {"prompt": "a cat", **asked}), card)


@given(SCHEDULES | st.none(), SCHEDULES, st.integers(1, 60), st.sampled_from([1.0, 5.0]), st.integers(1, 3))
def test_the_estimate_counts_every_step_as_its_worker_makes_it(
    asked: Any, usual: Any, steps: int, guidance: float, n: int
) -> None:
    """`usual` is the worker's own, for who does not say."""
    card = dataclasses.replace(CACHED, deepcache=usual)
    draft = _draft(card, steps=steps, deepcache=asked, guidance_scale=guidance, n=n)
    made = pictures(ImageJob.read(draft.parameters), plan.read_schedule(usual))
    each_s = {"block": 0.015, "resnet": 0.006}
    step_s = [
        0.03 if deep or picture.deepcache is None else each_s[picture.deepcache.depth]
        for picture in made
        for deep in ((True,) * steps if picture.deepcache is None else picture.deepcache.plan(steps))
    ]
    rows = 2 if guidance > 1 else 1
    assert draft.work_ms == pytest.approx(1000 * (0.3 * n + rows * sum(step_s)), abs=1)
    assert draft.work_ms <= _draft(CARD, steps=steps, guidance_scale=guidance, n=n).work_ms


def test_steps_without_guidance_count_half() -> None:
    """Of 30 ms a row, and 300 ms beside the steps; nothing is left out where there is no guidance."""
    for interval, rows in ((None, 20), ([0, 0.5], 15), ([0.2, 1], 18), ([0, 1], 20)):
        assert _draft(steps=10, guidance_interval=interval).work_ms == 300 + 30 * rows
    assert _draft(steps=10, guided_steps=[0, 4, 9]).work_ms == 300 + 30 * 13
    assert _draft(steps=10, guidance_scale=1.0, guidance_interval=[0, 0.5]).work_ms == 300 + 30 * 10


def test_a_tiny_decoder_counts_as_it_is_announced() -> None:
    both = dataclasses.replace(CARD, vaes=("full", "tiny"))
    measured = dataclasses.replace(both, costs=dataclasses.replace(both.costs, vae_tiny_s=0.02))
    assert [_draft(card, steps=10, vae="tiny").work_ms for card in (both, measured)] == [300 + 600, 120 + 600]
    assert _draft(measured, steps=10).work_ms == 300 + 600


@given(SCHEDULES, st.integers(1, 60), st.floats(0.1, 1.0))
def test_an_edit_is_counted_by_the_steps_it_makes(asked: Any, steps: int, strength: float) -> None:
    parameters = {**_draft(steps=steps).parameters, "deepcache": asked}
    made = int(steps * strength)
    whole = {**parameters, "steps": made}
    edited = {**parameters, "edit": {"strength": strength}}
    assert admission.work_s(CACHED, ImageJob.read(edited)) == pytest.approx(
        admission.work_s(CACHED, ImageJob.read(whole))
    )
    assert admission.solo_s(CACHED, ImageJob.read(edited)) == pytest.approx(
        admission.solo_s(CACHED, ImageJob.read(whole))
    )


def test_a_size_that_was_not_measured_is_told_from_another() -> None:
    named = {"depth": "block", "interval": 2}
    assert _draft(steps=10, size="64x64", deepcache=named).work_ms == 300 + 2 * (5 * 10 + 5 * 4)
    at_depth = {**named, "depth": "resnet"}  # measured at 128x128 alone
    assert _draft(steps=10, size="64x64", deepcache=at_depth).work_ms == 300 + 2 * (5 * 10 + 5 * 1.5)


@pytest.mark.parametrize(
    "card",
    [
        CARD,
        dataclasses.replace(CACHED, costs=dataclasses.replace(CACHED.costs, shallow_row_step_s={"block": {}})),
        dataclasses.replace(CACHED, deepcache={"rhythm": 3}),
        dataclasses.replace(CACHED, deepcache={"interval": 0}),
        dataclasses.replace(CACHED, deepcache=7),
    ],
    ids=["silent", "unmeasured", "newer", "wrong", "no schedule"],
)
def test_what_nobody_can_tell_counts_as_deep(card: Any) -> None:
    asked = {"deepcache": "auto"} if card.deepcache == "off" else {}
    assert _draft(card, steps=10, **asked).work_ms == 300 + 10 * 2 * 30


def test_a_deadline_is_held_against_the_steps_that_are_made(shared: Api, worker: Worker) -> None:
    """All deep it takes 1.9 s at best; by "auto" 11 of 20 steps are deep: 0.3 + 11 × 0.08 + 9 × 0.02 s."""
    worker.announce(card=CACHED)
    order = {"type": "image", "prompt": "a cat", "priority": 0, "deadline_s": 1.5}
    told = dataclasses.asdict(CACHED.costs)
    eventually(lambda: shared.client.get(f"/v1/models/{CARD.name}").json()["diptych"]["costs"] == told)
    check_error(shared.post("/v1/jobs", **order), 400, "deadline_s", "deadline_hopeless")
    answer = shared.post("/v1/jobs", **order, deepcache="auto")
    assert answer.status_code == 202, answer.text
    job = worker.job(answer.json()["id"])
    assert job.work_ms == 300 + (2 * (11 * 30 + 9 * 6))
    hopeless = shared.post("/v1/jobs", **{**order, "deadline_s": 1.3}, deepcache="auto")
    check_error(hopeless, 400, "deadline_s", "deadline_hopeless")
    assert "1.4 s at best" in hopeless.json()["error"]["message"]


def test_the_most_urgent_estimate_adds_what_is_queued() -> None:
    draft = _draft(deadline_s=2.0, deepcache="auto")
    admission.check_deadline(draft, CACHED, QueueBacklog(1, 500, 0, 0), 1)
    with pytest.raises(ApiError, match="cannot be met"):
        admission.check_deadline(draft, CACHED, QueueBacklog(1, 700, 0, 0), 1)
