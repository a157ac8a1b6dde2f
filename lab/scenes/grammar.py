"""The grammar of scenes' captions: says a truth in one of many phrasings, and reads a caption back into its truth.

Grammar: `[PREFIX] BODY [STICKER] [BACKGROUND]`; BODY is one noun phrase, two in a relation, or a list in a row, and a
noun phrase is `a|an|NUMBER [SIZE] [COLOUR] NOUN`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lab.scenes import hues
from lab.scenes.emoji import COLOURS
from lab.scenes.subjects import Subject, article
from lab.scenes.truth import SceneItem, Truth

NUMBERS = ("a", "two", "three", "four", "five")
_SIZES = {"tiny": ("tiny", "very small"), "small": ("small", "little"), "big": ("big", "large", "huge")}
_RELATIONS = {
    "left of": ("{} to the left of {}", "{} left of {}", "{} on the left and {} on the right", "{} on the left of {}"),
    "right of": (
        "{} to the right of {}", "{} right of {}", "{} on the right and {} on the left", "{} on the right of {}"
    ),
    "above": ("{} above {}", "{} over {}", "{} at the top and {} at the bottom"),
    "below": ("{} below {}", "{} under {}", "{} beneath {}", "{} at the bottom and {} at the top"),
    "behind": ("{} behind {}", "{} partly hidden behind {}"),
    "in front of": ("{} in front of {}",),
    "beside": ("{} next to {}", "{} beside {}"),
    "and": ("{} and {}", "{} with {}", "{}, {}"),
}  # fmt: skip
_ROWS = ("a row of {}", "{} in a row", "{} side by side", "from left to right {}")
_PREFIXES = ("a picture of ", "an emoji of ", "a drawing of ", "a scene with ", "an illustration of ")
_STICKERS = (" as a sticker", " with a white outline", ", sticker style")
_PLAIN = (" on a {} background", " on {}", " against a {} background", " with a {} background", ", {} background")
_FADING = (
    " on a background fading from {} to {}", " on a {} to {} gradient", " on a gradient from {} to {}",
    ", {} to {} gradient background",
)  # fmt: skip


def render_caption(truth: Truth, subjects: dict[str, Subject], draw: random.Random) -> str:
    """A caption of the truth."""
    parts = [_phrase(item, subjects[item.subject], draw) for item in truth.items]
    if truth.relation == "row":
        body = draw.choice(_ROWS).format(f"{', '.join(parts[:-1])} and {parts[-1]}")
    elif truth.relation is not None:
        body = draw.choice(_RELATIONS[truth.relation]).format(*parts)
    else:
        body = parts[0]
    prefix = draw.choice(_PREFIXES) if draw.random() < 0.15 else ""
    # The plainest wording most of the time.
    ends = draw.choice(_STICKERS) if truth.sticker else ""
    if len(truth.background) == 1:
        colour = truth.background[0]
        end = _PLAIN[0] if draw.random() < 0.5 else draw.choice(_PLAIN)
        end = end.format(colour)
        ends += end.replace(" a ", " an ", 1) if colour[0] in "aeiou" else end
    elif truth.background:
        end = draw.choice(_FADING).format(*truth.background)
        ends += re.sub(r" a (?=[aeiou])", " an ", end)
    return prefix + body + ends


def _phrase(item: SceneItem, subject: Subject, draw: random.Random) -> str:
    words = [draw.choice(_SIZES[item.size])] if item.size else []
    words += [item.colour] if item.colour else []
    words.append(subject.noun if item.count == 1 else subject.plural)
    rest = " ".join(words)
    if item.count == 1:
        return f"{article(rest)} {rest}"
    return f"{NUMBERS[item.count - 1]} {rest}"


class CaptionParser:
    """Reads captions of `say` back."""

    def __init__(self, subjects: Iterable[Subject]) -> None:
        self._singular = {subject.noun: subject for subject in subjects}
        self._plural = {subject.plural: subject for subject in self._singular.values()}
        sizes = {word: size for size, words in _SIZES.items() for word in words}
        self._sizes = sizes
        self._head = re.compile(
            rf"(?P<number>an|{'|'.join(NUMBERS)}) (?:(?P<size>{'|'.join(sizes)}) )?"
            rf"(?:(?P<colour>{'|'.join(hues.WORDS)}) )?(?P<noun>[a-z' -]+)"
        )
        colour = f"({'|'.join(sorted(COLOURS, key=len, reverse=True))})"
        self._ends = [
            (count, re.compile(re.escape(end).replace(r"\{\}", colour).replace(r"\ a\ ", r"\ an?\ ") + "$"))
            for count, forms in ((2, _FADING), (1, _PLAIN))
            for end in forms
        ]
        self._bodies = [
            (relation, re.compile(f"^{form.format('(.+)', '(.+)')}$"))
            for relation, forms in _RELATIONS.items()
            for form in sorted(forms, key=len, reverse=True)
        ]

    def read(self, caption: str) -> Truth:
        """The caption's truth; raises `ValueError` where it is not of the grammar."""
        rest = caption
        background: tuple[str, ...] = ()
        for _, end in self._ends:
            if match := end.search(rest):
                background, rest = match.groups(), rest[: match.start()]
                break
        sticker = next((form for form in _STICKERS if rest.endswith(form)), "")
        rest = rest.removesuffix(sticker)
        # "a row of" and nouns begin with an article too: prefixes are tried last.
        for body in (rest, *(rest.removeprefix(prefix) for prefix in _PREFIXES if rest.startswith(prefix))):
            items, relation = self._body(body)
            if items:
                return Truth(items, relation, background, bool(sticker))
        raise ValueError(f"caption {caption!r} is not of the grammar of scenes")

    def _body(self, body: str) -> tuple[tuple[SceneItem, ...], str | None]:
        single = self._thing(body)
        if single is not None:
            return (single,), None
        for form in _ROWS:
            lead, tail = form.split("{}")
            if body.startswith(lead) and body.endswith(tail):
                parts = re.split(r", | and ", body[len(lead) : len(body) - len(tail)])
                items = tuple(item for part in parts if (item := self._thing(part)) is not None)
                if len(items) == len(parts) >= 3:
                    return items, "row"
        for relation, pattern in self._bodies:
            if match := pattern.match(body):
                items = tuple(item for part in match.groups() if (item := self._thing(part)) is not None)
                if len(items) == 2:
                    return items, relation
        return (), None

    def _thing(self, phrase: str) -> SceneItem | None:
        match = self._head.fullmatch(phrase)
        if match is None:
            return None
        number = match["number"]
        count = 1 if number == "an" else NUMBERS.index(number) + 1
        subject = (self._singular if count == 1 else self._plural).get(match["noun"])
        if subject is None:
            return None
        return SceneItem(subject.noun, count, match["colour"], self._sizes.get(match["size"] or ""))


class Foils:
    """Draws captions that differ from a true one in one thing: a subject, a colour, a count, or who stands where."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._subjects = subjects
        self._by_noun = {subject.noun: subject for subject in subjects}
        self._paintable = [subject for subject in subjects if subject.colours]

    def captions(self, truth: Truth, count: int, draw: random.Random) -> list[str]:
        """Return at most `count` different captions with one thing wrong."""
        wrong = dict.fromkeys(self.wrong(truth, draw) for _ in range(count))
        return [render_caption(wrong_truth, self._by_noun, draw) for wrong_truth in wrong if wrong_truth != truth]

    def wrong(self, truth: Truth, draw: random.Random) -> Truth:
        """The truth with one thing wrong, or as it is where the draw repeats what is there."""
        place = draw.randrange(len(truth.items))
        item = truth.items[place]
        colours = self._by_noun[item.subject].colours
        changes = [
            "subject",
            *(["colour"] * 2 if item.colour else ()),
            *(["count"] * 2 if truth.relation is None else ()),
        ]
        changes += ["turn"] * 2 if truth.relation not in (None, "beside", "and") else []
        change = draw.choice(changes)
        if change == "turn":
            return replace(truth, items=truth.items[::-1])
        if change == "colour":
            item = replace(item, colour=draw.choice(colours))
        elif change == "count":
            size = None if item.size == "big" else item.size
            item = replace(item, count=draw.choice([n for n in range(1, 6) if n != item.count]), size=size)
        else:
            pick = self._paintable if item.colour else self._subjects
            item = replace(item, subject=draw.choice(pick).noun)
            if item.subject in {other.subject for other in truth.items}:
                return truth
        return replace(truth, items=(*truth.items[:place], item, *truth.items[place + 1 :]))
