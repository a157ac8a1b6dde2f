"""Defines which characters text input may contain, for every interface."""

from __future__ import annotations

import re
from collections.abc import Sized

# Control characters except tab and line ends, and surrogates, which cannot be encoded as UTF-8.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def too_long(value: Sized, limit: int) -> str:
    """The message for a text, a list or an object that is longer than allowed."""
    return f"has {len(value)} {'characters' if isinstance(value, str) else 'entries'}, at most {limit} are allowed"


def text_error(text: str, max_characters: int) -> str | None:
    """The reason why the text is invalid, without echoing it; None if it is valid."""
    if len(text) > max_characters:
        return too_long(text, max_characters)
    match = _FORBIDDEN.search(text)
    if match is not None:
        code = f"U+{ord(match[0]):04X}"
        return f"character {match.start() + 1} is {code}, a control character or surrogate"
    return None
