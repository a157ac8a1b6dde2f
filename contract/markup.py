"""Parses prompt weights: `(words)1.3`, `(words)+`, `word++`, `word--`, in compel's syntax.

Runs in time linear in the text's length, however deeply nested: every parenthesis is matched once, with a stack.

A group is a pair of parentheses not attached to a word: the pair in `dog(s)` is ordinary text, and so is an unmatched
one. Weights of nested groups multiply. A backslash escapes the `( ) + - \\` after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COMPEL, A1111 = "compel", "a1111"  # syntaxes, each with its own arithmetic (pipeline.text.weighting)

MAX_DEPTH = 32
MAX_CHUNKS = 4  # of a prompt's tokens, 75 each with CLIP
MAX_WEIGHT = 10.0  # of one part, all its groups multiplied
MAX_LOWERED = 16  # parts with a weight below 1: each costs the encoders an extra row

_PLUS, _MINUS = 1.1, 0.9
_SIGNS = 200  # more make no difference: 1.1 ** 200 is rejected, 0.9 ** 200 is nothing
_ESCAPED = "()+-\\"
_ORDINARY = "\0"  # placeholder for an escaped character; no prompt contains it
_GAP = re.compile(r"(?:[\s,;:!?\"]|\.(?!\w))+")  # between words
_SUFFIX = re.compile(r"(?P<signs>\++|-+)(?![\w+-])|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?!\.?\w)")
_OPERATOR = re.compile(r"\.(?:and|add|blend|swap|attend)(?=\()|\b(?:useLora|withLora)(?=\()")


class MarkupError(ValueError):
    """Unsupported weights. The message says why, and never echoes the text."""


@dataclass(frozen=True, slots=True)
class WeightedPrompt:
    """A prompt in parts, each a text and its weight. Concatenated they are the prompt without marks.

    `breaks` are the numbers of parts before which a new chunk of tokens begins, ascending; one may be there several
    times. The last may be the number of parts.
    """

    parts: tuple[tuple[str, float], ...]
    syntax: str = COMPEL
    breaks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


def read(text: str) -> str | WeightedPrompt:
    """Parse a prompt's weights; if none differs from 1 the result is plain text without marks.

    Follows compel's documented syntax (damian0815/compel, doc/syntax.md). Raises `MarkupError` for its operators, such
    as `.blend()`; for groups more than `MAX_DEPTH` deep; for a weight above `MAX_WEIGHT`; for more than `MAX_LOWERED`
    parts below 1.
    """
    letters, marks = _unescaped(text)
    match = _OPERATOR.search(marks)
    if match is not None:
        raise MarkupError(f"{match[0]}() is not offered; weights are written (words)1.3, (words)+, word++ or word--")
    opened, closed = _groups(marks)
    parts, weights, at, bare = _Parts(), [1.0], 0, False
    while at < len(marks):
        if at in opened:
            weights.append(weights[-1] * opened[at])
            at, bare = at + 1, True
            if len(weights) > MAX_DEPTH + 1:
                raise MarkupError(f"groups are nested more than {MAX_DEPTH} deep")
            continue
        if at in closed:
            weights.pop()
            at, bare = closed[at], True
            continue
        gap = _GAP.match(marks, at)
        end = gap.end() if gap else _word_end(marks, at, opened, closed)
        stem, weight = (end, 1.0) if gap else _word(marks, at, end)
        parts.add(letters[at:stem], weights[-1] * weight, apart=bare)
        at, bare = end, stem < end
    return parts.read()


def _unescaped(text: str) -> tuple[str, str]:
    """The text without its backslashes, and a copy of equal length with escaped characters masked."""
    letters, marks, at = [], [], 0
    while at < len(text):
        escapes = text[at] == "\\" and text[at + 1 : at + 2] in tuple(_ESCAPED)
        at += escapes
        letters.append(text[at])
        marks.append(_ORDINARY if escapes else text[at])
        at += 1
    return "".join(letters), "".join(marks)


def _groups(marks: str) -> tuple[dict[int, float], dict[int, int]]:
    """Find where groups open, and their weights; where they close, and where the text continues after them."""
    opened: dict[int, float] = {}
    closed: dict[int, int] = {}
    stack: list[tuple[int, bool]] = []  # position, and whether it opens a group
    at = behind = 0
    while at < len(marks):
        mark = marks[at]
        if mark == "(":
            into = at > behind and (marks[at - 1].isalnum() or marks[at - 1] == _ORDINARY)
            stack.append((at, not into))
        elif mark == ")" and stack:
            where, group = stack.pop()
            if group:
                suffix = _SUFFIX.match(marks, at + 1)
                opened[where] = 1.0 if suffix is None else _weight(suffix["signs"], suffix["number"])
                closed[at] = behind = at + 1 if suffix is None else suffix.end()
                at = behind
                continue
        at += 1
    return opened, closed


def _word_end(marks: str, at: int, opened: dict[int, float], closed: dict[int, int]) -> int:
    end = at + 1
    while end < len(marks) and end not in opened and end not in closed and _GAP.match(marks, end) is None:
        end += 1
    return end


def _word(marks: str, at: int, end: int) -> tuple[int, float]:
    """Return where a word ends without its signs, and their weight."""
    word = marks[at:end]
    stem = word.rstrip(word[-1]) if word[-1] in "+-" else word
    if stem == word or not stem or stem[-1] in "+-" or not any(map(_in_words, stem)):
        return end, 1.0
    return at + len(stem), _weight(word[len(stem) :], None)


def _in_words(mark: str) -> bool:
    return mark.isalnum() or mark == _ORDINARY or ord(mark) > 0x2000  # emoji and dashes may be words


def _weight(signs: str | None, number: str | None) -> float:
    if signs:
        return float((_PLUS if signs[0] == "+" else _MINUS) ** min(len(signs), _SIGNS))
    return min(float(number or 1), 1e6)  # larger weights are rejected anyway


class _Parts:
    """Collects texts and weights; adjacent texts of one weight are merged."""

    def __init__(self) -> None:
        self._texts: list[list[str]] = []
        self._weights: list[float] = []

    def add(self, text: str, weight: float, *, apart: bool) -> None:
        """`apart`: marks were removed before it, and it does not belong to the preceding word."""
        if weight > MAX_WEIGHT:
            raise MarkupError(f"a weight is more than {MAX_WEIGHT:g}")
        if apart and self._texts and self._texts[-1][-1][-1].isalnum() and text[0].isalnum():
            self._texts[-1].append(" ")
        if not self._texts or (weight != self._weights[-1] and text.strip()):
            self._texts.append([])
            self._weights.append(weight)
        self._texts[-1].append(text)

    def read(self) -> str | WeightedPrompt:
        parts = tuple(zip(map("".join, self._texts), self._weights, strict=True))
        if all(weight == 1 for weight in self._weights):
            return "".join(text for text, _ in parts)
        if sum(weight < 1 for weight in self._weights) > MAX_LOWERED:
            raise MarkupError(f"more than {MAX_LOWERED} parts are weighted below 1")
        return WeightedPrompt(parts)
