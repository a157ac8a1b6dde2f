"""Reads image requests in the field names of other servers, as their clients send them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from contract.strict import field_error

OTHER_NAMES = {
    "num_inference_steps": "steps", "cfg_scale": "guidance_scale", "sampler_name": "scheduler", "num_images": "n",
    "num_images_per_prompt": "n",
}  # fmt: skip
"""Fields by their names in diffusers, AUTOMATIC1111's web UI and others."""
SIDES = ("width", "height")  # in place of size
RANDOM = -1  # a seed, as the web UIs have it


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields under our own names, without the seed -1. Raises a validation error that names the field, for
    one that is given under two names with different values, and for a width or height that is wrong or alone.
    """
    values = {name: value for name, value in fields.items() if name not in OTHER_NAMES and name not in SIDES}
    sides = {name: fields[name] for name in SIDES if fields.get(name) is not None}
    others = [(name, OTHER_NAMES[name], fields[name]) for name in fields if name in OTHER_NAMES]
    if sides:
        for name in SIDES:
            if name not in sides:
                raise field_error(name, "must be given too", "missing_required_parameter")
            if type(sides[name]) is not int or not 0 < sides[name] < 100_000:
                raise field_error(name, "must be a whole number of pixels", "invalid_type")
        others.append(("width", "size", f"{sides['width']}x{sides['height']}"))
    for other, name, value in others:
        if value is None:
            continue
        current = values.get(name)
        if current is None or (name == "size" and current == "auto"):
            values[name] = value
        elif current != value or isinstance(current, bool) != isinstance(value, bool):
            raise field_error(other, f"is another name of {name}; give one of them")
    if type(values.get("seed")) is int and values["seed"] == RANDOM:
        del values["seed"]
    return values


def size_field(fields: Collection[str]) -> str:
    """Return the field that an error of the size names: of the sides the first that is given, else the size."""
    return next((name for name in SIDES if name in fields), "size")


def document(schema: dict[str, Any]) -> None:
    """Add the other names to the JSON schema of a request."""
    properties = schema["properties"]
    for other, name in OTHER_NAMES.items():
        properties[other] = {**properties[name], "title": other, "description": f"another name of {name}"}
    for name in SIDES:
        number = {"type": "integer", "minimum": 1, "maximum": 99_999}
        properties[name] = {
            "anyOf": [number, {"type": "null"}], "default": None, "title": name, "description": "in place of size"
        }  # fmt: skip
