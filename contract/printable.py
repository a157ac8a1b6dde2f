"""Makes text of others, such as names in files and answers of servers, fit for a terminal or a log.

Escaped, as in Python, is whatever is not printable: controls and escape sequences, ends of lines and paragraphs, marks
that reverse the direction of writing, and half surrogates. Spaces of all widths and the joiners that scripts and emoji
are written with stay.
"""

from __future__ import annotations

import unicodedata

_JOINERS = "\u00ad\u200c\u200d"  # soft hyphen, zero-width non-joiner and joiner


def printable(text: str, limit: int = 200) -> str:
    """The text on one line, cut after so many characters."""
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return cut if cut.isprintable() else "".join(map(_escaped, cut))


def printable_message(text: str, limit: int = 2_000) -> str:
    """A message, in which names of others may occur, on one line: ends of lines become spaces."""
    return printable(text if text.isprintable() else " ".join(text.split()), limit)


def printable_lines(text: str, limit: int = 20_000) -> str:
    """A text of several lines, which keep their ends and tabulators."""
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return cut if cut.isprintable() else "".join(c if c in "\n\t" else _escaped(c) for c in cut)


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs" or character in _JOINERS:
        return character
    return ascii(character)[1:-1]
