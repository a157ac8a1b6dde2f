"""The image model's caption grammar: composes random captions, and parses them.

Grammar: `SUBJECT [on a|an COLOUR background]`, where SUBJECT is a CLDR name, with or without its skin tone, alone or
with keywords.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lab.scenes.emoji import COLOURS as COLOURS
from lab.scenes.emoji import PictureRow

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
_FILLERS = ("a", "an", "the", "of", "with", "and", "in", "some")


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


def has_tone(name: str) -> bool:
    """Return whether the name carries any skin tone (the five bare tone swatches do not count)."""
    return split_tone(name)[0] != name


def held_out(rows: list[PictureRow], count: int, seed: int = 20) -> set[int]:
    """Choose `count` rows whose base comes in all five tones, at most one a base: they are never trained on.

    Held-out variants show whether tone and subject compose. Returns row numbers.
    """
    by_base: dict[str, dict[str, int]] = {}
    for index, row in enumerate(rows):
        base, tone = split_tone(row.name)
        if tone in TONES:
            by_base.setdefault(base, {})[tone] = index
    full = sorted(base for base, tones in by_base.items() if len(tones) == len(TONES))
    draw = random.Random(seed)
    selected = draw.sample(full, min(count, len(full) // 2))
    return {by_base[base][TONES[number % len(TONES)]] for number, base in enumerate(selected)}


def odds(rows: list[PictureRow], count: int) -> list[float]:
    """How often training draws each picture: never the `count` held-out ones, those with a tone half as often.

    A toned picture has four near-copies, an untoned one has none.
    """
    hidden = held_out(rows, count)
    return [0.0 if i in hidden else 0.5 if has_tone(row.name) else 1.0 for i, row in enumerate(rows)]


def wordings(rows: list[PictureRow], count: int, seed: int) -> Iterator[list[str]]:
    """The `count` ways to name each picture that training draws from."""
    draw = random.Random(seed)
    for row in rows:
        yield subjects(row, count, draw)


def subjects(row: PictureRow, count: int, draw: random.Random) -> list[str]:
    """`count` ways to name a picture; the first is its plain name, about half repeat it.

    The others add keywords before or after it, say the tone another way, or are loose words around the name.
    """
    base, tone = split_tone(row.name)
    words = [word for word in row.keywords if not word.endswith(TONE_SUFFIX)]
    spoken = f"{base} with {tone} skin tone" if tone else row.name
    names = [row.name]
    while len(names) < count:
        kind = draw.random()
        few = draw.sample(words, min(len(words), draw.randint(1, 3)))
        if kind < 0.5 or (not few and kind < 0.8):
            names.append(row.name)
        elif not few or kind < 0.6:
            names.append(draw.choice((spoken, f"an emoji of {spoken}", f"a {spoken}")))
        elif kind < 0.75:
            names.append(f"{row.name}, {', '.join(few)}")
        elif kind < 0.85:
            names.append(f"{few[0]} {row.name}")
        else:
            loose = [*few, spoken]
            draw.shuffle(loose)
            names.append(" ".join(part for word in loose for part in (draw.choice(_FILLERS), word)))
    return names
