"""The grammar of captions of single emoji: composes and parses them.

Grammar: `SUBJECT [on a|an COLOUR background]`, where SUBJECT is a CLDR name, with or without its skin tone, alone or
with keywords.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evaluation.scenes.emoji import COLOURS as COLOURS

COLOUR_NAMES = tuple(COLOURS)
TONES = ("light", "medium-light", "medium", "medium-dark", "dark")
TONE_SUFFIX = " skin tone"
_SPELLINGS = {
    "grey": "gray",
    "light grey": "gray",
    "light gray": "gray",
    "sky blue": "light blue",
    "dark blue": "navy",
}
_BACKGROUND = re.compile(r"^(?P<subject>.+?)\s+on\s+(?:(?:a|an|the)\s+)?(?P<colour>[a-z ]+?)\s+background$")


@dataclass(frozen=True)
class ParsedCaption:
    """A caption taken apart: the subject's words and the background's colour (a key of `COLOURS`)."""

    subject: str
    colour: str


def with_background(subject: str, colour: str) -> str:
    """`subject` on a plain background: "red heart on an orange background"."""
    if colour not in COLOURS:
        raise ValueError(f"colour {colour!r} is not one of {', '.join(COLOURS)}")
    article = "an" if colour[0] in "aeiou" else "a"
    return f"{subject} on {article} {colour} background"


def read_caption(text: str) -> ParsedCaption:
    """Takes a caption apart; raises `ValueError` when it names a background colour that is not in the language."""
    plain = " ".join(text.lower().strip().rstrip(".").split())
    if not plain:
        raise ValueError("caption is empty")
    match = _BACKGROUND.match(plain)
    if match is None:
        if "background" in plain.split():
            raise ValueError(f"caption {text!r}: background without a colour")
        return ParsedCaption(plain, "white")
    colour = match["colour"].strip()
    colour = _SPELLINGS.get(colour, colour)
    if colour not in COLOURS:
        raise ValueError(f"caption {text!r}: colour {colour!r} is not in the language")
    return ParsedCaption(match["subject"], colour)


def split_tone(name: str) -> tuple[str, str | None]:
    """A CLDR name without its skin tone, and the tone when there is exactly one.

    "man: dark skin tone, bald" gives ("man: bald", "dark"); a name with two tones gives None for the tone.
    """
    head, colon, tail = name.partition(": ")
    if not colon:
        return name, None
    parts = tail.split(", ")
    tones = [part[: -len(TONE_SUFFIX)] for part in parts if part.endswith(TONE_SUFFIX)]
    rest = [part for part in parts if not part.endswith(TONE_SUFFIX)]
    base = f"{head}: {', '.join(rest)}" if rest else head
    return base, tones[0] if len(tones) == 1 else None
