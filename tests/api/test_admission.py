"""From fields to a job: defaults, limits of the card, estimates."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import admission
from api.errors import ApiError
from api.uploads import PictureSource, PictureUploads, Upload
from contract.card import ImageCard, ImageCosts, ImageDefaults, ImageLimits
from contract.image_request import EditRequest, ImageRequest, Margins
from core.jobs.record import QueueBacklog
from tests.api.world import CARD


def fields(**given: object) -> ImageRequest:
    return ImageRequest.model_validate({"prompt": "a cat", **given})


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
    assert strength(dataclasses.replace(CARD, inpaint_only=True), upload) == ("mask" if opaque else 1)
    whole = dataclasses.replace(CARD, sources=("text", "image"))
    assert strength(whole, upload) == 0.8
    assert strength(whole, dataclasses.replace(upload, mask=upload.image)) == "mask"
    assert strength(whole, dataclasses.replace(upload, margins=Margins(left=8))) == "mask"


def test_fills_in_what_is_not_given() -> None:
    draft = admission.image_draft(fields(), CARD)
    parameters = draft.parameters
    assert 0 <= parameters.pop("seed") < 2**63
    assert len({admission.image_draft(fields(), CARD).parameters["seed"] for _ in range(10)}) == 10
    assert parameters == {
        "prompt": "a cat", "negative_prompt": None, "n": 1, "steps": 20, "guidance_scale": 5.0, "width": 128,
        "height": 128, "scheduler": None, "deterministic": False,
    }  # fmt: skip
    assert (draft.modality, draft.model, draft.priority, draft.deadline_s) == ("image", "emoji-xl", 5, None)


def test_null_means_not_given() -> None:
    nothing = {name: None for name in ImageRequest.model_fields if name not in ("prompt", "seed")}
    drafts = [admission.image_draft(fields(**given, seed=1), CARD) for given in ({}, nothing, {"size": "auto"})]
    assert len({repr(dataclasses.replace(draft, id="x")) for draft in drafts}) == 1


def test_passes_on_what_is_given() -> None:
    draft = admission.image_draft(
        fields(
            n=3, seed=0, steps=7, guidance_scale=0, negative_prompt="", size="96x168", scheduler="euler", priority=0,
            deadline_s=60, deterministic=True, model="emoji-xl",
        ),
        CARD,
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
        admission.image_draft(fields(size=size), CARD)
    assert caught.value.param == "size"


def test_the_cards_limits_hold() -> None:
    tight = dataclasses.replace(
        CARD, limits=ImageLimits(max_prompt_characters=5, max_steps=4, max_guidance=1.5, max_seed=9, max_images=2)
    )
    draft = admission.image_draft(fields(prompt="12345"), tight)
    assert draft.parameters["steps"] == 4 and draft.parameters["guidance_scale"] == 1.5
    assert 0 <= draft.parameters["seed"] <= 9
    with pytest.raises(ApiError) as caught:
        admission.image_draft(fields(prompt="1", steps=5), tight)
    assert caught.value.param == "steps"


def test_the_cards_defaults_are_taken_for_what_is_not_given() -> None:
    turbo = dataclasses.replace(CARD, defaults=ImageDefaults(steps=8, guidance_scale=0.0, guided_above=0.0))
    for card, steps, guidance in ((CARD, 20, 5.0), (turbo, 8, 0.0)):
        parameters = admission.image_draft(fields(), card).parameters
        assert (parameters["steps"], parameters["guidance_scale"]) == (steps, guidance)
    assert admission.image_draft(fields(), turbo).work_ms == 100 + 8 * 30 + 200, "without guidance, one row"
    assert admission.image_draft(fields(guidance_scale=0.5), turbo).work_ms == 100 + 8 * 2 * 30 + 200


def test_work_counts_pictures_steps_and_rows() -> None:
    def work(**given: object) -> int:
        return admission.image_draft(fields(**given), CARD).work_ms

    assert work(steps=10) == 100 + 10 * 2 * 30 + 200
    assert work(steps=10, guidance_scale=1) == 100 + 10 * 30 + 200
    assert work(steps=10, n=4) == 4 * work(steps=10)
    assert work(steps=10, size="64x64") == 100 + 10 * 2 * 10 + 200
    # Not measured: from the nearest by area, scaled.
    assert work(steps=10, size="96x168") == 300 + round(10 * 2 * 30 * (96 * 168) / (128 * 128))


def test_a_card_without_costs_is_no_obstacle() -> None:
    idle = QueueBacklog(0, 0, 0, 0)
    for costs in (ImageCosts(), ImageCosts(encode_s=0.5)):
        card = dataclasses.replace(CARD, costs=costs)
        draft = admission.image_draft(fields(deadline_s=1), card)
        admission.check_deadline(draft, card, idle, 1)
        assert draft.deadline_s == 1
        with pytest.raises(ApiError):
            admission.check_deadline(draft, CARD, idle, 1)


def hopeless(backlog_ms: int, ready: int, **given: object) -> str | None:
    draft = admission.image_draft(fields(**given), CARD)
    try:
        admission.check_deadline(draft, CARD, QueueBacklog(1, backlog_ms, 0, 0), ready)
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
