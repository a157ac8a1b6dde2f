"""Cascades: what a request with one becomes, what is refused by which field, and what a draft takes of the request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contract.card import ImageDefaults, ImageOffer
from contract.cascade import Cascade
from contract.errors import Invalid
from contract.image import ImageJob
from contract.image_request import EditRequest, ImageRequest, draft_of
from tests.contract.refused import refused

SIZES = [(64, 64), (96, 64)]
OFFER = ImageOffer(
    SIZES, ("euler", "lcm"), (64, 64), loras=("ink",), upscalers=("x4",), refiners=("refiner",),
    cascades={"sketcher": 76.5, "untuned": None},
)  # fmt: skip
STUDENT = ImageDefaults(steps=4, guidance_scale=1.0, scheduler="lcm", student="lcm", most_steps=8)
DRAFT = ImageOffer(SIZES, ("euler", "lcm"), (64, 64), defaults=STUDENT)


def asked(offer: ImageOffer = OFFER, **fields: Any) -> ImageJob:
    return ImageRequest(prompt="a fox", **fields).complete(offer)


@given(st.sampled_from(["sketcher", "untuned"]), st.none() | st.floats(-100, 100))
def test_the_gate_is_the_requests_or_else_the_pairs(draft: str, gate: float | None) -> None:
    expected = gate if gate is not None else (OFFER.cascades or {})[draft]
    if expected is None:
        with refused("cascade.gate"):
            asked(cascade={"draft": draft})
        return
    job = asked(cascade={"draft": draft, "gate": gate})
    assert job.cascade == Cascade(draft=draft, gate=expected)
    assert ImageJob.read(json.loads(json.dumps(job.to_dict()))).cascade == job.cascade


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"cascade": {"draft": "nobody"}}, "cascade.draft", "sketcher, untuned"),
        ({"cascade": {"draft": "../sketcher"}}, "cascade.draft", "must be a name"),
        ({"model": "sketcher", "cascade": {"draft": "sketcher"}}, "cascade.draft", "another model"),
        ({"lora": "ink", "cascade": {"draft": "sketcher"}}, "cascade", "together with lora"),
        ({"upscale": {"model": "x4"}, "cascade": {"draft": "sketcher"}}, "cascade", "together with upscale"),
        ({"refiner": {"model": "refiner"}, "cascade": {"draft": "sketcher"}}, "cascade", "together with refiner"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    with refused(field, said):
        asked(**fields)


def test_a_worker_without_a_scorer_has_none() -> None:
    with pytest.raises(Invalid, match=r"^cascade\.draft: is not offered by this model: it has none$"):
        asked(ImageOffer(SIZES, ("euler",), (64, 64), cascades={}), cascade={"draft": "sketcher", "gate": 1})


def test_an_edit_is_refused() -> None:
    with pytest.raises(Invalid, match=r"^cascade: is not supported for edits$"):
        EditRequest(prompt="a fox", cascade={"draft": "sketcher"}).complete(OFFER, (64, 64))


@pytest.mark.parametrize("gate", [100.1, -101, float("nan"), float("inf"), "75", True])
def test_a_gate_beyond_a_cosine_is_no_gate(gate: Any) -> None:
    with pytest.raises(ValidationError):
        Cascade(draft="sketcher", gate=gate)


@given(
    st.fixed_dictionaries(
        {"seed": st.integers(0, 9), "size": st.sampled_from(["64x64", "96x64"])},
        optional={
            "steps": st.integers(1, 30), "guidance_scale": st.floats(0, 20), "negative_prompt": st.just("fog"),
            "deterministic": st.booleans(), "scheduler": st.just("euler"), "deepcache": st.just("auto"),
            "prompt_weighting": st.booleans(), "preview_every": st.integers(0, 3),
        },
    )
)  # fmt: skip
def test_a_draft_is_the_pictures_prompt_seed_and_size_by_its_models_defaults(fields: dict[str, Any]) -> None:
    picture = asked(**fields).picture
    draft = draft_of(picture, DRAFT).pictures()[0]
    for name in ("prompt", "seed", "size", "negative_prompt", "deterministic", "prompt_weighting"):
        assert getattr(draft, name) == getattr(picture, name)
    assert (draft.steps, draft.guidance_scale, draft.scheduler) == (4, 1.0, "lcm")
    assert draft.preview_every == 0 and draft.deepcache is None


def test_a_size_that_the_draft_model_lacks_is_told_as_the_drafts() -> None:
    with refused("cascade.draft", "size"):
        draft_of(asked(size="96x64").picture, ImageOffer([(64, 64)], ("euler",), (64, 64)))
