"""Parses LoRA selections: `name:scale,name`, in a setting and in a request alike."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LORAS = 8  # per request
MAX_SCALE = 100.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")  # cannot be a path to another folder
_SCALE = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?")
MAX_CHARACTERS = 4096


class LoraReference(NamedTuple):
    """A LoRA's name and scale."""

    name: str
    scale: float


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def read(text: str) -> tuple[LoraReference, ...]:
    """Parse `name:scale,name`; a missing scale is 1. Spaces around names are ignored; empty: none.

    Raises ValueError. Its message quotes only well-formed names.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must be at most {MAX_CHARACTERS} characters")
    references: list[LoraReference] = []
    for part in filter(None, (part.strip(" ") for part in text.split(","))):
        name, colon, scale = part.partition(":")
        if not is_name(name):
            raise ValueError("a name is letters, digits, _, . and -, and begins with a letter or a digit")
        if colon and _SCALE.fullmatch(scale) is None:
            raise ValueError(f"{name}: its scale must be a number")
        factor = float(scale) if colon else 1.0
        if abs(factor) > MAX_SCALE:
            raise ValueError(f"{name}: its scale must be between -{MAX_SCALE:g} and {MAX_SCALE:g}")
        if name in (lora.name for lora in references):
            raise ValueError(f"{name}: is named twice")
        references.append(LoraReference(name, factor))
    if len(references) > MAX_LORAS:
        raise ValueError(f"at most {MAX_LORAS} can be named")
    return tuple(references)
