"""Maps the input of a prediction to the fields of a job: names of Replicate's SDXL and FLUX models, and our own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from api.dialects.foreign import FieldNames, Places
from api.errors import invalid_field
from contract import plan
from contract.bounds import MAX_EXACT
from contract.card import ImageCard
from contract.field_names import SIDES
from contract.image_request import ImageRequest
from contract.picture_input import ImageReference

FILE_URL = re.compile(r"v1/files/(file-[0-9a-f]{24})")
"""The address of an uploaded file, after the base of links."""

NAMES = FieldNames(
    "input.",
    {
        "image": "images", "input_image": "images", "num_outputs": "n", "num_inference_steps": "steps",
        "guidance": "guidance_scale", "prompt_strength": "strength", "output_quality": "output_compression",
        "prompt_upsampling": "expand_prompt",
    },
    passed=("mask", *SIDES),
    ignored=(
        "disable_safety_checker", "enable_safety_checker", "safety_tolerance", "apply_watermark", "go_fast",
        "high_noise_frac", "refine_steps",
    ),
)  # fmt: skip
_GIVEN_BACK = {ours: name for name, ours in NAMES.names.items() if name.startswith(("num_", "output_"))}
_UNTYPED = re.compile(r"\Adata:(?:application/octet-stream)?;base64,", re.IGNORECASE)
_RATIO = re.compile(r"([1-9][0-9]{0,2}):([1-9][0-9]{0,2})")
_AREAS = {None: 1.0, "1": 1.0, "0.25": 0.25}  # `megapixels`, as a share of the model's native area
_BY_SOURCE = ("custom", "match_input_image")  # aspect ratios: given as width and height, or the source's


def job_fields(values: Mapping[str, Any], base: str, card: ImageCard | None) -> tuple[dict[str, Any], Places]:
    """The fields of a job for this input, and where each stands in the request.

    `base` is that of links: an address of a file here is read as the file. `card` is the model's, whose sizes an
    `aspect_ratio` selects from; without it no size is selected. Raises `ApiError` (400).
    """
    left = {name: value for name, value in values.items() if value is not None}
    if left.pop("refine", "no_refiner") != "no_refiner":
        raise invalid_field("input.refine", "must be no_refiner; the field refiner names one of the model's refiners")
    edited = not left.keys().isdisjoint(("image", "input_image", "mask"))
    if not edited:
        left.pop("prompt_strength", None)  # as Replicate's models ignore it
    known: dict[str, str] = {}
    derived = _size(left, card, known) | _lora(left, known)
    fields, places, _ = NAMES.read(left, known)
    fields |= {"type": "edit" if edited else "image", **derived}
    for name in ("images", "mask"):
        if name in fields:
            fields[name] = _picture(name, places[name], fields[name], base)
            places |= {f"{name}.{part}": places[name] for part in ImageReference.model_fields}
    if fields.get("output_format") == "jpg":
        fields["output_format"] = "jpeg"
    return fields, places | {"model": "version", "webhook_url": "webhook"}


def given_back(record: Mapping[str, Any]) -> dict[str, Any]:
    """The input of a prediction from the parameters in its job's record: with all defaults, and without pictures."""
    fields = {
        name: value for name, value in record.items() if name in {*NAMES.shared, *_GIVEN_BACK} and value is not None
    }
    fields |= {name: record[name] for name in ("width", "height")}
    fields.pop("control", None)
    fields.pop("image_prompts", None)
    edit = record.get("edit")
    named = {_GIVEN_BACK.get(name, name): value for name, value in fields.items()}
    if plan.FIELD in named:  # what a plan says is among the fields, and no other plan may add to it
        named["plan"] = plan.OFF
    return named | ({"prompt_strength": edit["strength"]} if edit else {})


def _picture(name: str, place: str, value: Any, base: str) -> Any:
    """The field's value for a picture that is given by its URL: its reference, in a list but for a mask."""
    if not isinstance(value, str):
        raise invalid_field(place, "must be the URL of a picture", "invalid_type")
    if value.startswith(base) and (match := FILE_URL.fullmatch(value.removeprefix(base))):
        reference = {"file_id": match[1]}
    else:  # clients that know no file name send no type; what the picture is, its bytes say
        reference = {"image_url": _UNTYPED.sub("data:image/png;base64,", value, count=1)}
    return reference if name == "mask" else [reference]


def _size(left: dict[str, Any], card: ImageCard | None, known: dict[str, str]) -> dict[str, str]:
    """Remove the aspect ratio from the input, and the sides that it replaces; the field `size`, if it gives one."""
    ratio, area = left.pop("aspect_ratio", None), left.pop("megapixels", None)
    if ratio is None and area is not None and left.keys().isdisjoint((*SIDES, "size", "image", "input_image")):
        ratio = "1:1"  # as FLUX's models have it by default
    match = _RATIO.fullmatch(ratio) if isinstance(ratio, str) else None
    if ratio is not None and match is None and ratio not in _BY_SOURCE:
        raise invalid_field("input.aspect_ratio", f"must look like 16:9, or be {' or '.join(_BY_SOURCE)}")
    if not (area is None or isinstance(area, str)) or area not in _AREAS:
        raise invalid_field("input.megapixels", "must be '1' or '0.25'")
    if match is None:
        return {}
    for name in SIDES:
        left.pop(name, None)
    known["size"] = "aspect_ratio"
    if card is None:
        return {}
    side, shape = card.native * math.sqrt(_AREAS[area]), math.sqrt(int(match[1]) / int(match[2]))
    width, height = card.offer.nearest((round(side * shape) or 1, round(side / shape) or 1))
    return {"size": f"{width}x{height}"}


def _lora(left: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """Remove `lora_weights` and `lora_scale` from the input; the field `lora`, if there is any."""
    weights, scale = left.pop("lora_weights", None), left.pop("lora_scale", None)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise invalid_field("input.lora_scale", "must be a number", "invalid_type")
    if not isinstance(weights, str | None):
        raise invalid_field("input.lora_weights", "must be text", "invalid_type")
    if not weights:
        return {}
    known["lora"] = "lora_weights"
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
        properties["seed"]["maximum"] = min(card.limits.max_seed, MAX_EXACT)  # a number that clients can hold
        properties["guidance_scale"]["default"] = card.defaults.guidance_scale
        properties["width"]["default"] = properties["height"]["default"] = card.native
    for position, (name, schema) in enumerate(properties.items()):
        schema |= {"title": name.replace("_", " ").capitalize(), "x-order": position}
    return {
        "Input": {"title": "Input", "type": "object", "required": ["prompt"], "properties": properties},
        "Output": {"title": "Output", "type": "array", "items": {"type": "string", "format": "uri"}},
    }
