"""Every field that AUTOMATIC1111's API has changes what is drawn, is told or refused by its name, or is one of those
that are known to change nothing. The names are those of version 1.10's schemas, and of ControlNet's `ControlNetUnit`.
"""

from __future__ import annotations

from typing import Any

import pytest

from api.dialects.foreign import place
from api.dialects.sdapi import requests, translation
from api.dialects.sdapi.requests import Generation, Img2Img, Txt2Img
from api.dialects.sdapi.translation import PLACES
from api.errors import ApiError
from tests.api.dialects.sdapi.studio import CARD
from tests.api.dialects.sdapi.test_translation import source

# Each with a value that would change a picture in the web UI, beside what it needs for that.
SQUARE = {"width": 64, "height": 64}
HIRES = {"enable_hr": True, "hr_upscaler": "nearest4"}
BOTH: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt": ("a dog", {}), "negative_prompt": ("dogs", {}), "styles": (["ink"], {}), "seed": (8, {}),
    "subseed_strength": (0.5, {}), "seed_resize_from_h": (512, {}), "seed_resize_from_w": (512, {}),
    "sampler_name": ("Euler a", {}), "sampler_index": ("Euler a", {}),
    "scheduler": ("Karras", {"sampler_name": "DPM++ 2M SDE"}),
    "batch_size": (2, {}), "n_iter": (2, {}), "steps": (7, {}), "cfg_scale": (3, {}), "width": (64, {"height": 128}),
    "height": (64, {"width": 128}), "restore_faces": (True, {}), "tiling": (True, {}), "eta": (0.5, {}),
    "s_min_uncond": (1, {}), "s_churn": (1, {}), "s_tmax": (1, {}), "s_tmin": (1, {}), "s_noise": (1.1, {}),
    "override_settings": ({"CLIP_stop_at_last_layers": 2}, {}), "refiner_checkpoint": ("polish", {}),
    "refiner_switch_at": (0.5, {"refiner_checkpoint": "polish"}), "disable_extra_networks": (True, {}),
    "firstpass_image": ("a", {}), "script_name": ("X/Y/Z plot", {}), "infotext": ("a dog", {}),
    "alwayson_scripts": ({"ADetailer": {"args": [True]}}, {}),
}  # fmt: skip
OF_TEXT: dict[str, tuple[Any, dict[str, Any]]] = {
    "enable_hr": (True, {"hr_upscaler": "nearest4"}), "hr_scale": (3, HIRES), "hr_upscaler": ("Other", HIRES),
    "hr_resize_x": (192, {**HIRES, **SQUARE}), "hr_resize_y": (192, {**HIRES, **SQUARE}),
    "firstphase_width": (64, {}), "firstphase_height": (64, {}), "init_images": (["a"], {}), "mask": ("a", {}),
}  # fmt: skip
MASKED = {"mask": "mask"}
OF_IMAGE: dict[str, tuple[Any, dict[str, Any]]] = {
    "init_images": (["other"], {}), "denoising_strength": (0.5, {}), "resize_mode": (1, {}), "mask": ("mask", {}),
    "mask_blur": (9, MASKED), "mask_blur_x": (9, MASKED), "mask_blur_y": (9, MASKED), "mask_round": (False, MASKED),
    "inpainting_fill": (2, MASKED), "inpaint_full_res": (True, MASKED), "inpainting_mask_invert": (1, MASKED),
    "initial_noise_multiplier": (0.5, {}), "latent_mask": ("a", {}),
}  # fmt: skip
CASES = [
    *((kind, name, *case) for kind in (Txt2Img, Img2Img) for name, case in BOTH.items()),
    *((Txt2Img, name, *case) for name, case in OF_TEXT.items()),
    *((Img2Img, name, *case) for name, case in OF_IMAGE.items()),
]


def drawn(kind: type[Generation], fields: dict[str, Any]) -> tuple[Any, list[str]]:
    """What is drawn of a body, and what is told."""
    fields = {"prompt": "a cat", "seed": 1, **({"init_images": ["source"]} if kind is Img2Img else {}), **fields}
    body = requests.parse(kind, fields)
    result = translation.translate(body, translation.options_of({}, body), CARD, source)
    pictures = result.pictures
    sources = [None if item is None else item.read() for item in (pictures.image, pictures.mask)]
    state = result.fields, sources, pictures.mask_convention, pictures.mask_blur
    return state, [*result.warnings, *requests.unread(kind, fields)]


@pytest.mark.parametrize(("kind", "name", "value", "beside"), CASES)
def test_a_field_is_drawn_or_told_by_its_name(
    kind: type[Generation], name: str, value: Any, beside: dict[str, Any]
) -> None:
    before, known = drawn(kind, beside)
    try:
        after, warnings = drawn(kind, {**beside, name: value})
    except ApiError as error:
        assert (place(error.param or "", PLACES) or error.param or "").startswith(name)
    else:
        named = [
            warning for warning in warnings if warning not in known and (name in warning or "ADetailer" in warning)
        ]
        assert after != before or named


def test_no_field_is_read_that_is_not_looked_at_here() -> None:
    """A new one needs a row above, or does not change what is drawn."""
    looked_at = {Txt2Img: {*BOTH, *OF_TEXT}, Img2Img: {*BOTH, *OF_IMAGE}}
    quiet = {"send_images", "force_task_id", *requests._QUIET, "denoising_strength"}
    for kind, names in looked_at.items():
        assert {*kind.model_fields} - quiet <= names
