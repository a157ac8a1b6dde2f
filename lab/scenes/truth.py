"""The content that a prompt asks of its picture: things, their counts, colours and sizes, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

RELATIONS = ("left of", "right of", "above", "below", "behind", "in front of", "beside", "row", "and")
"""Where the first thing stands to the second. A row goes from left to right; "and" leaves places open."""


@dataclass(frozen=True)
class SceneItem:
    """`count` pictures of one subject, by its noun; `colour` is one of `hues.WORDS`, `size` is tiny, small or big."""

    subject: str
    count: int = 1
    colour: str | None = None
    size: str | None = None


@dataclass(frozen=True)
class Truth:
    """A scene as a checker must find it. `relation` is None for one thing; `background` names none, one or two colours.

    `sticker` is a white outline around every thing.
    """

    items: tuple[SceneItem, ...]
    relation: str | None = None
    background: tuple[str, ...] = ()
    sticker: bool = False
