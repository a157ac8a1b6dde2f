"""Translates a body of AUTOMATIC1111's API to an image request of this service. No I/O.

What names a thing that the model does not have is refused; what would change a picture and is not offered is left out
with a warning.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from api.dialects.sdapi import controlnet, names, requests
from api.dialects.sdapi.controlnet import Source
from api.dialects.sdapi.requests import Generation, Img2Img, OptionsBody, Txt2Img
from api.errors import ApiError, invalid_as_api_error, invalid_field
from api.http.body import plain
from api.pictures.references import NONE_GIVEN, GivenPictures
from api.pictures.uploads import MaskConvention, PictureSource
from contract import a1111, loras
from contract.bounds import check_number
from contract.card import TINY, ImageCard, ImageOffer
from contract.markup import A1111, MarkupError
from contract.upscale import LANCZOS

STRENGTH = 0.75  # denoising_strength of img2img by default
MASK_BLUR = 4.0  # mask_blur_x and mask_blur_y of img2img by default
PREVIEW_EVERY = 10  # steps, as show_progress_every_n_steps by default
_SEEDS = 2**32  # random ones are below this, as in the web UI

_NETWORK = re.compile(r"<(lora|lyco):([^:<>]*)((?::[^:<>]*)*)>")
_COMMENT = re.compile(r"(?:(?:\A|\n)#|#)[^\n]*(?:\n|\Z)")
_AND = re.compile(r"\bAND\b")
_WEIGHT = re.compile(r":\s*([-+]?(?:[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}))\s*\Z")  # of a whole prompt
_FILTER = re.compile(r"|none|latent\b.*|lanczos|nearest|bicubic", re.IGNORECASE)  # upscalers that are no networks
_FORMATS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
_NONE = ("", "none", "automatic")

_UNIT = "alwayson_scripts.controlnet"
PLACES = {
    "model": "override_settings.sd_model_checkpoint", "size": "width", "guidance_scale": "cfg_scale",
    "scheduler": "sampler_name", "schedule_type": "scheduler", "n": "batch_size",
    "strength": "denoising_strength", "lora": "prompt", "upscale": "hr_upscaler", "upscale.model": "hr_upscaler",
    "upscale.scale": "hr_scale", "refiner.model": "refiner_checkpoint", "refiner.from": "refiner_switch_at",
    "refiner": "refiner_checkpoint", "clip_skip": "override_settings.CLIP_stop_at_last_layers",
    "vae": "override_settings.sd_vae", "output_format": "override_settings.samples_format",
    **dict.fromkeys(("control", "image_prompts", "control_image", "image_prompt"), _UNIT),
    **{
        f"{field}.{ours}": f"{_UNIT}.{name}" for field in ("control", "image_prompts")
        for ours, name in (
            ("strength", "weight"), ("start", "guidance_start"), ("end", "guidance_end"),
            ("low_threshold", "threshold_a"), ("high_threshold", "threshold_b"),
        )
    },
}  # fmt: skip
"""Where a client finds a field of the service, where it has another name."""


@dataclass
class Translation:
    """A request of this service, and what else the body says.

    `fields` are an `ImageRequest`'s, or with a source image an `EditRequest`'s. `prompt` is as it was given.
    """

    card: ImageCard
    fields: dict[str, Any]
    prompt: str
    options: OptionsBody
    warnings: list[str] = field(default_factory=list)
    pictures: GivenPictures = NONE_GIVEN


def stored_options(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options that the caller has set and that are valid, each by itself; and warnings of the others."""
    valid, warnings = {}, []
    for name, value in stored.items():
        try:
            requests.parse(OptionsBody, {name: value})
        except ApiError:
            warnings.append(f"{name}: the value that was set is not valid any more, and not used")
        else:
            valid[name] = value
    return valid, warnings


def options_of(stored: Mapping[str, Any], body: Generation) -> OptionsBody:
    """The options of a request: its own, and the valid ones that the caller has set. Raises `ApiError`."""
    own = {name: value for name, value in (body.override_settings or {}).items() if name in OptionsBody.model_fields}
    try:
        return requests.parse(OptionsBody, {**stored, **{k: v for k, v in own.items() if v is not None}})
    except ApiError as error:
        raise invalid_field(f"override_settings.{error.param}", error.detail or "", error.code or "") from None


def translate(body: Generation, options: OptionsBody, card: ImageCard, source: Source) -> Translation:
    """The request that this body makes of a model. Raises `ApiError` (400), naming this service's field."""
    result = Translation(card, {"model": card.name}, body.prompt or "", options)
    _add_prompts(result, body, card)
    _add_numbers(result, body, card.offer)
    _add_sampling(result, body, card)
    _add_options(result, card)
    if isinstance(body, Txt2Img) and body.enable_hr:
        _add_upscale(result, body, card.offer)
    if isinstance(body, Img2Img):
        _add_source(result, body, source)
    if body.refiner_checkpoint and body.refiner_checkpoint.lower() not in _NONE:
        result.fields["refiner"] = {"model": [*names.model_names(body.refiner_checkpoint)][-1]}
        if body.refiner_switch_at is not None:
            result.fields["refiner"]["from"] = body.refiner_switch_at
    if body.script_name and body.script_name.lower() != "none":
        raise invalid_field("script_name", "no scripts are offered")

    def unit_source(name: str, value: Any) -> PictureSource:
        if value != "":
            return source(name, value)
        if not isinstance(body, Img2Img):
            raise invalid_field(name, "must be given", "missing_required_parameter")
        return source(name, _first_image(body))

    units = controlnet.read(body.alwayson_scripts or {}, card.offer, unit_source)
    result.fields |= units.fields
    result.pictures = result.pictures._replace(inputs=units.inputs)
    result.warnings += units.warnings
    return result


def _add_prompts(result: Translation, body: Generation, card: ImageCard) -> None:
    prompt, negative = body.prompt or "", body.negative_prompt or ""
    if result.options.enable_prompt_comments is not False:
        prompt, negative = (_COMMENT.sub("\n", text).strip() if "#" in text else text for text in (prompt, negative))
    prompt, named = _without_networks(prompt, result.warnings, card)
    prompt = _joined(prompt, result.warnings)
    negative, ignored = _without_networks(negative, [], card)
    if ignored:
        result.warnings.append("negative_prompt: its LoRAs are not read")
    given = bool(negative.strip())  # to the web UI an empty one is none
    weighting = card.prompt_fields is None or "prompt_weighting" in card.prompt_fields
    if not weighting:
        prompt, negative = (_unmarked(text, result.warnings) for text in (prompt, negative))
    result.fields["prompt"] = prompt
    if named:
        result.fields["lora"] = ",".join(f"{name}:{scale}" for name, scale in named.items())
    if given:
        result.fields["negative_prompt"] = negative
    if weighting:
        result.fields["prompt_weighting"] = A1111


def _unmarked(text: str, warnings: list[str]) -> str:
    """The text without the web UI's escapes and weights, for a model that reads no weights; unchanged if it is not in
    that syntax.
    """
    try:
        read = a1111.read(text)
    except MarkupError:
        return text
    if isinstance(read, str):
        return read
    warnings.append("prompt: weights are not read by this model")
    return read.text


def _joined(text: str, warnings: list[str]) -> str:
    """The text in place of prompts that the web UI joins by AND, each drawn by itself with its weight; those whose
    weight is below 0 are left out.
    """
    parts = [(part, _WEIGHT.search(part)) for part in _AND.split(text)]
    if len(parts) == 1 and parts[0][1] is None:
        return text
    words = "AND and the weight of a whole prompt, such as :0.5, are not offered; one prompt of the texts is drawn"
    warnings.append(f"prompt: {words}")
    kept = (_WEIGHT.sub("", part).strip() for part, weight in parts if weight is None or not weight[1].startswith("-"))
    return ", ".join(filter(None, kept))


def _without_networks(text: str, warnings: list[str], card: ImageCard) -> tuple[str, dict[str, str]]:
    """The text without its LoRAs, and their scales by name. Raises `ApiError`."""
    named: dict[str, str] = {}

    def take(match: re.Match[str]) -> str:
        name, arguments = match[2].strip(), [part.strip() for part in match[3].split(":")[1:]]
        if (reason := loras.name_error(name)) is not None:
            raise invalid_field("lora", f"a name {reason}")
        name = card.lora_aliases.get(loras.normal(name), name)
        scale = _scale(name, arguments, warnings)
        if name in named:
            raise invalid_field("lora", f"{name}: is named twice")
        named[name] = scale
        return ""

    bare = _NETWORK.sub(take, text)
    return (bare.strip() if named else text), named


def _scale(name: str, arguments: list[str], warnings: list[str]) -> str:
    """The weight of a LoRA by the arguments of its tag, as the web UI reads them: the text encoder's, which is the
    UNet's too unless that has its own. The UNet's is the one that counts here.
    """
    positional = [part for part in arguments if "=" not in part]
    pairs = (part.partition("=") for part in arguments if "=" in part)
    named = {key.strip().lower(): value.strip() for key, _, value in pairs}
    text = named.pop("te", "") or next(iter(positional), "") or "1"
    unet = named.pop("unet", "") or "".join(positional[1:2]) or text
    if unet != text:
        warnings.append(f"prompt: {name} has one weight here, of text encoder and UNet: the UNet's")
    if len(positional) > 2:
        named["dyn"] = positional[2]
    if named:
        keys = ", ".join(filter(plain, named)) or "an argument"
        warnings.append(f"prompt: {name}: {keys} is not offered; all of the LoRA has its weight")
    return unet


def _add_numbers(result: Translation, body: Generation, offer: ImageOffer) -> None:
    fields = result.fields
    fields["n"] = (body.batch_size or 1) * (body.n_iter or 1)
    if fields["n"] > offer.max_images:
        words = f"batch_size times n_iter is {fields['n']}, and at most {offer.max_images} pictures are one request"
        raise invalid_field("n", words)
    fields["seed"] = body.seed if body.seed not in (None, -1) else secrets.randbelow(min(_SEEDS, offer.max_seed + 1))
    fields |= {
        name: value for name, value in {"steps": body.steps, "guidance_scale": body.cfg_scale}.items()
        if value is not None
    }  # fmt: skip
    if body.width is not None or body.height is not None:
        size = body.width or body.height or 0, body.height or body.width or 0
        drawn = offer.closest(size)
        fields["size"] = f"{drawn[0]}x{drawn[1]}"
        if drawn != size:
            result.warnings.append(f"width, height: {size[0]}x{size[1]} is not offered; {fields['size']} is drawn")


def _add_options(result: Translation, card: ImageCard) -> None:
    options, fields = result.options, result.fields
    vae = (options.sd_vae or "").lower()
    if TINY in card.vaes and vae in (TINY, "taesd"):
        fields["vae"] = TINY
    elif vae not in (*_NONE, *card.vaes):
        result.warnings.append("override_settings.sd_vae: is not offered; the model's own VAE is used")
    layers = options.CLIP_stop_at_last_layers or 1
    if layers > 1:
        read = card.prompt_fields
        # The web UI reads the two text encoders of SDXL from a fixed layer.
        if read is None or ("clip_skip" in read and "prompt_2" not in read):
            fields["clip_skip"] = layers - 1
        else:
            result.warnings.append("override_settings.CLIP_stop_at_last_layers: is not read by this model")
    if options.samples_format:
        name = _FORMATS.get(options.samples_format.lower())
        if name is None:
            result.warnings.append("override_settings.samples_format: is not offered; pictures are PNG")
        fields["output_format"] = name or "png"
    every = options.show_progress_every_n_steps
    fields["preview_every"] = PREVIEW_EVERY if every is None else max(0, every)


def _add_sampling(result: Translation, body: Generation, card: ImageCard) -> None:
    """Add the sampler and the noise schedule. Raises `ApiError`."""
    fields, warnings = names.sampling(card, body.sampler_name or body.sampler_index, body.scheduler)
    result.fields |= fields
    result.warnings += warnings
    if (fields.get("scheduler") or card.default_scheduler) == "tcd" and body.eta is not None:
        result.fields["eta"] = body.eta
    elif body.eta not in (None, 0, 1):
        result.warnings.append("eta: is not read")


def _add_upscale(result: Translation, body: Txt2Img, offer: ImageOffer) -> None:
    """The hires fix as far as it is offered: the finished picture is enlarged, and not drawn again."""
    networks, filters = tuple(offer.upscalers or ()), tuple(offer.upscale_filters or ())
    name = body.hr_upscaler or ""
    if name not in networks and _FILTER.fullmatch(name) and LANCZOS in filters:
        if name.lower() != LANCZOS:
            result.warnings.append(f"hr_upscaler: is not offered; the picture is enlarged by {LANCZOS.capitalize()}")
        name = LANCZOS
    elif name not in networks:
        offered = ", ".join((*networks, *map(str.capitalize, filters))) or offer.refusal("upscalers") or "none"
        raise invalid_field("upscale.model", f"the hires fix needs an upscaler that the model has; it has {offered}")
    scale = body.hr_scale if body.hr_scale is not None else 2.0
    if body.hr_resize_x or body.hr_resize_y:
        if body.width is None or body.height is None:
            raise invalid_field("hr_resize_x", "needs width and height")
        factors = {
            round(target / side, 3)
            for target, side in ((body.hr_resize_x, body.width), (body.hr_resize_y, body.height))
            if target
        }
        if len(factors) > 1:
            raise invalid_field("hr_resize_x", "must have the shape of width and height: nothing is cropped")
        (scale,) = factors
    result.fields["upscale"] = {"model": name, "scale": scale}
    if body.denoising_strength != 0:
        result.warnings.append("enable_hr: the picture is enlarged once it is drawn; there are no second steps")


def _first_image(body: Img2Img) -> Any:
    if not body.init_images:
        raise invalid_field("init_images", "must be given", "missing_required_parameter")
    if len(body.init_images) > 1:
        raise invalid_field("init_images", "must contain one picture: one can be drawn from at a time")
    return body.init_images[0]


def _add_source(result: Translation, body: Img2Img, source: Source) -> None:
    image = replace(source("init_images", _first_image(body)), alpha=False)  # no mask of its own: on white
    result.pictures = GivenPictures(image)
    strength = STRENGTH if body.denoising_strength is None else body.denoising_strength
    with invalid_as_api_error():
        check_number("strength", strength, 0, 1)
    steps = max(1, body.steps or result.card.defaults.steps)
    if int(steps * strength) < 1:  # the web UI runs at least one step
        strength = min(1.0, math.nextafter(1 / steps, 2))
    result.fields["strength"] = float(strength)
    if body.resize_mode:
        result.warnings.append("resize_mode: is not offered; the picture is resized to width and height")
    if body.mask is None:
        return
    convention: MaskConvention = "a1111-inverted" if body.inpainting_mask_invert else "a1111"
    sides = (body.mask_blur_x, body.mask_blur_y) if body.mask_blur is None else (body.mask_blur, body.mask_blur)
    x, y = (MASK_BLUR if side is None else side for side in sides)
    mask = source("mask", body.mask)
    result.pictures = GivenPictures(image, mask, mask_convention=convention, mask_blur=(x, y))
    if body.inpainting_fill not in (None, 1) and strength < 1:
        result.warnings.append("inpainting_fill: is not offered; the masked part begins with the picture, as by 1")
    if body.inpaint_full_res:
        result.warnings.append("inpaint_full_res: is not offered; the whole picture is drawn at its size")
