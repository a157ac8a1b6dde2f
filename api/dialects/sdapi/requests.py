"""The bodies of AUTOMATIC1111's API, as far as they are read. Values are coerced, and null means not given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from api import schemas
from api.errors import ApiError, invalid_field
from api.http.body import plain
from contract.card import MAX_PROMPT_CHARACTERS
from contract.strict import MAX_NAME

_RULES: schemas.Rules = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type"), "must be an object"),
    "list_type": "must be a list",
    # The model's bounds are checked later, with a message that says them.
    **dict.fromkeys(("greater_than_equal", "less_than_equal", "greater_than"), "is out of range"),
}
B = TypeVar("B", bound="SdapiBody")

_MOST = 2**63 - 1  # of any whole number: no arithmetic with it overflows
_MOST_NAMED = 8  # unknown fields that a warning names
_OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
Picture = Annotated[str | dict[str, Any], WithJsonSchema({"type": "string", "description": "base64 or a data: URL"})]
OptionalPicture = Annotated[
    str | dict[str, Any] | None, BeforeValidator(schemas.only_item), WithJsonSchema(_OPTIONAL_TEXT)
]
Name = Annotated[str | None, Field(max_length=MAX_NAME)]
Text = Annotated[str | None, Field(max_length=MAX_PROMPT_CHARACTERS)]
Whole = Annotated[int | None, Field(ge=-_MOST, le=_MOST)]
Number = Annotated[float | None, Field(allow_inf_nan=False)]
Blur = Annotated[Number, Field(ge=0, le=256)]
Flag = bool | None
Object = dict[str, Any] | None


class SdapiBody(BaseModel):
    """A body. Unknown fields are ignored; `unread` lists them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are given, by name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class Generation(SdapiBody):
    """What txt2img and img2img have in common."""

    prompt: Text = Field(default=None, description="with (words:1.3), BREAK and <lora:name:0.8>")
    negative_prompt: Text = None
    seed: Whole = Field(default=None, description="of the first picture, each next one has the next; -1: random")
    batch_size: Annotated[Whole, Field(ge=1, le=100)] = None
    n_iter: Annotated[Whole, Field(ge=1, le=100)] = None
    steps: Whole = None
    cfg_scale: Number = None
    width: Annotated[Whole, Field(ge=1)] = None
    height: Annotated[Whole, Field(ge=1)] = None
    sampler_name: Name = None
    sampler_index: Name = Field(default=None, description="the older name of sampler_name")
    scheduler: Name = None
    denoising_strength: Number = None
    eta: Number = Field(default=None, description="of TCD: how much noise each step adds")
    refiner_checkpoint: Name = None
    refiner_switch_at: Number = None
    override_settings: Object = Field(default=None, description="options of this request")
    alwayson_scripts: Object = Field(default=None, description="controlnet, with units in args")
    script_name: Name = None
    send_images: Flag = None
    force_task_id: Name = None


class Txt2Img(Generation):
    enable_hr: Flag = Field(default=None, description="the finished picture is enlarged by hr_upscaler")
    hr_upscaler: Name = None
    hr_scale: Number = None
    hr_resize_x: Whole = None
    hr_resize_y: Whole = None


class Img2Img(Generation):
    model_config = ConfigDict(json_schema_extra={"required": ["init_images"]})

    init_images: Annotated[list[Picture] | None, Field(max_length=16, fail_fast=True)] = None
    mask: OptionalPicture = Field(default=None, description="white is drawn anew, or what is opaque in it")
    mask_blur: Blur = Field(default=None, description="of its edges, in its pixels; in place of mask_blur_x and _y")
    mask_blur_x: Blur = None
    mask_blur_y: Blur = None
    inpainting_mask_invert: Whole = None
    inpainting_fill: Whole = None
    inpaint_full_res: bool | int | None = None
    resize_mode: Whole = None


class OptionsBody(SdapiBody):
    sd_model_checkpoint: Name = None
    sd_vae: Name = None
    CLIP_stop_at_last_layers: Annotated[Whole, Field(ge=1, le=32)] = None
    samples_format: Name = None
    enable_prompt_comments: Flag = Field(default=None, description="false: a # is no comment in prompts")
    show_progress_every_n_steps: Annotated[Whole, Field(ge=-1, le=1000)] = None


class PngInfoBody(SdapiBody):
    image: Picture


class ExtraSingleImage(SdapiBody):
    image: Picture
    resize_mode: Whole = Field(default=None, description="0: by upscaling_resize; 1: to a width and height")
    upscaling_resize: Annotated[Number, Field(gt=0, le=16)] = None
    upscaling_resize_w: Annotated[Whole, Field(ge=1)] = None
    upscaling_resize_h: Annotated[Whole, Field(ge=1)] = None
    upscaling_crop: Flag = None
    upscaler_1: Name = None
    upscaler_2: Name = None
    extras_upscaler_2_visibility: Number = None


class TaskProgress(SdapiBody):
    id_task: Name = None
    id_live_preview: Whole = None
    live_preview: Flag = None


# Fields that change nothing in a picture, whatever they say: where files go, what is shown.
_QUIET = frozenset((
    "save_images", "do_not_save_samples", "do_not_save_grid", "override_settings_restore_afterwards", "script_args",
    "include_init_images", "image_cfg_scale", "url", "auth", "subseed",
    "hr_upscaler", "hr_scale", "hr_resize_x", "hr_resize_y", "hr_second_pass_steps", "hr_force", "hr_checkpoint_name",
    "hr_sampler_name", "hr_scheduler", "hr_prompt", "hr_negative_prompt", "inpaint_full_res_padding", "mask_blur_x",
    "mask_blur_y", "comments", "show_extras_results", "codeformer_weight",
))  # fmt: skip
# Fields that are not offered, and the values with which they do nothing in the web UI either.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "styles": ([],), "subseed_strength": (0,), "restore_faces": (False,), "tiling": (False,),
    "s_churn": (0,), "s_tmax": (0,), "s_tmin": (0,), "s_noise": (1,), "s_min_uncond": (0,), "ddim_discretize": (),
    "initial_noise_multiplier": (1,), "firstphase_width": (0,), "firstphase_height": (0,), "enable_hr": (False,),
    "disable_extra_networks": (False,), "gfpgan_visibility": (0,), "codeformer_visibility": (0,),
    "seed_resize_from_w": (0, -1), "seed_resize_from_h": (0, -1), "upscale_first": (False,),
}  # fmt: skip
# Options of the same two kinds.
_QUIET_OPTIONS = frozenset((
    "sd_checkpoint_hash", "live_previews_enable", "enable_pnginfo", "control_net_unit_count", "save_images_add_number",
    "return_grid", "do_not_show_images", "send_seed", "send_size", "sd_checkpoint_cache", "sd_vae_checkpoint_cache",
    "hires_fix_use_firstpass_conds", "face_restoration_unload", "face_restoration_model", "code_former_weight",
    "samples_save", "grid_save",
))  # fmt: skip
_NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "sd_lora": ("", "None"), "sd_hypernetwork": ("", "None"), "eta_noise_seed_delta": (0,),
    "img2img_color_correction": (False,), "inpainting_mask_weight": (1,), "initial_noise_multiplier": (1,),
    "face_restoration": (False,), "tiling": (False,),
}  # fmt: skip


# Fields of a unit of the ControlNet extension of the same two kinds.
_QUIET_IN_UNITS = frozenset((
    "low_vram", "lowvram", "pixel_perfect", "save_detected_map", "is_ui", "output_dir", "use_preview_as_input",
    "generated_image",
))  # fmt: skip
_NEUTRAL_IN_UNITS: dict[str, tuple[Any, ...]] = {
    "guidance": (1,), "guess_mode": (False,), "guessmode": (False,), "input_mode": ("simple",), "loopback": (False,),
    "batch_images": ("", []), "mask_image": ("",), "effective_region_mask": ("",), "advanced_weighting": ([],),
    "hr_option": ("Both", "both", 0), "pulid_mode": ("Fidelity",), "ipadapter_input": ([],),
    "inpaint_crop_input_image": (),
}  # fmt: skip


def unread(kind: type[SdapiBody], fields: Mapping[str, Any]) -> list[str]:
    """Warnings for the fields of a body, and its options, that are not read, and would have done something."""
    options = fields.get("override_settings")
    unknown = _unread(fields, {*kind.model_fields, *_QUIET}, _NEUTRAL)
    if isinstance(options, dict):
        known = {*OptionsBody.model_fields, *_QUIET_OPTIONS}
        unknown += _unread(options, known, _NEUTRAL_OPTIONS, "override_settings.")
    return _not_read(unknown)


def unread_unit(kind: type[SdapiBody], unit: Mapping[str, Any], prefix: str) -> list[str]:
    """Likewise for the fields of a unit of the ControlNet extension."""
    return _not_read(_unread(unit, {*kind.model_fields, *_QUIET_IN_UNITS}, _NEUTRAL_IN_UNITS, prefix))


def _not_read(unknown: Sequence[str | None]) -> list[str]:
    named = [name for name in unknown[:_MOST_NAMED] if name is not None]
    warnings = [f"{name}: is not read" for name in named]
    if len(unknown) > len(named):
        warnings.append(f"of the other fields {len(unknown) - len(named)} are not read")
    return warnings


def _unread(
    fields: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> list[str | None]:
    """The names of the fields that are not read, and would have done something; None for one that is no plain word."""
    unknown = [
        name for name, value in fields.items()
        if name not in known and value is not None and value not in neutral.get(name, ())
    ]  # fmt: skip
    return [None if (word := plain(name)) is None else prefix + word for name in unknown]


def parse(kind: type[B], fields: dict[str, Any]) -> B:
    """Validate the fields as this body. Raises `ApiError` (400) naming the first invalid field."""
    try:
        return schemas.read(kind, fields, _RULES)
    except ApiError as error:
        name = (error.param or "").partition(".")[0]  # without the kinds of a field that takes several
        raise invalid_field(name or None, error.detail or str(error), error.code or "invalid_value") from None
