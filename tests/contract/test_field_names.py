"""Image requests in the words of other servers and of OpenAI's clients: what they become, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.image_edit_params import ImageEditParamsBase
from openai.types.image_generate_params import ImageGenerateParamsBase

from api import schemas
from api.errors import ApiError
from contract.bounds import MAX_EXACT, MAX_SEED
from contract.card import MAX_IMAGES, ImageOffer
from contract.chat import ChatFields
from contract.errors import Invalid
from contract.field_names import OTHER_NAMES
from contract.image import ImageJob
from contract.image_request import EditRequest, ImageRequest
from contract.text import CompletionFields
from pipeline.sizes import sizes
from tests.core.present import present

OFFER = ImageOffer(sizes(64, 16), ("euler", "lcm"), (64, 64))
EDITED = {"image", "mask", "markup"}  # files of a form


def read(**fields: Any) -> ImageRequest:
    return schemas.read(ImageRequest, {"prompt": "a fox", **fields})


OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_inference_steps": 7}, {"steps": 7}),
    ({"cfg_scale": 2.5}, {"guidance_scale": 2.5}),
    ({"sampler_name": "lcm"}, {"scheduler": "lcm"}),
    ({"num_images_per_prompt": 2}, {"n": 2}),
    ({"num_images": 2}, {"n": 2}),
    ({"width": 32, "height": 64}, {"size": "32x64"}),
    ({"seed": -1}, {}),
    ({"steps": 7, "num_inference_steps": 7}, {"steps": 7}),
    ({"size": "32x64", "width": 32, "height": 64}, {"size": "32x64"}),
    ({"size": None, "width": 32, "height": 64}, {"size": "32x64"}),
    ({"size": "auto", "width": 32, "height": 64}, {"size": "32x64"}),
    ({"guidance_scale": 7, "cfg_scale": 7.0}, {"guidance_scale": 7}),
    ({"steps": 7, "num_inference_steps": 7.0}, {"steps": 7}),
]


@pytest.mark.parametrize(("fields", "ours"), OTHERS, ids=str)
def test_other_names_give_our_fields(fields: dict[str, Any], ours: dict[str, Any]) -> None:
    assert read(**fields).given == read(**ours).given
    assert {field for _, field in [*OTHER_NAMES.items()]} <= ImageRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"steps": 7, "num_inference_steps": 8}, "num_inference_steps", "invalid_value"),
        ({"num_images": 1, "num_images_per_prompt": 2}, "num_images_per_prompt", "invalid_value"),
        ({"guidance_scale": 5.0, "cfg_scale": 4.0}, "cfg_scale", "invalid_value"),
        ({"true_cfg_scale": "4"}, "true_cfg_scale", "invalid_type"),
        ({"size": "64x64", "width": 32, "height": 32}, "width", "invalid_value"),
        ({"width": 32}, "height", "missing_required_parameter"),
        ({"width": "32", "height": 32}, "width", "invalid_type"),
        ({"width": 32, "height": 0}, "height", "invalid_type"),
        ({"width": True, "height": 32}, "width", "invalid_type"),
        ({"seed": -2}, "seed", "invalid_value"),
        ({"num_inference_steps": "7"}, "steps", "invalid_type"),
        ({"svg": {}}, "svg", "unsupported_parameter"),
        ({"frame_count": 2}, "frame_count", "unsupported_parameter"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_openais_clients_have_no_field_that_is_not_known() -> None:
    for parameters in (ImageGenerateParamsBase, ImageEditParamsBase):
        assert parameters.__annotations__.keys() - EDITED <= EditRequest.model_fields.keys()


HARMLESS: dict[str, Any] = {
    "quality": "auto", "background": "opaque", "moderation": "auto", "input_fidelity": "low", "user": "me",
    "safety_identifier": "me", "response_format": "url", "output_format": "webp", "output_compression": 50,
}  # fmt: skip
WARNED: dict[str, Any] = {
    "quality": "high", "complexity": "low", "style": "vivid", "background": "transparent", "moderation": "low",
    "input_fidelity": "high",
}  # fmt: skip


def test_what_has_no_effect_is_told_and_what_asks_for_nothing_is_not() -> None:
    assert read(**HARMLESS).complete(OFFER).warnings == ()
    warnings = read(**WARNED).complete(OFFER).warnings
    assert [warning.split(":")[0] for warning in warnings] == list(WARNED)
    assert read(output_compression=50).complete(OFFER).warnings[0].startswith("output_compression:")
    assert read(partial_images=2).complete(OFFER).warnings == ("partial_images: has no effect without stream",)


def test_qwens_guidance_is_guidance_where_none_is_given() -> None:
    """As vLLM-Omni's nodes and diffusers' callers send it: alone, or beside the guidance of distilled models."""
    alone = read(true_cfg_scale=2).complete(OFFER)
    beside = read(true_cfg_scale=4.0, guidance_scale=1.0).complete(OFFER)
    assert (alone.picture.guidance_scale, alone.warnings) == (2.0, ())
    assert beside.picture.guidance_scale == 1.0 and beside.warnings[0].startswith("true_cfg_scale:")
    assert read(true_cfg_scale=4.0, guidance_scale=4.0).complete(OFFER).warnings == ()


def test_a_warning_stays_in_the_record_and_not_in_the_request_that_draws_again() -> None:
    job = read(style="vivid").complete(OFFER)
    assert ImageJob.read(job.to_dict()).warnings == job.warnings != ()
    redrawn = present(job.redraw("m", "off"))
    assert "warnings" not in redrawn


USER = {"role": "user", "content": "a"}
NEEDED: dict[type[Any], dict[str, Any]] = {ChatFields: {"messages": [USER]}}


@given(st.sampled_from([ImageRequest, EditRequest, ChatFields, CompletionFields]), st.data())
def test_null_means_not_given_everywhere(kind: type[Any], data: st.DataObject) -> None:
    """Every optional field, documented under whatever name."""
    fields = NEEDED.get(kind, {"prompt": "a"})
    optional = sorted(kind.model_json_schema()["properties"].keys() - fields.keys())
    names = data.draw(st.sets(st.sampled_from(optional)))
    assert schemas.read(kind, fields | dict.fromkeys(names)) == schemas.read(kind, fields)


NESTED: list[tuple[type[Any], dict[str, Any]]] = [
    (EditRequest, {"outpaint": {"left": 8, "top": None}}),
    (ImageRequest, {"upscale": {"model": "x4", "scale": None}}),
    (ImageRequest, {"refiner": {"model": "r", "from": None}}),
    (ImageRequest, {"cascade": {"draft": "d", "gate": None}}),
    (ImageRequest, {"deepcache": {"interval": 3, "depth": None, "first": None}}),
    (ImageRequest, {"control": [{"model": "edges", "strength": None, "image": {"file_id": "f", "image_url": None}}]}),
    (ImageRequest, {"image_prompts": [{"model": "base", "start": None, "end": None}]}),
    (ChatFields, {"stream": True, "stream_options": {"include_usage": None}}),
    (ChatFields, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": None}}}),
    (ChatFields, {"messages": [{**USER, "name": None, "content": [{"type": "text", "text": "a", "refusal": None}]}]}),
]


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return {k: without_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


@pytest.mark.parametrize(("kind", "fields"), NESTED, ids=str)
def test_null_means_not_given_in_objects_too(kind: type[Any], fields: dict[str, Any]) -> None:
    needed = NEEDED.get(kind, {"prompt": "a"})
    assert schemas.read(kind, needed | fields) == schemas.read(kind, needed | without_nulls(fields))


@given(st.integers(1, MAX_IMAGES))
def test_drawn_seeds_are_numbers_that_every_client_holds(n: int) -> None:
    for picture in read(n=n).complete(OFFER).pictures():
        assert 0 <= picture.seed <= MAX_EXACT and int(float(picture.seed)) == picture.seed
    assert read(seed=MAX_SEED).complete(OFFER).picture.seed == MAX_SEED


def test_unknown_fields_are_left_out_with_a_warning_where_that_is_said() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "id": 1}], "id": 2}
    fields = {"messages": [message, message, {**message, "ID": 3}], "n": 2, "zoom": 4, "an odd name": 5}
    fields |= {"stream": True, "stream_options": {"odd too": 1}}
    read = schemas.read(ChatFields, fields, ignore_unknown=True)
    assert len(read.messages) == 3 and read.n == 2
    names = {"messages.content.id", "messages.id", "messages.ID", "zoom", "stream_options"}
    odd = "field whose name is no plain word is not known, and ignored"
    assert {f"A {odd}", f"stream_options: a {odd}"} < set(read.warnings)
    assert {warning.split(":")[0] for warning in read.warnings} == {*names, f"A {odd}"}
    assert set(read.job().warnings or ()) == set(read.warnings)
    with pytest.raises(ApiError, match="n: must be a whole number"):
        schemas.read(ChatFields, {**fields, "n": "2"}, ignore_unknown=True)
    cache = schemas.read(ImageRequest, {"prompt": "a", "deepcache": {"interval": 3, "object": 1}}, ignore_unknown=True)
    assert cache.warnings == ("deepcache.object: is not known, and ignored",)
    many = {f"f{k}": k for k in range(1000)}
    with pytest.raises(ApiError, match="is not known"):
        schemas.read(ImageRequest, {"prompt": "a", **many}, ignore_unknown=True)


@pytest.mark.parametrize(
    ("name", "offered", "expected"),
    [
        ("Euler a", ("euler", "euler-ancestral"), ("euler-ancestral", None)),
        ("euler A ", ("euler-ancestral",), ("euler-ancestral", None)),
        ("k_euler_a", ("euler-ancestral",), ("euler-ancestral", None)),
        ("Euler", ("flow-euler",), ("flow-euler", None)), ("Euler", ("euler", "flow-euler"), ("euler", None)),
        ("DPM++ 2M", ("dpm++2m",), ("dpm++2m", None)), ("DPM++ 2M Karras", ("dpm++2m",), ("dpm++2m", "karras")),
        ("k_dpmpp_2m_ka", ("dpm++2m",), ("dpm++2m", "karras")), ("LCM", ("euler", "lcm"), ("lcm", None)),
    ],
)  # fmt: skip
def test_a_sampler_may_have_the_web_uis_name(
    name: str, offered: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    """Under each name of the field, and in any case."""
    offer = replace(OFFER, schedulers=offered)
    for field in ("sampler_name", "scheduler"):
        picture = read(**{field: name}).complete(offer).picture
        assert (picture.scheduler, picture.schedule_type) == expected


def test_a_curve_that_is_given_goes_before_that_of_a_name() -> None:
    offer = replace(OFFER, schedulers=("dpm++2m",))
    picture = read(sampler_name="DPM++ 2M Karras", schedule_type="beta").complete(offer).picture
    assert (picture.scheduler, picture.schedule_type) == ("dpm++2m", "beta")


@pytest.mark.parametrize("name", ["Heun", "Euler", "Euler a Karras", "Karras", "lcm karras x"])
def test_a_sampler_that_the_model_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="must be one of dpm"):
        read(sampler_name=name).complete(replace(OFFER, schedulers=("dpm++2m",)))


def test_what_is_near_a_sampler_is_suggested() -> None:
    with pytest.raises(Invalid, match="; the nearest is dpm"):
        read(scheduler="uni_pc").complete(replace(OFFER, schedulers=("euler", "dpm++2m")))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("euler_ancestral", "euler-ancestral"), ("dpmpp_2m", "dpm++2m"), ("dpmpp_2m_sde_gpu", "dpm++2m-sde")],
)
def test_comfyuis_names_of_samplers_are_known(name: str, expected: str) -> None:
    offer = replace(OFFER, schedulers=("euler-ancestral", "dpm++2m", "dpm++2m-sde"))
    assert read(scheduler=name).complete(offer).picture.scheduler == expected
