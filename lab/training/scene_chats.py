"""Chats that ask for a scene in few words and answer with its caption; tells whether an answer keeps what was asked."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lab.scenes import emoji, subjects
from lab.scenes.emoji import PictureRow
from lab.scenes.grammar import NUMBERS, render_caption
from lab.scenes.subjects import Subject
from lab.scenes.truth import Truth
from lab.training.phrases import BACKDROPS, SYSTEM, Chat
from lab.training.scenes import Composer

_ASKS = ("{}", "{}", "{}", "{}", "{}", "draw {}", "please draw {}", "{} please", "show me {}")
_BARE, _ENDLESS, _DIGITS, _KEYWORD, _LOOSE, _CAPITAL = 0.7, 0.4, 0.25, 0.15, 0.25, 0.1
"""Shares of prompts without articles, and of those without "background" and with digits; of things that a keyword asks
for; of some pairs whose prompt leaves the place open; of prompts with a capital."""
_MIRRORED = {"right of": "left of", "below": "above", "in front of": "behind"}


@dataclass(frozen=True)
class SceneChat:
    """A chat, and what its prompt asks to be true."""

    chat: Chat
    truth: Truth


class SceneExpander:
    """Draws chats about scenes: a caption answers, and its own words ask, fewer of them.

    Where no background is asked for, the answer brings one that suits the first thing's kind and from which all things
    stand out. A keyword asks for a thing only if no other subject has it and no emoji is named so.
    """

    def __init__(self, rows: list[PictureRow], composer: Composer) -> None:
        self.composer = composer
        self._groups = {subject.noun: rows[subject.row].group for subject in composer.subjects}
        owners = Counter(key for subject in composer.subjects for key in set(rows[subject.row].keywords))
        names = {row.name.lower() for row in rows}
        self._keys = {
            subject.noun: [
                key
                for key in rows[subject.row].keywords
                if owners[key] == 1 and key not in names and subjects.named(replace(rows[subject.row], name=key))
            ]
            for subject in composer.subjects
        }

    @classmethod
    def read(cls, data: Path, size: int) -> SceneExpander:
        """Read the subjects that training with pictures of this side composes scenes of."""
        rows = emoji.read_rows(data)
        return cls(rows, Composer(subjects.choose(rows, emoji.read_pictures(data, rows, size))))

    def chats(self, seed: int | str, *, held_out: bool = False) -> Iterator[SceneChat]:
        """Endlessly; equal seeds give equal chats. Only `held_out` ones have families that are held out."""
        draw = random.Random(f"scene chats {seed} {held_out}")
        while True:
            truth = self.composer.draw_truth(draw, held_out=held_out)
            if len(truth.items) > 1 or truth.items[0].count > 1 or truth.items[0].colour or truth.items[0].size:
                yield self.chat(truth, draw)

    def chat(self, truth: Truth, draw: random.Random) -> SceneChat:
        """A chat whose answer is true of `truth`."""
        requested = truth
        if truth.relation in ("left of", "beside") and draw.random() < _LOOSE:
            requested = replace(truth, relation="and")
        if not truth.background:
            truth = replace(truth, background=(self._background(truth, draw),))
        named = {item.subject: self._named(self.composer.by_noun[item.subject], draw) for item in truth.items}
        wording = draw.getrandbits(32)  # one for both: the answer says it as the prompt does
        prompt = render_caption(requested, named, random.Random(wording))
        if draw.random() < _BARE:
            prompt = _bare(prompt, draw)
        prompt = draw.choice(_ASKS).format(prompt)
        if draw.random() < _CAPITAL:
            prompt = prompt[0].upper() + prompt[1:]
        answer = render_caption(truth, self.composer.by_noun, random.Random(wording))
        return SceneChat(Chat(prompt, answer, SYSTEM if draw.random() < 0.1 else ""), requested)

    def _named(self, subject: Subject, draw: random.Random) -> Subject:
        keys = self._keys[subject.noun]
        if not keys or draw.random() >= _KEYWORD:
            return subject
        key = draw.choice(keys)
        return replace(subject, noun=key, plural=subjects.plural(key))

    def _background(self, truth: Truth, draw: random.Random) -> str:
        usual = BACKDROPS.get(self._groups[truth.items[0].subject], BACKDROPS[""])
        clear = self.composer.backgrounds(truth)
        odds = [odds if name in clear else 0 for name, odds in zip(usual, (6, 3, 1), strict=True)]
        return draw.choices(usual, odds)[0] if any(odds) else next(iter(clear), "white")


def _bare(caption: str, draw: random.Random) -> str:
    """The caption without articles, perhaps with digits and a background's colour alone."""
    text = re.sub(r"\ban? ", "", caption)
    if draw.random() < _ENDLESS:
        text = re.sub(r"( on |, )([a-z ]+) background$", r"\1\2", text)
    if draw.random() < _DIGITS:
        text = re.sub(rf"\b({'|'.join(NUMBERS[1:])})\b", lambda number: str(NUMBERS.index(number[1]) + 1), text)
    return text


def keeps(requested: Truth, answered: Truth) -> bool:
    """Return whether a scene has all that was asked for, and no other things and attributes: background and sticker may
    be added, and two things whose place was left open may stand anywhere.
    """
    if requested.relation == "and" and len(answered.items) == 2:
        answered = replace(answered, relation="and")
    first, second = _canonical(requested), _canonical(answered)
    same = (first.items, first.relation) == (second.items, second.relation)
    return same and requested.background in ((), answered.background) and answered.sticker >= requested.sticker


def _canonical(truth: Truth) -> Truth:
    """One of the truths that mean the same."""
    if truth.relation in _MIRRORED:
        return replace(truth, items=truth.items[::-1], relation=_MIRRORED[truth.relation])
    if truth.relation in ("and", "beside"):
        return replace(truth, items=tuple(sorted(truth.items, key=lambda item: item.subject)))
    return truth
