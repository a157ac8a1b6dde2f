"""What a body of AUTOMATIC1111's API means here; what is refused, and what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import schemas
from api.dialects.foreign import place
from api.dialects.sdapi import controlnet, requests, translation
from api.dialects.sdapi.requests import Generation, Img2Img, Txt2Img
from api.dialects.sdapi.translation import PLACES, Translation
from api.errors import ApiError
from api.pictures.uploads import PictureSource
from contract.card import ImageCard
from contract.control import Control
from contract.image_request import EditRequest, ImageRequest
from tests.api.dialects.sdapi.studio import CARD


def source(field: str, value: Any) -> PictureSource:
    return PictureSource(field, len(value), lambda: value.encode())


def made(kind: type[Generation] = Txt2Img, card: ImageCard = CARD, **fields: Any) -> Translation:
    body = requests.parse(kind, {"prompt": "a cat", **fields})
    result = translation.translate(body, translation.options_of({}, body), card, source)
    schemas.read(ImageRequest if result.pictures.image is None else EditRequest, result.fields)
    return result


def refused(kind: type[Generation] = Txt2Img, card: ImageCard = CARD, **fields: Any) -> tuple[str, str]:
    with pytest.raises(ApiError) as caught:
        made(kind, card, **fields)
    param = caught.value.param or ""
    return place(param, PLACES) or param, str(caught.value.detail)


def test_what_is_left_out_is_left_to_the_model() -> None:
    """Null, and an empty negative prompt, which is none there."""
    result = made(negative_prompt="", steps=None, cfg_scale=None, sampler_name=None, override_settings=None)
    seed = result.fields.pop("seed")
    assert 0 <= seed < 2**32
    assert result.fields == {
        "model": "emoji-xl", "prompt": "a cat", "prompt_weighting": "a1111", "n": 1, "preview_every": 10,
    }  # fmt: skip
    assert result.warnings == []


def test_numbers_are_taken_as_they_come() -> None:
    """In text and as floats, as that API coerces them."""
    result = made(seed="7", steps=5.0, cfg_scale="6", batch_size="2", n_iter=2, width=64, height="64")
    for name, value in {"seed": 7, "steps": 5, "guidance_scale": 6.0, "n": 4, "size": "64x64"}.items():
        assert result.fields[name] == value
    assert refused(steps="many") == ("steps", "must be a whole number")
    assert refused(cfg_scale="nan") == ("cfg_scale", "must be a number")
    assert refused(batch_size=0)[0] == "batch_size"
    for name in ("steps", "width", "seed", "hr_resize_x"):
        assert refused(**{name: "1" * 400}) == (name, "is out of range")
    assert refused(override_settings={"CLIP_stop_at_last_layers": "99"})[1] == "is out of range"


@pytest.mark.parametrize(
    ("prompt", "bare", "lora"),
    [
        ("a cat <lora:sepia:0.8>", "a cat", "sepia:0.8"), ("<lora:sepia> a cat", "a cat", "sepia:1"),
        ("a <lora:sepia:1><lora:pixel-art:-.5> cat", "a  cat", "sepia:1,pixel-art:-.5"),
        ("a cat <lyco:sepia:0.5:0.5>", "a cat", "sepia:0.5"), ("a cat <lora:MyStyle:1>", "a cat", "pixel-art:1"),
        ("a cat <lora:sepia:te=0.5:unet=0.5>", "a cat", "sepia:0.5"),
        ("# of no effect\na cat <lora:sepia:1> # <lora:pixel-art:1>", "a cat", "sepia:1"),
    ],
)  # fmt: skip
def test_loras_are_named_in_the_prompt(prompt: str, bare: str, lora: str) -> None:
    result = made(prompt=prompt)
    assert (result.fields["prompt"], result.fields["lora"], result.prompt) == (bare, lora, prompt)
    assert result.warnings == []


@pytest.mark.parametrize(
    ("tag", "scale", "warned"),
    [
        ("0.5:1", "1", "one weight"), ("te=0.5:unet=0.8", "0.8", "one weight"), ("0.8:lbw=OUTALL", "0.8", "lbw"),
        ("0.8:0.8:16", "0.8", "dyn"), ("1:start=5:stop=9", "1", "start, stop"), ("1:a b=2", "1", "an argument"),
    ],
)  # fmt: skip
def test_a_lora_has_its_weight_of_the_unet_and_is_told_what_else_its_tag_says(
    tag: str, scale: str, warned: str
) -> None:
    result = made(prompt=f"a cat <lora:sepia:{tag}>")
    (warning,) = result.warnings
    assert result.fields["lora"] == f"sepia:{scale}" and warned in warning


def test_a_lora_that_is_named_otherwise_is_told() -> None:
    assert "negative_prompt" in made(negative_prompt="<lora:sepia:1>").warnings[0]
    assert refused(prompt="a <lora:../x:1>")[0] == refused(prompt="<lora:sepia:1> <lora:sepia:1>")[0] == "prompt"


@pytest.mark.parametrize(
    ("name", "reason"), [("../x", "begins with none of"), ("a|b", "has '|'"), ("a\u3164", "visible")]
)
def test_what_is_no_loras_name_is_told_why(name: str, reason: str) -> None:
    assert reason in refused(prompt=f"a <lora:{name}:1>")[1]


@pytest.mark.parametrize(
    ("prompt", "drawn", "warned"),
    [
        ("a cat AND a dog :0.5", "a cat, a dog", True), ("a cat :1.2 AND rain :-0.5 AND", "a cat", True),
        ("a cat:0.5", "a cat", True), ("a LAND of cats", "a LAND of cats", False), ("(cat:0.5)", "(cat:0.5)", False),
        ("a cat\n# and no dog\nasleep # soundly", "a cat\nasleep", False), ("", "", False), ("# a cat", "", False),
    ],
)  # fmt: skip
def test_what_the_web_ui_reads_in_a_prompt_is_drawn_or_told(prompt: str, drawn: str, warned: bool) -> None:
    result = made(prompt=prompt)
    assert (result.fields["prompt"], bool(result.warnings), result.prompt) == (drawn, warned, prompt)
    assert not warned or "AND" in result.warnings[0]
    ImageRequest(**result.fields).complete(CARD.offer)


def test_comments_may_be_text() -> None:
    fields = {"prompt": "a #1 cat", "negative_prompt": "dogs # and so on"}
    assert [made(**fields).fields[name] for name in fields] == ["a", "dogs"]
    result = made(**fields, override_settings={"enable_prompt_comments": False})
    assert [result.fields[name] for name in fields] == [*fields.values()]


def test_more_pictures_than_a_request_has_are_told_by_both_fields() -> None:
    field, message = refused(batch_size=4, n_iter=3)
    assert field == "batch_size" and "n_iter" in message and "12" in message and "10" in message


@given(st.text(st.sampled_from("<lora:ab>0.5 ()"), max_size=30))
def test_a_prompt_without_a_whole_name_is_as_it_was(prompt: str) -> None:
    try:
        result = made(prompt=prompt)
    except ApiError as error:
        assert error.param in ("prompt", "lora")
    else:
        assert result.fields["prompt"] == prompt or "lora" in result.fields or "AND" in result.warnings[0]


@pytest.mark.parametrize(
    ("size", "drawn"), [((512, 512), "128x128"), ((1024, 1024), "128x128"), ((200, 200), "200x200"),
                        ((203, 197), "200x200"), ((768, 1344), "96x168"), ((10, 10), "64x64")],
)  # fmt: skip
def test_a_size_that_is_not_offered_is_the_nearest_and_told(size: tuple[int, int], drawn: str) -> None:
    result = made(width=size[0], height=size[1])
    assert result.fields["size"] == drawn
    assert bool(result.warnings) == (drawn != "{}x{}".format(*size))


def test_options_are_read_from_the_request() -> None:
    overrides = {"sd_vae": "taesd", "CLIP_stop_at_last_layers": 2, "samples_format": "jpg", "eta_noise_seed_delta": 1,
                 "show_progress_every_n_steps": -1}  # fmt: skip
    result = made(override_settings=overrides)
    expected = {"vae": "tiny", "clip_skip": 1, "output_format": "jpeg", "preview_every": 0}
    assert {name: result.fields[name] for name in expected} == expected
    of_two_encoders = replace(CARD, prompt_fields=("clip_skip", "prompt_2", "prompt_weighting"))
    result = made(card=of_two_encoders, override_settings=overrides)
    assert "clip_skip" not in result.fields and "CLIP_stop" in result.warnings[0]
    assert "sd_vae" in made(override_settings={"sd_vae": "kl-f8"}).warnings[0]
    assert made(override_settings={"sd_vae": "Automatic", "CLIP_stop_at_last_layers": 1}).warnings == []
    assert refused(override_settings={"CLIP_stop_at_last_layers": "x"})[0].endswith("CLIP_stop_at_last_layers")


def test_stored_options_are_validated_each_by_itself() -> None:
    stored = {"CLIP_stop_at_last_layers": 99, "sd_vae": "full", "samples_format": [], "of_another_version": 1}
    valid, warnings = translation.stored_options(stored)
    assert valid == {"sd_vae": "full", "of_another_version": 1}
    assert [warning.partition(":")[0] for warning in warnings] == ["CLIP_stop_at_last_layers", "samples_format"]
    assert translation.options_of(valid, requests.parse(Txt2Img, {})).sd_vae == "full"


def test_the_hires_fix_enlarges() -> None:
    result = made(enable_hr=True, hr_upscaler="nearest4", denoising_strength=0)
    assert result.fields["upscale"] == {"model": "nearest4", "scale": 2.0} and result.warnings == []
    result = made(enable_hr=True, hr_upscaler="nearest4", hr_scale=3, hr_second_pass_steps=5)
    assert result.fields["upscale"]["scale"] == 3.0 and "no second steps" in result.warnings[0]
    result = made(enable_hr=True, hr_upscaler="nearest4", width=128, height=128, hr_resize_x=256, hr_resize_y=256)
    assert result.fields["upscale"]["scale"] == 2.0
    assert "upscale" not in made(enable_hr=False, hr_upscaler="Latent").fields
    for upscaler in ("Latent", "Latent (nearest-exact)", "Lanczos", "Nearest", "None", None):
        result = made(enable_hr=True, hr_upscaler=upscaler, denoising_strength=0)
        assert result.fields["upscale"] == {"model": "lanczos", "scale": 2.0}
        assert [warning.partition(":")[0] for warning in result.warnings] == ["hr_upscaler"] * (upscaler != "Lanczos")
    field, message = refused(enable_hr=True, hr_upscaler="R-ESRGAN 4x+")
    assert field == "hr_upscaler" and "nearest4, Lanczos" in message
    without = replace(CARD, upscalers=(), upscale_filters=(), refusals={"upscalers": "no folder of upscalers"})
    assert "no folder of upscalers" in refused(card=without, enable_hr=True)[1]
    shape = {"width": 128, "height": 128, "hr_resize_x": 256, "hr_resize_y": 128}
    assert refused(enable_hr=True, hr_upscaler="nearest4", **shape)[0] == "hr_resize_x"


def test_a_refiner_and_scripts() -> None:
    result = made(refiner_checkpoint="polish.safetensors [0123456789]", refiner_switch_at=0.7)
    assert result.fields["refiner"] == {"model": "polish", "from": 0.7}
    assert "refiner" not in made(refiner_checkpoint="None", script_name="").fields
    assert refused(script_name="X/Y/Z plot")[0] == "script_name"


def test_a_source_and_its_mask() -> None:
    fields: dict[str, Any] = {"init_images": ["picture"], "mask": "mask", "mask_blur": 4, "inpainting_fill": 0}
    result = made(Img2Img, **fields, inpainting_mask_invert=1, inpaint_full_res=True, resize_mode=1)
    assert result.fields["strength"] == 0.75
    assert result.pictures.mask is not None and result.pictures.mask_convention == "a1111-inverted"
    named = [warning.partition(":")[0] for warning in result.warnings]
    assert named == ["resize_mode", "inpainting_fill", "inpaint_full_res"]
    assert made(Img2Img, **{**fields, "mask_blur": 0, "inpainting_fill": 1}).warnings == []
    assert made(Img2Img, **{**fields, "mask": ["mask"]}).pictures.mask is not None
    assert refused(Img2Img, **{**fields, "mask": ["a", "b"]})[0] == "mask"
    assert refused(Img2Img)[0] == refused(Img2Img, init_images=["a", "b"])[0] == "init_images"
    assert refused(Img2Img, init_images=["a"], denoising_strength=2)[0] == "denoising_strength"
    assert refused(Img2Img, init_images="a") == ("init_images", "must be a list")


@pytest.mark.parametrize(
    ("fields", "blur"),
    [
        ({}, (4, 4)), ({"mask_blur": 0}, (0, 0)), ({"mask_blur": "8"}, (8, 8)),
        ({"mask_blur_x": 2, "mask_blur_y": 0}, (2, 0)), ({"mask_blur_y": 1}, (4, 1)),
        ({"mask_blur": 3, "mask_blur_x": 9}, (3, 3)), ({"mask_blur": None, "mask_blur_x": None}, (4, 4)),
    ],
)  # fmt: skip
def test_a_mask_is_blurred_as_the_web_ui_does(fields: dict[str, Any], blur: tuple[float, float]) -> None:
    result = made(Img2Img, init_images=["picture"], mask="mask", **fields)
    assert (result.pictures.mask_blur, result.warnings) == (blur, [])
    for name in ("mask_blur", "mask_blur_x"):
        assert refused(Img2Img, init_images=["a"], mask="b", **{name: -1}) == (name, "is out of range")
        assert refused(Img2Img, init_images=["a"], mask="b", **{name: 1e9}) == (name, "is out of range")


@given(st.integers(1, 150), st.floats(0, 1))
def test_a_source_has_at_least_one_step(steps: int, strength: float) -> None:
    result = made(Img2Img, init_images=["a"], steps=steps, denoising_strength=strength)
    drawn = int(steps * result.fields["strength"])
    assert drawn == max(1, int(steps * strength))


UNIT = {"model": "edges [0123abcd]", "image": "picture"}


def scripts(*units: Any, name: str = "ControlNet") -> dict[str, Any]:
    return {"alwayson_scripts": {name: {"args": list(units)}}}


def test_units_are_controls_and_image_prompts() -> None:
    result = made(
        **scripts(
            {**UNIT, "module": "canny", "weight": 0.5, "guidance_start": 0.1, "guidance_end": 0.9},
            {"model": "face", "module": "ip-adapter_clip_sdxl_plus_vith", "image": {"image": "portrait", "mask": None}},
            {"enabled": False, "model": "nothing"}, {"module": "none", "model": "None"}, None, True,
            {"model": "union", "input_image": "map", "union_control_type": "Depth", "module": None},
            name="controlnet",
        )
    )  # fmt: skip
    assert result.fields["control"] == [
        {"model": "edges", "strength": 0.5, "start": 0.1, "end": 0.9, "preprocessor": "canny"},
        {"model": "union", "mode": 1},
    ]
    assert result.fields["image_prompts"] == [{"model": "face"}]
    read = {name: [picture.read() for picture in pictures] for name, pictures in result.pictures.inputs.items()}
    assert read == {"control_image": [b"picture", b"map"], "image_prompt": [b"portrait"]}


def test_a_unit_without_a_picture_reads_the_source() -> None:
    result = made(Img2Img, init_images=["source"], **scripts({"model": "edges"}))
    assert [picture.read() for picture in result.pictures.inputs["control_image"]] == [b"source"]
    assert refused(**scripts({"model": "edges"}))[0] == "alwayson_scripts.controlnet.image"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"threshold_a": 50, "threshold_b": 64.0}, {"low_threshold": 50, "high_threshold": 64}),
        ({"threshold_a": -1, "threshold_b": -1}, {}), ({"module": "none", "threshold_a": 64}, {"preprocessor": None}),
        ({"resize_mode": "Just Resize"}, {"fit": "stretch"}), ({"resize_mode": 1}, {"fit": "crop"}),
        ({"resize_mode": "2"}, {"fit": "contain"}), ({"pixel_perfect": True, "processor_res": -1}, {}),
    ],
)  # fmt: skip
def test_fields_of_units_that_are_read(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    result = made(**scripts({**UNIT, "module": "canny", **fields}))
    entry = {"model": "edges", "preprocessor": "canny", **expected}
    assert result.fields["control"] == [{name: value for name, value in entry.items() if value is not None}]
    assert result.warnings == []
    Control(**result.fields["control"][0]).check()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"effective_region_mask": "mask"}, "effective_region_mask"), ({"processor_res": 512}, "processor_res"),
        ({"advanced_weighting": [1.0] * 12}, "advanced_weighting"), ({"hr_option": "High res only"}, "hr_option"),
        ({"inpaint_crop_input_image": True}, "inpaint_crop_input_image"), ({"future": 1}, "future"),
        ({"a b": 1}, "1 are not read"), ({"union_control_type": "Recolor"}, "union_control_type"),
        ({"module": "depth_leres", "threshold_a": 5}, "threshold_a"), ({"mask_image": "mask"}, "mask_image"),
        *(({"image": image}, "mask") for image in ({"image": "a", "mask": "b"}, ["a", "b"])),
    ],
)  # fmt: skip
def test_fields_of_units_that_would_change_a_picture_are_told(fields: dict[str, Any], name: str) -> None:
    card = replace(CARD, preprocessors=("canny", "depth"))
    (warning,) = made(card=card, **scripts({**UNIT, "module": "canny", **fields})).warnings
    assert name in warning
    assert made(**scripts({**UNIT, **fields, "enabled": False})).warnings == []


def test_units_that_are_refused_or_told() -> None:
    assert refused(**scripts({**UNIT, "module": "openpose_full"}))[0] == "alwayson_scripts.controlnet.module"
    assert refused(**scripts({"module": "canny", "image": "a"}))[0] == "alwayson_scripts.controlnet.model"
    assert refused(**scripts({**UNIT, "weight": "x"}))[0] == "alwayson_scripts.controlnet.weight"
    assert refused(**scripts({**UNIT, "resize_mode": 7}))[0] == "alwayson_scripts.controlnet.resize_mode"
    for ours, theirs in (("strength", "weight"), ("low_threshold", "threshold_a")):
        assert place(f"control.{ours}", PLACES) == f"alwayson_scripts.controlnet.{theirs}"
    assert refused(**scripts(*[UNIT] * 9))[0] == "alwayson_scripts"
    assert refused(alwayson_scripts={"controlnet": {"args": 1}})[0] == "alwayson_scripts"
    assert made(**scripts({**UNIT, "control_mode": "Balanced"})).warnings == []
    assert "control_mode" in made(**scripts({**UNIT, "control_mode": 1})).warnings[0]
    assert "ADetailer" in made(**scripts(True, {"ad_model": "face"}, name="ADetailer")).warnings[0]
    assert made(**scripts(False, name="ADetailer")).warnings == made(**scripts(name="ADetailer")).warnings == []


words = st.sampled_from(
    ["edges", "face", "canny", "None", "nearest4", "a <lora:sepia:1>", "1e400", "9" * 30, "", "Euler a"]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words | st.text(max_size=5)
names_of_units = st.sampled_from(["args", "controlnet", "sd_vae", *controlnet.Unit.model_fields])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names_of_units, inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("kind", [Txt2Img, Img2Img])
@given(st.data())
def test_any_value_of_any_field_is_read_or_refused_by_name(kind: type[Generation], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.model_fields))
    fields = data.draw(st.dictionaries(names, values, max_size=4))
    units = data.draw(st.lists(st.dictionaries(names_of_units, values, max_size=4), max_size=2))
    more = scripts(*units) if units else {}
    try:
        made(kind, **{"init_images": ["a"], **more, **fields})
    except ApiError as error:
        assert error.status == 400 and error.param


def test_fields_that_are_not_read_are_told_where_they_would_do_something() -> None:
    quiet = {"save_images": True, "styles": [], "restore_faces": False, "eta": 1.0, "s_noise": 1, "tiling": None}
    assert requests.unread(Txt2Img, {"prompt": "a", **quiet}) == []
    loud = requests.unread(Txt2Img, {"restore_faces": True, "future": 1, "a b": 2, "subseed_strength": 0.5})
    assert loud == ["restore_faces: is not read", "future: is not read", "subseed_strength: is not read",
                    "of the other fields 1 are not read"]  # fmt: skip
    for kind in (Txt2Img, Img2Img):
        neutral = {
            "seed_resize_from_w": -1, "seed_resize_from_h": 0, "latent_mask": None, "firstpass_image": None,
            "override_settings": {"sd_lora": "None", "eta_noise_seed_delta": 0, "sd_vae": "full", "x": None},
        }  # fmt: skip
        assert requests.unread(kind, neutral) == requests.unread(kind, {"override_settings": None}) == []
        dropped = {
            "seed_resize_from_w": 512, "seed_resize_from_h": 512, "latent_mask": "a", "firstpass_image": "b",
            "sampler_noise_scheduler_override": "c",
        }  # fmt: skip
        overrides = {"eta_noise_seed_delta": 31337, "face": 1, "a b": 1}
        names = [*dropped, "override_settings.eta_noise_seed_delta", "override_settings.face"]
        unread = requests.unread(kind, {**dropped, "override_settings": overrides})
        assert unread == [f"{name}: is not read" for name in names] + ["of the other fields 1 are not read"]
    assert len(requests.unread(Txt2Img, {f"f{k}": k for k in range(5000)})) < 12
