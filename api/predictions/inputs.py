"""Maps the input of a prediction to the fields of a job: names of Replicate's SDXL and FLUX models, and our own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from api import schemas
from api.body import plain
from api.errors import ApiError, invalid_field
from contract import plan
from contract.card import ImageCard
from contract.image_request import EditRequest, ImageRequest
from contract.picture_input import ImageReference

FILE_URL = re.compile(r"v1/files/(file-[0-9a-f]{24})")
"""The address of an uploaded file, after the base of links."""

_NAMES = {  # their names → ours
    "num_outputs": "n", "num_inference_steps": "steps", "guidance": "guidance_scale", "prompt_strength": "strength",
    "output_quality": "output_compression", "prompt_upsampling": "expand_prompt",
}  # fmt: skip
_GIVEN_BACK = {ours: theirs for theirs, ours in _NAMES.items() if theirs.startswith(("num_", "output_"))}
_OTHERWISE = {  # fields that a prediction expresses in another way
    "model", "n", "response_format", "stream", "partial_images", "user", "quality", "style", "background", "moderation",
    "input_fidelity",
}  # fmt: skip
SHARED = tuple(name for name in EditRequest.model_fields if name not in _OTHERWISE)
_IGNORED = (
    "disable_safety_checker", "enable_safety_checker", "safety_tolerance", "apply_watermark", "go_fast",
    "high_noise_frac", "refine_steps",
)  # fmt: skip
_PICTURES = {"image": "images", "input_image": "images", "mask": "mask"}
_UNTYPED = re.compile(r"\Adata:(?:application/octet-stream)?;base64,", re.IGNORECASE)
_RATIO = re.compile(r"([1-9][0-9]{0,2}):([1-9][0-9]{0,2})")
_AREAS = {None: 1.0, "1": 1.0, "0.25": 0.25}  # `megapixels`, as a share of the model's native area
_BY_SOURCE = ("custom", "match_input_image")  # aspect ratios: given as width and height, or the source's


class LuminanceMask(ImageReference):
    """A mask as diffusers has it: what is white in it is drawn anew."""

    LUMINANCE = True


class EditOfPrediction(schemas.EditJobFields):
    """An edit, whose mask is white where it is drawn anew."""

    mask: LuminanceMask | None = None


def read_request(fields: dict[str, Any]) -> ImageRequest:
    """Read the fields that `job_fields` returned. Raises `ApiError` (400)."""
    if fields["type"] == "edit":
        return schemas.read(EditOfPrediction, fields)
    return schemas.read(schemas.JobFields, fields)


def job_fields(values: Mapping[str, Any], base: str, card: ImageCard | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of a job (`read_request`) for this input, and by our names those that the client gave.

    `base` is that of links: an address of a file here is read as the file. `card` is the model's, whose sizes an
    `aspect_ratio` selects from; without it no size is selected. Raises `ApiError` (400).
    """
    left = {name: value for name, value in values.items() if value is not None}
    for name in _IGNORED:
        left.pop(name, None)
    if left.pop("refine", "no_refiner") != "no_refiner":
        raise invalid_field("input.refine", "must be no_refiner; the field refiner names one of the model's refiners")
    pictures = [name for name in _PICTURES if name in left]
    fields: dict[str, Any] = {"type": "edit" if pictures else "image"}
    names = {name: name for name in SHARED} | {"images": "image", "mask": "mask"}
    if not pictures:
        left.pop("prompt_strength", None)  # as Replicate's models ignore it
    fields |= _size(left, card, names) | _lora(left, names)
    for name in (*_PICTURES, *_NAMES, *SHARED):
        if name not in left:
            continue
        ours = _PICTURES.get(name) or _NAMES.get(name, name)
        if ours in fields:
            raise invalid_field(f"input.{name}", f"must not be given beside {names[ours]}", "repeated_field")
        value = left.pop(name)
        fields[ours] = _picture(name, value, base) if name in _PICTURES else value
        names[ours] = name
    for name in left:
        word = plain(name)
        raise invalid_field(word and f"input.{word}", "is not known", "unknown_parameter")
    if fields.get("output_format") == "jpg":
        fields["output_format"] = "jpeg"
    return fields, names


@contextmanager
def errors_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that names fields of the input, in `ApiError`s about fields of a job, as the client gave them."""
    outside = {"model": "version", "webhook_url": "webhook"}
    try:
        yield
    except ApiError as error:
        first, _, rest = (error.param or "").partition(".")
        if first in outside:
            param = outside[first]
        elif first in names:
            param = ".".join(filter(None, ("input", names[first], "" if names[first] in _PICTURES else rest)))
        else:
            raise
        words = str(error).removeprefix(f"{error.param}: ") if error.detail is None else error.detail
        code, headers, message = error.code, error.headers, f"{param}: {words}"
        raise ApiError(error.status, message, param=param, code=code, headers=headers, detail=words) from None


def given_back(record: Mapping[str, Any]) -> dict[str, Any]:
    """The input of a prediction from the parameters in its job's record: with all defaults, and without pictures."""
    fields = {name: value for name, value in record.items() if name in {*SHARED, *_GIVEN_BACK} and value is not None}
    fields |= {name: record[name] for name in ("width", "height")}
    fields.pop("control", None)
    fields.pop("image_prompts", None)
    edit = record.get("edit")
    named = {_GIVEN_BACK.get(name, name): value for name, value in fields.items()}
    if plan.FIELD in named:  # what a plan says is among the fields, and no other plan may add to it
        named["plan"] = plan.OFF
    return named | ({"prompt_strength": edit["strength"]} if edit else {})


def _picture(name: str, value: Any, base: str) -> Any:
    """The field's value for a picture that is given by its URL: its reference, in a list but for a mask."""
    if not isinstance(value, str):
        raise invalid_field(f"input.{name}", "must be the URL of a picture", "invalid_type")
    if value.startswith(base) and (match := FILE_URL.fullmatch(value.removeprefix(base))):
        reference = {"file_id": match[1]}
    else:  # clients that know no file name send no type; what the picture is, its bytes say
        reference = {"image_url": _UNTYPED.sub("data:image/png;base64,", value, count=1)}
    return reference if name == "mask" else [reference]


def _size(left: dict[str, Any], card: ImageCard | None, names: dict[str, str]) -> dict[str, str]:
    """Remove what says the size from the input; the field `size`, if there is any."""
    sides = {name: left.pop(name) for name in ("width", "height") if name in left}
    ratio, area = left.pop("aspect_ratio", None), left.pop("megapixels", None)
    for name, value in sides.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 100_000:
            raise invalid_field(f"input.{name}", "must be a whole number of pixels", "invalid_type")
    if len(sides) == 1:
        missing = "height" if "width" in sides else "width"
        raise invalid_field(f"input.{missing}", "must be given too", "missing_required_parameter")
    match = _RATIO.fullmatch(ratio) if isinstance(ratio, str) else None
    if ratio is not None and match is None and ratio not in _BY_SOURCE:
        raise invalid_field("input.aspect_ratio", f"must look like 16:9, or be {' or '.join(_BY_SOURCE)}")
    if not (area is None or isinstance(area, str)) or area not in _AREAS:
        raise invalid_field("input.megapixels", "must be '1' or '0.25'")
    if match is not None:
        names["size"] = "aspect_ratio"
        if card is None:
            return {}
        side, shape = card.native * math.sqrt(_AREAS[area]), math.sqrt(int(match[1]) / int(match[2]))
        width, height = card.offer.nearest((round(side * shape) or 1, round(side / shape) or 1))
        return {"size": f"{width}x{height}"}
    if sides:
        names["size"] = "width"
        return {"size": f"{sides['width']}x{sides['height']}"}
    return {}


def _lora(left: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Remove `lora_weights` and `lora_scale` from the input; the field `lora`, if there is any."""
    weights, scale = left.pop("lora_weights", None), left.pop("lora_scale", None)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise invalid_field("input.lora_scale", "must be a number", "invalid_type")
    if not isinstance(weights, str | None):
        raise invalid_field("input.lora_weights", "must be text", "invalid_type")
    if not weights:
        return {}
    names["lora"] = "lora_weights"
    return {"lora": weights if scale is None else f"{weights}:{scale}"}


_TYPES: dict[str, dict[str, Any]] = {
    "width": {"type": "integer"},
    "height": {"type": "integer"},
    "num_outputs": {"type": "integer", "minimum": 1},
    "num_inference_steps": {"type": "integer", "minimum": 1},
    "aspect_ratio": {"type": "string", "description": "such as 16:9; in place of width and height"},
    "megapixels": {"type": "string", "enum": ["1", "0.25"], "description": "with aspect_ratio"},
    "image": {"type": "string", "format": "uri", "description": "the picture to begin with"},
    "mask": {"type": "string", "format": "uri", "description": "what is white in it is drawn anew"},
    "prompt_strength": {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "description": "how much of the image is redrawn",
    },
    "output_format": {"type": "string", "enum": ["png", "jpg", "jpeg", "webp"], "default": "png"},
    "output_quality": {"type": "integer", "minimum": 0, "maximum": 100},
    "lora_weights": {"type": "string", "description": "one of the model's loras"},
    "lora_scale": {"type": "number"},
    "disable_safety_checker": {"type": "boolean", "description": "accepted and ignored"},
}
_MODELLED = ("prompt", "negative_prompt", "guidance_scale", "scheduler", "seed")


@cache
def _shared_schemas() -> dict[str, dict[str, Any]]:
    """The schemas of the fields that are those of an `ImageRequest`, without null."""
    declared = ImageRequest.model_json_schema()["properties"]
    schemas = {}
    for name in _MODELLED:
        schema = next((kind for kind in declared[name].get("anyOf", ()) if kind.get("type") != "null"), declared[name])
        schemas[name] = {**schema, "description": declared[name]["description"]}
    return schemas


def components(card: ImageCard | None = None) -> dict[str, Any]:
    """The components `Input` and `Output` of the OpenAPI document that Cog publishes of a model."""
    properties = {name: dict(schema) for name, schema in (_shared_schemas() | _TYPES).items()}
    if card is not None:
        properties["scheduler"]["enum"] = [*card.schedulers]
        properties["scheduler"]["default"] = card.default_scheduler
        properties["num_inference_steps"] |= {"maximum": card.limits.max_steps, "default": card.defaults.steps}
        properties["guidance_scale"]["default"] = card.defaults.guidance_scale
        properties["width"]["default"] = properties["height"]["default"] = card.native
    for position, (name, schema) in enumerate(properties.items()):
        schema |= {"title": name.replace("_", " ").capitalize(), "x-order": position}
    return {
        "Input": {"title": "Input", "type": "object", "required": ["prompt"], "properties": properties},
        "Output": {"title": "Output", "type": "array", "items": {"type": "string", "format": "uri"}},
    }
