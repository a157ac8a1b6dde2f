"""Translates the units of AUTOMATIC1111's ControlNet extension to controls and image prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import Field

from api.dialects.sdapi import requests
from api.dialects.sdapi.requests import Flag, Name, Number, SdapiBody
from api.errors import ApiError, invalid_field
from api.http.body import plain
from api.pictures import references
from api.pictures.uploads import PictureSource
from contract.card import ImageOffer
from contract.control import CANNY, DEPTH, MAX_CONTROLS, Control
from contract.image_prompt import MAX_IMAGE_PROMPTS, ImagePrompt

MODULES = ("none", CANNY, DEPTH)
_SCRIPT = "controlnet"
_FIELD = "alwayson_scripts"
_UNIT = f"{_FIELD}.controlnet"
_MOST_UNITS = MAX_CONTROLS + MAX_IMAGE_PROMPTS
_MOST_SCRIPTS = 32
_HASH = re.compile(r" \[[0-9a-f]{1,64}\]$")
_NONE = ("", "none")
# A ControlNet-Union's kinds, in the order of its training, by the extension's names.
_UNION = {
    "openpose": 0, "depth": 1, "hed": 2, "softedge": 2, "scribble": 2, "canny": 3, "lineart": 3, "mlsd": 3,
    "normalmap": 4, "segmentation": 5, "tile": 6, "inpaint": 7,
}  # fmt: skip
# How a picture comes to the size: by the number, and by the names of both versions of the extension.
_FITS = {
    "0": "stretch", "just resize": "stretch",
    "1": "crop", "crop and resize": "crop", "scale to fit (inner fit)": "crop",
    "2": "contain", "resize and fill": "contain", "envelope (outer fit)": "contain",
}  # fmt: skip
_WHOLE_RESOLUTION = (None, -1, 0)  # of a preprocessor
_NO_UNION = ("", "unknown", "all")
Source = Callable[[str, Any], PictureSource]
"""The picture that the value of a field stands for; of a unit without one, "", an edit's source. Raises `ApiError`."""
_FORM_FILES = {kind.FIELD: file for file, kind in references.FORM_FILES.items()}


class Unit(SdapiBody):
    """A unit, as far as it is read."""

    enabled: Flag = None
    image: str | dict[str, Any] | list[Any] | None = None
    input_image: str | dict[str, Any] | None = Field(default=None, description="the older name of image")
    mask: str | dict[str, Any] | None = None
    module: Name = None
    model: Name = None
    weight: Number = None
    guidance_start: Number = None
    guidance_end: Number = None
    union_control_type: Name = None
    control_mode: str | int | None = None
    resize_mode: str | int | None = None
    processor_res: Number = None
    threshold_a: Number = None
    threshold_b: Number = None


class Pictured(NamedTuple):
    """An entry of `control` or `image_prompts`, and its picture."""

    kind: type[Control] | type[ImagePrompt]
    entry: dict[str, Any]
    picture: PictureSource


@dataclass
class Units:
    """Fields of a request, with the pictures of their entries in order, by the names of a form's files."""

    fields: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    inputs: dict[str, Sequence[PictureSource]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read(scripts: Mapping[str, Any], offer: ImageOffer, source: Source) -> Units:
    """The units of `alwayson_scripts`.

    Other scripts that would do something have a warning. Raises `ApiError` (400).
    """
    if len(scripts) > _MOST_SCRIPTS:
        raise invalid_field(_FIELD, f"must be at most {_MOST_SCRIPTS} scripts")
    units = Units()
    pictured: list[Pictured] = []
    for name, script in scripts.items():
        arguments = script.get("args") if isinstance(script, Mapping) else None
        if not isinstance(arguments, list | None):
            raise invalid_field(_FIELD, "a script must be an object with a list in args")
        if name.lower() == _SCRIPT:
            pictured += _units(arguments or [], offer, source, units.warnings)
        elif arguments and arguments[0] is not False:
            units.warnings.append(f"{_FIELD}: the script {plain(name) or 'of another name'} is not offered")
    for kind in (Control, ImagePrompt):
        items = [item for item in pictured if item.kind is kind]
        if items:
            units.fields[kind.FIELD] = [item.entry for item in items]
            units.inputs[_FORM_FILES[kind.FIELD]] = [item.picture for item in items]
    return units


def _units(arguments: Sequence[Any], offer: ImageOffer, source: Source, warnings: list[str]) -> list[Pictured]:
    units = [argument for argument in arguments if isinstance(argument, dict)]
    if len(units) > _MOST_UNITS:
        raise invalid_field(_FIELD, f"must be at most {_MOST_UNITS} units")
    pictured = []
    for fields in units:
        try:
            unit = requests.parse(Unit, fields)
        except ApiError as error:
            raise invalid_field(f"control.{error.param}", error.detail or "", error.code or "") from None
        item = None if unit.enabled is False else _pictured(unit, offer, source, warnings)
        if item is not None:
            pictured.append(item)
            warnings += requests.unread_unit(Unit, fields, f"{_UNIT}.")
    return pictured


def _pictured(unit: Unit, offer: ImageOffer, source: Source, warnings: list[str]) -> Pictured | None:
    """The unit's entry; None for one that says nothing."""
    model, module = _HASH.sub("", unit.model or ""), (unit.module or "").lower()
    image = unit.image if unit.image not in (None, "") else unit.input_image
    if model.lower() in _NONE:
        if image in (None, "") and module in _NONE:
            return None
        raise invalid_field("control.model", "must be given; /controlnet/model_list lists those there are")
    kind = ImagePrompt if model in (offer.image_prompts or ()) or module.startswith("ip-adapter") else Control
    entry: dict[str, Any] = {"model": model}
    numbers = {"strength": unit.weight, "start": unit.guidance_start, "end": unit.guidance_end}
    entry |= {name: value for name, value in numbers.items() if value is not None}
    if kind is Control:
        entry |= _preprocessing(module, unit, warnings)
        if unit.resize_mode is not None:
            entry["fit"] = _fit(unit.resize_mode)
    if str(unit.control_mode or 0).lower() not in ("0", "balanced"):
        warnings.append(f"{_UNIT}: control_mode is not offered; the mode is Balanced")
    if unit.mask not in (None, "") or _has_mask(image):
        warnings.append(f"{_UNIT}: the mask of a unit is not read")
    return Pictured(kind, entry, _picture(f"{kind.FIELD}.image", image, source))


def _fit(mode: str | int) -> str:
    fit = _FITS.get(str(mode).strip().lower())
    if fit is None:
        raise invalid_field("control.resize_mode", "must be Just Resize, Crop and Resize or Resize and Fill")
    return fit


def _preprocessing(module: str, unit: Unit, warnings: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    thresholds = {"low_threshold": unit.threshold_a, "high_threshold": unit.threshold_b}
    numbers = {name: int(value) for name, value in thresholds.items() if value is not None and value >= 0}
    if module == CANNY:
        fields = {"preprocessor": CANNY, **numbers}
    elif module.startswith(DEPTH):
        fields = {"preprocessor": DEPTH}
        if numbers and module == "depth_leres":
            warnings.append(f"{_UNIT}: threshold_a and threshold_b are read with canny alone")
    elif module not in _NONE:
        raise invalid_field("control.module", f"is not offered; there are {', '.join(MODULES)}")
    if fields and unit.processor_res not in _WHOLE_RESOLUTION:
        warnings.append(f"{_UNIT}: processor_res is not offered; preprocessors read the picture at its drawn size")
    union = (unit.union_control_type or "").lower()
    mode = _UNION.get(union.split(" ")[0].split("/")[0])
    if mode is None and union not in _NO_UNION:
        warnings.append(f"{_UNIT}: union_control_type is of no kind that is offered")
    return fields if mode is None else {**fields, "mode": mode}


def _has_mask(image: Any) -> bool:
    """Return whether a unit's picture comes with a mask, in an object or as the second of two."""
    if isinstance(image, list):
        return len(image) > 1 or any(map(_has_mask, image))
    return isinstance(image, dict) and image.get("mask") not in (None, "")


def _picture(name: str, image: Any, source: Source) -> PictureSource:
    """The picture of a unit: text, an object with it and a mask, or a list of one such; else the edit's source."""
    if isinstance(image, list):
        image = image[0] if image else None
    if isinstance(image, dict) and "image" in image:
        image = image["image"]
    if not isinstance(image, str | dict | None):
        raise invalid_field(name, "must be text")
    return source(name, "" if image is None else image)
