"""What a pipeline that runs by diffusers' own loop takes beside what all models take: request fields, and options.

A native family takes all fields of a request and no options.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictStr, WithJsonSchema

from contract.bounds import check_number, check_text
from contract.errors import Invalid

FIELD = "pipeline_options"
MAX_OPTIONS = 32
_MAX_NAME = 64  # characters
_MAX_TEXT = 10_000  # characters

TEXT, IMAGE, MASK = "text", "image", "mask"
"""The kinds of request: a prompt alone, one with a source image, and one with a mask too."""

FIELDS = (
    "steps", "guidance_scale", "negative_prompt", "strength", "soft_mask", "deepcache", "guidance_interval",
    "guided_steps", "schedule_type", "timesteps", "sigmas", "eta", "plan",
)  # fmt: skip
"""Fields that a model may not read and that no other part of its offer names."""


def _scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a number, a text or a flag")
    return value


_VALUE = {"type": ["boolean", "integer", "number", "string"]}
Options = Annotated[
    dict[
        Annotated[StrictStr, Field(max_length=_MAX_NAME)],
        Annotated[Any, AfterValidator(_scalar), WithJsonSchema(_VALUE)],
    ],
    Field(max_length=MAX_OPTIONS),
]
"""Options in a body, by the names of the pipeline's arguments."""

_KINDS: dict[str, tuple[type, ...]] = {"boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,)}


def check_fields(request: Mapping[str, Any], fields: Collection[str] | None) -> None:
    """Raise `Invalid` for one of `FIELDS` in the request that is not among these; None: all are read."""
    if fields is None:
        return
    for name in FIELDS:
        if name in request and name not in fields and request[name] not in (None, False, "off", ()):
            raise Invalid(name, "is not supported by this model, which runs by diffusers' own loop")


def check_options(options: Mapping[str, Any] | None, offered: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Raise `Invalid` for an option that is not offered, or outside its `type`, `minimum` and `maximum`, in JSON
    Schema's words; None: only the form is checked.
    """
    if options is None:
        return
    if not isinstance(options, Mapping) or len(options) > MAX_OPTIONS:
        raise Invalid(FIELD, f"must be an object of at most {MAX_OPTIONS} options")
    if offered is None:
        return
    for name, value in options.items():
        if name not in offered:
            names = f"it has {', '.join(sorted(offered))}" if offered else "it has none"
            raise Invalid(FIELD, f"names an option that is not offered by this model: {names}")
        field, kind = f"{FIELD}.{name}", str(offered[name]["type"])
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
            raise Invalid(field, f"must be of type {kind}")
        if isinstance(value, str):
            check_text(field, value, _MAX_TEXT)
        elif kind != "boolean":
            check_number(field, value, offered[name].get("minimum", -math.inf), offered[name].get("maximum", math.inf))
