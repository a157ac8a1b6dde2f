"""Parses prompt weights in the syntax of AUTOMATIC1111's web UI, and writes them: `(words)`, `(words:1.3)`, `[words]`,
`BREAK`.

Runs in time linear in the text's length: groups are at most `MAX_DEPTH` deep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from contract.markup import A1111, MAX_CHUNKS, MAX_DEPTH, MAX_WEIGHT, MarkupError, WeightedPrompt

_FACTORS = {"(": 1.1, ")": 1.1, "[": 1 / 1.1, "]": 1 / 1.1}  # of a group without a number
_Piece = tuple[str | None, float]  # a text and its weight; None: BREAK
_TOKEN = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|(?P<open>[(\[])"
    r"|:\s*(?P<weight>[+-]?(?:[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}))\s*\)"
    r"|(?P<close>[)\]])"
    r"|(?P<text>[^\\()\[\]:]+|[\\:])"
)
_BREAK = re.compile(r"\bBREAK\b")  # without the spaces around it, which would take quadratic time
_EDITED = re.compile(r"\||:\s*[0-9.]+\s*$")  # within square brackets: another prompt from some step on
_SPECIAL = re.compile(r"[\\()\[\]]")
_WORDS = re.compile(r"\bAND\b|<\w+:|^[^\S\n]*Negative prompt:", re.MULTILINE)  # to the web UI; see `unbroken`
_NETWORK = re.compile(r"<(?:lora|lyco|hypernet):")


def read(text: str) -> str | WeightedPrompt:
    """Parse a prompt; without weights other than 1 and without `BREAK` the result is plain text without marks.

    Weights of nested groups multiply; an unmatched `)` or `]` is ordinary text, and an unmatched `(` or `[` weights all
    that follows, as in the web UI. Raises `MarkupError` for its prompt editing `[from:to:when]` and `[a|b]`, for
    `<lora:…>`, for groups more than `MAX_DEPTH` deep, for a weight beyond ±`MAX_WEIGHT`, and for more `BREAK`s than
    `MAX_CHUNKS` have between them.
    """
    _check_networks(text)
    pieces: list[_Piece] = []
    groups: dict[str, list[tuple[int, int]]] = {"(": [], "[": []}  # opened: where in the text, and after which piece
    for token in _TOKEN.finditer(text):
        kind, value = token.lastgroup, token[token.lastgroup or 0]
        opened = groups["[" if value == "]" else "("]
        if kind == "open":
            groups[value].append((token.end(), len(pieces)))
            if sum(map(len, groups.values())) > MAX_DEPTH:
                raise MarkupError(f"groups are nested more than {MAX_DEPTH} deep")
        elif kind == "text":
            _add(pieces, value)
        elif kind == "escaped" or not opened:
            pieces.append((value if kind == "escaped" else token[0], 1.0))
        else:
            start, first = opened.pop()
            if value == "]":
                _check_unedited(text, start, token.start())
            _multiply(pieces, first, float(value) if kind == "weight" else _FACTORS[value])
    for mark, first in [(mark, first) for mark, left in groups.items() for _, first in left]:
        _multiply(pieces, first, _FACTORS[mark])
    return _merged(pieces)


def write(prompt: str | WeightedPrompt) -> str:
    """Return the text that is read as this prompt, which has no breaks, here and by the web UI: the inverse of `read`.

    A weight has at most nine decimals. Weights of another syntax keep their numbers, which other arithmetic reads.
    """
    parts = ((prompt, 1.0),) if isinstance(prompt, str) else prompt.parts
    written = ((unbroken(_escaped(text)), weight) for text, weight in parts)
    return "".join(text if weight == 1 else f"({text}:{_decimal(weight)})" for text, weight in written)


def unbroken(text: str) -> str:
    """Return a text in this syntax that is read alike here, and alike by the web UI, whose words `AND`, `<name:…>` and,
    at the beginning of a line, `Negative prompt:` are no text: an empty group in them makes them text, and so an
    escaped text's `BREAK`.
    """
    return _WORDS.sub(_with_group, text)


def _with_group(match: re.Match[str]) -> str:
    word = match[0]
    first = 1 + len(word) - len(word.lstrip())  # its first letter, behind blanks
    return f"{word[:first]}(){word[first:]}"


def _escaped(text: str) -> str:
    """Return the text with its brackets and backslashes escaped, and no `BREAK` in it."""
    return _BREAK.sub("B()REAK", _SPECIAL.sub(r"\\\g<0>", text))


def _decimal(weight: float) -> str:
    return f"{weight:.9f}".rstrip("0").rstrip(".")


def _check_networks(text: str) -> None:
    if match := _NETWORK.search(text):
        raise MarkupError(f"{match[0]}…> is not read in a prompt; LoRAs are named in the field lora")


def _check_unedited(text: str, start: int, end: int) -> None:
    if _EDITED.search(text, start, end):
        raise MarkupError("prompt editing, [from:to:when] and [a|b], is not offered; \\[ is a bracket")


def _add(pieces: list[_Piece], text: str) -> None:
    """The text, with a piece for each `BREAK` in place of it and of the spaces around it."""
    parts = _BREAK.split(text)
    for number, part in enumerate(parts):
        if number:
            pieces.append((None, 1.0))
            part = part.lstrip()
        if number < len(parts) - 1:
            part = part.rstrip()
        if part:
            pieces.append((part, 1.0))


def _multiply(pieces: list[_Piece], first: int, factor: float) -> None:
    for at in range(first, len(pieces)):
        text, weight = pieces[at]
        pieces[at] = text, weight * factor


def _merged(pieces: Sequence[_Piece]) -> str | WeightedPrompt:
    """Adjacent texts of one weight as one part."""
    parts: list[tuple[list[str], float]] = []
    breaks: list[int] = []
    for text, weight in pieces:
        if text is None:
            breaks.append(len(parts))
            if len(breaks) >= MAX_CHUNKS:
                raise MarkupError(f"has more than {MAX_CHUNKS - 1} BREAKs, and at most {MAX_CHUNKS} chunks are read")
        elif not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise MarkupError(f"a weight is more than {MAX_WEIGHT:g}")
        elif parts and parts[-1][1] == weight and len(parts) not in breaks[-1:]:
            parts[-1][0].append(text)
        else:
            parts.append(([text], weight))
    if not breaks and all(weight == 1 for _, weight in parts):
        return "".join(text for texts, _ in parts for text in texts)
    return WeightedPrompt(tuple(("".join(texts), weight) for texts, weight in parts), A1111, tuple(breaks))
