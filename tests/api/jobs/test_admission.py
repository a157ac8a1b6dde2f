"""From fields to a job: defaults, limits of the card, estimates."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.cards import RegistrySnapshot, WorkEstimates
from api.errors import ApiError
from api.jobs import admission
from api.pictures.uploads import PictureSource, PictureUploads, Upload
from api.schemas import read
from contract import plan
from contract.card import ImageCard, ImageCosts, ImageDefaults, ImageLimits
from contract.estimates import solo_s, work_s
from contract.image import ImageJob
from contract.image_request import EditRequest, ImageRequest, Margins
from contract.plan import AUTO, DEPTHS, DeepCache
from core.jobs.record import JobDraft, QueueBacklog
from tests.api.world import CARD, TEXT
from workers.images.handler import pictures


def draft_of(card: ImageCard = CARD, **fields: Any) -> JobDraft:
    return admission.image_draft(read(ImageRequest, {"prompt": "a cat", **fields}), card)


def strength(card: ImageCard, upload: Upload) -> float | str | None:
    """The strength of an edit, or the field by which it is refused."""
    try:
        edit = EditRequest(prompt="a cat")
        return float(admission.image_draft(edit, card, PictureUploads(upload)).parameters["edit"]["strength"])
    except ApiError as error:
        return error.param


@pytest.mark.parametrize("alpha", [None, True, False])
def test_a_picture_may_be_its_own_mask_until_it_is_known_to_be_opaque(alpha: bool | None) -> None:
    """For models that need a mask; others draw an opaque one at the strength of image-to-image, and those without
    masks any.
    """
    upload = Upload(PictureSource("image", 1, bytes, size=(128, 128), alpha=alpha))
    opaque = alpha is False
    assert strength(CARD, upload) == (0.8 if opaque else 1)
    assert strength(replace(CARD, inpaint_only=True), upload) == ("mask" if opaque else 1)
    whole = replace(CARD, sources=("text", "image"))
    assert strength(whole, upload) == 0.8
    assert strength(whole, replace(upload, mask=upload.image)) == "mask"
    assert strength(whole, replace(upload, margins=Margins(left=8))) == "mask"


def test_fills_in_what_is_not_given() -> None:
    draft = draft_of()
    parameters = draft.parameters
    assert 0 <= parameters.pop("seed") < 2**63
    assert len({draft_of().parameters["seed"] for _ in range(10)}) == 10
    assert parameters == {
        "prompt": "a cat", "negative_prompt": None, "n": 1, "steps": 20, "guidance_scale": 5.0, "width": 128,
        "height": 128, "scheduler": None, "deterministic": False,
    }  # fmt: skip
    assert (draft.modality, draft.model, draft.priority, draft.deadline_s) == ("image", "emoji-xl", 5, None)


def test_null_means_not_given() -> None:
    nothing = {name: None for name in ImageRequest.model_fields if name not in ("prompt", "seed")}
    drafts = [draft_of(**given, seed=1) for given in ({}, nothing, {"size": "auto"})]
    assert len({repr(replace(draft, id="x")) for draft in drafts}) == 1


def test_passes_on_what_is_given() -> None:
    draft = draft_of(
        n=3, seed=0, steps=7, guidance_scale=0, negative_prompt="", size="96x168", scheduler="euler", priority=0,
        deadline_s=60, deterministic=True, model="emoji-xl",
    )  # fmt: skip
    assert draft.parameters == {
        "prompt": "a cat", "negative_prompt": "", "n": 3, "seed": 0, "steps": 7, "guidance_scale": 0.0, "width": 96,
        "height": 168, "scheduler": "euler", "deterministic": True,
    }  # fmt: skip
    assert (draft.priority, draft.deadline_s) == (0, 60)


@pytest.mark.parametrize(
    "size", ["129x128", "128X128", "128×128", "128x128 ", "-128x128", "1e2x128", "", "99999x99999", "128", "x"]
)
def test_refuses_sizes_that_are_not_offered(size: str) -> None:
    with pytest.raises(ApiError, match=r"offered: 128x128, 96x168, 168x96, 64x64$") as caught:
        draft_of(size=size)
    assert caught.value.param == "size"


def test_the_cards_limits_hold() -> None:
    tight = replace(
        CARD, limits=ImageLimits(max_prompt_characters=5, max_steps=4, max_guidance=1.5, max_seed=9, max_images=2)
    )
    draft = draft_of(tight, prompt="12345")
    assert draft.parameters["steps"] == 4 and draft.parameters["guidance_scale"] == 1.5
    assert 0 <= draft.parameters["seed"] <= 9
    with pytest.raises(ApiError) as caught:
        draft_of(tight, prompt="1", steps=5)
    assert caught.value.param == "steps"


def test_the_cards_defaults_are_taken_for_what_is_not_given() -> None:
    turbo = replace(CARD, defaults=ImageDefaults(steps=8, guidance_scale=0.0, guided_above=0.0))
    for card, steps, guidance in ((CARD, 20, 5.0), (turbo, 8, 0.0)):
        parameters = draft_of(card).parameters
        assert (parameters["steps"], parameters["guidance_scale"]) == (steps, guidance)
    assert draft_of(turbo).work_ms == 100 + 8 * 30 + 200, "without guidance, one row"
    assert draft_of(turbo, guidance_scale=0.5).work_ms == 100 + 8 * 2 * 30 + 200


def test_work_counts_pictures_steps_and_rows() -> None:
    def work(**fields: Any) -> int:
        return draft_of(**fields).work_ms

    assert work(steps=10) == 100 + 10 * 2 * 30 + 200
    assert work(steps=10, guidance_scale=1) == 100 + 10 * 30 + 200
    assert work(steps=10, n=4) == 4 * work(steps=10)
    assert work(steps=10, size="64x64") == 100 + 10 * 2 * 10 + 200
    # Not measured: from the nearest by area, scaled.
    assert work(steps=10, size="96x168") == 300 + round(10 * 2 * 30 * (96 * 168) / (128 * 128))


def test_a_card_without_costs_is_no_obstacle() -> None:
    idle = QueueBacklog(0, 0, 0, 0)
    for costs in (ImageCosts(), ImageCosts(encode_s=0.5)):
        card = replace(CARD, costs=costs, least_costs=costs)
        draft = draft_of(card, deadline_s=1)
        admission.check_deadline(draft, card, idle, 1, reliable_share=1.0)
        assert draft.deadline_s == 1
        with pytest.raises(ApiError):
            admission.check_deadline(draft, CARD, idle, 1, reliable_share=1.0)


def test_a_deadline_is_not_refused_by_costs_that_no_iteration_confirmed() -> None:
    """As after a start under load, which may have slowed each measurement a hundred times."""
    slow = ImageCosts(30.0, 60.0, {"128x128": 24.0}, {"128x128": 9.0}, {"block": {"128x128": 6.0}})
    card = replace(CARD, costs=slow, least_costs=ImageCosts(solo_step_s={"128x128": 0.0}, row_step_s={"128x128": 0.0}))
    queue = QueueBacklog(4, 4_000_000, 0, 0)
    for fields in ({}, {"n": 4}, {"steps": 50}, {"size": "64x64"}, {"deepcache": "auto"}):
        admission.check_deadline(draft_of(card, deadline_s=1, **fields), card, queue, 1, reliable_share=0.0)
    partly = replace(card, least_costs=ImageCosts(solo_step_s={"128x128": 0.08}, row_step_s={"128x128": 0.03}))
    admission.check_deadline(draft_of(partly, deadline_s=1.6), partly, queue, 1, reliable_share=0.0)
    with pytest.raises(ApiError, match=r"1\.6 s at best"):
        admission.check_deadline(draft_of(partly, deadline_s=1.59), partly, queue, 1, reliable_share=0.0)


def test_queued_work_counts_by_how_much_costs_have_sunk_since_it_was_estimated() -> None:
    unconfirmed = replace(CARD, capacity_per_s=0.01, least_costs=ImageCosts())
    slow, fast = replace(CARD, capacity_per_s=0.01), replace(CARD, capacity_per_s=1.0)
    queued, running = {CARD.name: QueueBacklog(2, 200_000, 0, 0)}, {CARD.name: QueueBacklog(0, 0, 1, 100_000)}
    empty = {CARD.name: QueueBacklog(0, 0, 0, 0)}
    estimates = WorkEstimates()
    history = [
        (unconfirmed, {}, 0.0), (slow, {}, 1.0), (slow, queued, 1.0), (fast, queued, 0.01), (fast, queued, 0.01),
        (fast, running, 0.01), (fast, queued, 0.01),  # with the estimate that it had
        (fast, empty, 1.0), (fast, running, 1.0), (fast, queued, 1.0), (unconfirmed, queued, 0.0), (fast, queued, 0.01),
    ]  # fmt: skip
    assert [estimates.reliable_shares([card, TEXT], load) for card, load, _ in history] == [
        {CARD.name: pytest.approx(share)} for *_, share in history
    ]
    for load in (queued, running):
        assert WorkEstimates().reliable_shares([fast], load) == {CARD.name: 0.0}, "by estimates that are unknown here"


def test_of_several_models_work_the_least_reliable_counts() -> None:
    other = replace(CARD, name="another")
    loads = {other.name: QueueBacklog(1, 100_000, 0, 0), TEXT.name: QueueBacklog(1, 100_000, 0, 0)}
    now = RegistrySnapshot(models=(CARD, other, TEXT), reliable_shares={CARD.name: 1.0, other.name: 0.25})
    assert now.reliable_share(CARD.name) == 1.0
    assert replace(now, model_backlogs=loads).reliable_share(CARD.name) == 0.25
    assert now.reliable_share("unknown") == 0.0


def hopeless(backlog_ms: int, ready: int, **fields: Any) -> str | None:
    draft = draft_of(**fields)
    try:
        admission.check_deadline(draft, CARD, QueueBacklog(1, backlog_ms, 0, 0), ready, reliable_share=1.0)
    except ApiError as error:
        assert (error.status, error.param, error.code) == (400, "deadline_s", "deadline_hopeless")
        return str(error)
    return None


def test_a_deadline_is_held_against_the_best_case() -> None:
    # 0.1 + 20 · 0.08 + 0.2: one picture that has a worker to itself
    assert hopeless(0, 1, deadline_s=1.95) is None
    assert "1.9 s at best" in str(hopeless(0, 1, deadline_s=1.85))
    assert "12 s at best" in str(hopeless(10_000, 1, deadline_s=11.8))
    assert hopeless(10_000, 1, deadline_s=12) is None
    assert hopeless(10_000, 5, deadline_s=4) is None, "five workers share the queue"
    assert hopeless(10_000, 1, deadline_s=2, priority=2) is None, "the most urgent do not wait for the queue"
    assert hopeless(10_000, 1, deadline_s=2, priority=3) is not None
    assert hopeless(10_000, 0, deadline_s=0.001) is None, "with no worker nothing can be estimated"
    assert hopeless(10**9, 1) is None, "no deadline"
    # Many pictures are not faster than full batches: 10 · (0.1 + 20 · 2 · 0.03 + 0.2)
    assert "15 s at best" in str(hopeless(0, 1, deadline_s=14, n=10))


@given(
    st.integers(1, 10), st.integers(1, 1000), st.floats(0, 100), st.sampled_from(CARD.sizes), st.integers(0, 10**9),
    st.integers(1, 50),
)  # fmt: skip
def test_the_estimate_that_is_told_is_taken(
    n: int, steps: int, guidance: float, size: tuple[int, int], queued_ms: int, ready: int
) -> None:
    asked = {"n": n, "steps": steps, "guidance_scale": guidance, "size": f"{size[0]}x{size[1]}"}
    said = hopeless(queued_ms, ready, deadline_s=1e-9, **asked)
    assert said is not None
    told = float(said.split(" takes ")[1].split(" s ")[0])
    assert told > 86_400 or hopeless(queued_ms, ready, deadline_s=told, **asked) is None


@given(st.floats(0, 1e12))
def test_retry_after_is_within_its_bounds(wait_s: float) -> None:
    after_s = admission.retry_after_s(wait_s)
    assert 1 <= after_s <= 120
    assert after_s in (1, 120) or after_s == math.ceil(wait_s)


# -- DeepCache -------------------------------------------------------------------------------------------------------

_COSTS = replace(
    CARD.costs,
    shallow_solo_step_s={"block": {"128x128": 0.04}, "resnet": {"128x128": 0.02}},
    shallow_row_step_s={"block": {"128x128": 0.015, "64x64": 0.004}, "resnet": {"128x128": 0.006}},
)
CACHED = replace(
    CARD,
    costs=_COSTS,
    least_costs=_COSTS,
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
    schedule = draft_of(CACHED, deepcache=value).parameters.get("deepcache")
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
    assert draft.work_ms <= draft_of(steps=steps, guidance_scale=guidance, n=n).work_ms


def test_steps_without_guidance_count_half() -> None:
    """Of 30 ms a row, and 300 ms beside the steps; nothing is left out where there is no guidance."""
    for interval, rows in ((None, 20), ([0, 0.5], 15), ([0.2, 1], 18), ([0, 1], 20)):
        assert draft_of(CACHED, steps=10, guidance_interval=interval).work_ms == 300 + 30 * rows
    assert draft_of(CACHED, steps=10, guided_steps=[0, 4, 9]).work_ms == 300 + 30 * 13
    assert draft_of(CACHED, steps=10, guidance_scale=1.0, guidance_interval=[0, 0.5]).work_ms == 300 + 30 * 10


def test_a_tiny_decoder_counts_as_it_is_announced() -> None:
    both = replace(CARD, vaes=("full", "tiny"))
    measured = replace(both, costs=replace(both.costs, vae_tiny_s=0.02))
    assert [draft_of(card, steps=10, vae="tiny").work_ms for card in (both, measured)] == [300 + 600, 120 + 600]
    assert draft_of(measured, steps=10).work_ms == 300 + 600


@given(SCHEDULES, st.integers(1, 60), st.floats(0.1, 1.0))
def test_an_edit_is_counted_by_the_steps_it_makes(asked: Any, steps: int, strength: float) -> None:
    parameters = {**draft_of(CACHED, steps=steps).parameters, "deepcache": asked}
    whole = ImageJob.read({**parameters, "steps": int(steps * strength)})
    edited = ImageJob.read({**parameters, "edit": {"strength": strength}})
    for seconds in (work_s, solo_s):
        assert seconds(CACHED, edited) == pytest.approx(seconds(CACHED, whole))


def test_a_size_that_was_not_measured_is_told_from_another() -> None:
    named = {"depth": "block", "interval": 2}
    assert draft_of(CACHED, steps=10, size="64x64", deepcache=named).work_ms == 300 + 2 * (5 * 10 + 5 * 4)
    at_depth = {**named, "depth": "resnet"}  # measured at 128x128 alone
    assert draft_of(CACHED, steps=10, size="64x64", deepcache=at_depth).work_ms == 300 + 2 * (5 * 10 + 5 * 1.5)


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
            draft = draft_of(CACHED, priority=0, deadline_s=deadline_s, deepcache=schedule)
            with pytest.raises(ApiError, match=f"{most_s:.1f} s at best") if refused else nullcontext():
                admission.check_deadline(draft, CACHED, QueueBacklog(0, 0, 0, 0), 1, reliable_share=1.0)
