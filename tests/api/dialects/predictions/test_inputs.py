"""The input of predictions: what each name becomes, and that whatever was drawn can be asked for again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dialects.foreign import errors_at
from api.dialects.predictions.inputs import components, given_back, job_fields
from api.errors import ApiError
from api.pictures.references import read_job
from contract.card import ImageCard
from contract.image import ImageJob
from contract.image_request import ImageRequest
from core.jobs.record import from_json, to_json
from tests.api.world import CARD

BASE = "https://pictures.example/"
FILE = "file-0123456789abcdef01234567"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
NAMES = [*components(CARD)["Input"]["properties"], "guidance", "lora", "refine", "input_image", "upscale", "control"]


def fields_of(**values: Any) -> dict[str, Any]:
    return job_fields({"prompt": "a cat", **values}, BASE, CARD)[0]


def read(values: dict[str, Any], card: ImageCard = CARD) -> ImageRequest:
    fields, places = job_fields(values, BASE, card)
    with errors_at(places):
        return read_job(fields, ignore_unknown=False)


TUNED = replace(CARD, plans={"fast": {"steps": 9, "guidance_interval": [0, 0.5], "deepcache": "auto"}}, plan="fast")


def completed(values: dict[str, Any], card: ImageCard) -> ImageJob:
    return read(values, card).complete(card.offer)


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"num_outputs": 2, "num_inference_steps": 9, "guidance": 2.5}, {"n": 2, "steps": 9, "guidance_scale": 2.5}),
        ({"width": 64, "height": 128}, {"width": 64, "height": 128}),
        ({"aspect_ratio": "16:9"}, {"size": "168x96"}),
        ({"aspect_ratio": "9:16", "megapixels": "1"}, {"size": "96x168"}),
        ({"aspect_ratio": "1:1"}, {"size": "128x128"}),
        ({"aspect_ratio": "1:1", "megapixels": "0.25"}, {"size": "64x64"}), ({"megapixels": "0.25"}, {"size": "64x64"}),
        ({"aspect_ratio": "custom", "width": 64, "height": 64}, {"width": 64, "height": 64}),
        ({"aspect_ratio": "1:1", "width": 64}, {"size": "128x128"}),
        ({"output_format": "jpg", "output_quality": 90}, {"output_format": "jpeg", "output_compression": 90}),
        ({"lora_weights": "ink", "lora_scale": 0.5}, {"lora": "ink:0.5"}),
        ({"lora_weights": "ink"}, {"lora": "ink"}),
        ({"scheduler": "dpm++2m"}, {"scheduler": "dpm++2m"}),
        ({"image": f"{BASE}v1/files/{FILE}"}, {"type": "edit", "images": [{"file_id": FILE}]}),
        ({"input_image": "data:image/webp;base64,AA"}, {"images": [{"image_url": "data:image/webp;base64,AA"}]}),
        ({"image": f"https://other.example/v1/files/{FILE}"}, {"images": [{"image_url": f"https://other.example/v1/files/{FILE}"}]}),
        ({"image": "data:;base64,AA"}, {"images": [{"image_url": "data:image/png;base64,AA"}]}),
        ({"prompt_strength": 0.5, "go_fast": True, "seed": None}, {"type": "image"}),
        ({"deterministic": True, "plan": "off"}, {"deterministic": True, "plan": "off"}),
    ],
)  # fmt: skip
def test_what_a_name_becomes(values: dict[str, Any], fields: dict[str, Any]) -> None:
    assert fields_of(**values).items() >= {"prompt": "a cat", **fields}.items()
    assert "strength" not in fields_of(**values)


@pytest.mark.parametrize(
    ("name", "scheduler", "schedule_type"),
    [("K_EULER", "euler", None), ("DDIM", "euler", None), ("DPMSolverMultistep", "dpm++2m", None),
     ("KarrasDPM", "dpm++2m", "karras")],
)  # fmt: skip
def test_what_a_scheduler_becomes(name: str, scheduler: str, schedule_type: str | None) -> None:
    picture = completed({"prompt": "a cat", "scheduler": name}, CARD).picture
    assert (picture.scheduler, picture.schedule_type) == (scheduler, schedule_type)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"width": 64}, "input.height"),
        ({"height": True, "width": 64}, "input.height"),
        ({"aspect_ratio": "wide"}, "input.aspect_ratio"),
        ({"aspect_ratio": 1.5}, "input.aspect_ratio"),
        ({"megapixels": 2}, "input.megapixels"),
        ({"megapixels": ["1"]}, "input.megapixels"),
        ({"lora_scale": "a"}, "input.lora_scale"),
        ({"lora_weights": 1}, "input.lora_weights"),
        ({"mask": {"image_url": "x"}}, "input.mask"),
        ({"no name": 1}, "input"),
        ({"guidance": 2.0, "guidance_scale": 2.0}, "input.guidance_scale"),
        ({"image": "data:,", "input_image": "data:,"}, "input.input_image"),
        ({"size": "64x64", "aspect_ratio": "1:1"}, "input.size"),
    ],
)
def test_what_is_refused_by_name(values: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read({"prompt": "a cat", **values})
    assert (caught.value.status, caught.value.param) == (400, param)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), JSON, max_size=6))
def test_any_input_is_a_request_or_refused(values: dict[str, Any]) -> None:
    try:
        read(values)
    except ApiError as error:
        assert error.status == 400
        assert error.param == "input" or (error.param or "").startswith("input.")


INPUTS = st.fixed_dictionaries(
    {"prompt": st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=9)},
    optional={
        "negative_prompt": st.sampled_from(["", "fog"]),
        "num_outputs": st.integers(1, 4),
        "num_inference_steps": st.integers(1, 40),
        "guidance_scale": st.floats(1, 9),
        "seed": st.integers(0, 2**53),
        "scheduler": st.sampled_from(["K_EULER", "KarrasDPM", "euler"]),
        "aspect_ratio": st.sampled_from(["16:9", "1:1"]),
        "output_format": st.sampled_from(["jpg", "webp", "png"]),
        "output_quality": st.integers(0, 100),
        "deepcache": st.sampled_from(["auto", "off"]),
        "plan": st.just("off"),
        "prompt_strength": st.floats(0, 1),
    },
)


@pytest.mark.parametrize("card", [CARD, TUNED], ids=["plain", "tuned"])
@given(values=INPUTS)
def test_an_input_that_is_given_back_draws_the_same(card: ImageCard, values: dict[str, Any]) -> None:
    """Also for a model with a default plan, which says what the input leaves open."""
    first = completed(values, card)
    again = given_back(from_json(to_json(first.to_dict())))
    assert replace(completed(again, card), warnings=first.warnings) == first  # what has no effect is not kept
