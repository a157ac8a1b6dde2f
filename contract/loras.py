"""Parses LoRA selections: `name:scale,name`, in a setting and in a request alike."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

MAX_LORAS = 8  # per request
MAX_SCALE = 100.0
MAX_NAME_CHARACTERS = 128
MAX_NAME_BYTES = 255 - len(".safetensors")  # of a file system's 255
# Of paths, of selections (`name:scale,name`), of `<lora:name:scale>` and of quoted text in a picture's parameters.
_RESERVED = '/\\,:<>"|*?'
# Unicode's Default_Ignorable_Code_Point, as far as Python calls it printable: nobody sees them.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_BEGINNINGS = "([{_+"  # beside letters and digits: a dot hides a file, and a dash begins an option
_SCALE = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?")
MAX_CHARACTERS = 4096


class LoraReference(NamedTuple):
    """A LoRA's name and scale."""

    name: str
    scale: float


def name_error(text: str) -> str | None:
    """Return why this cannot be the name of a file that requests use, or None: it is safe in paths, selections, prompts
    and on a terminal.
    """
    if not 0 < len(text) <= MAX_NAME_CHARACTERS:
        return f"has {len(text)} characters, and a name 1 to {MAX_NAME_CHARACTERS}"
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_NAME_BYTES:
        return f"has {size} bytes in UTF-8, and a name at most {MAX_NAME_BYTES}"
    if _INVISIBLE.search(text):
        return "has a character that is not visible"
    if text != text.strip() or not text.isprintable():
        return "begins or ends with a blank, or has characters that are not printable"
    if not (text[0].isalnum() or text[0] in _BEGINNINGS):
        return f"begins with none of letters, digits and {' '.join(_BEGINNINGS)}"
    reserved = next((character for character in text if character in _RESERVED), None)
    return None if reserved is None else f"has {reserved!r}, which separates names or is no part of one"


def normal(name: str) -> str:
    """Return a name as it is listed and compared, in NFC: some systems write names of files in NFD."""
    return unicodedata.normalize("NFC", name)


def is_name(text: str) -> bool:
    return name_error(text) is None


def read(text: str) -> tuple[LoraReference, ...]:
    """Parse `name:scale,name`; a missing scale is 1. Spaces around names are ignored; empty: none. Names are `normal`.

    Raises ValueError. Its message quotes only well-formed names.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must be at most {MAX_CHARACTERS} characters")
    references: list[LoraReference] = []
    for part in filter(None, (part.strip(" ") for part in text.split(","))):
        name, colon, scale = normal(part).partition(":")
        if (reason := name_error(name)) is not None:
            raise ValueError(f"a name {reason}")
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
