"""Training texts of the language model: chats that expand a short prompt into a caption, and COCO's captions."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.scenes.emoji import PictureRow
from lab.training import captions

SYSTEM = "You expand a short prompt into a caption for an emoji."
_WORD = re.compile(r"[^\W_]+", re.UNICODE)
_STOP = frozenset(["a", "an", "the", "of", "with", "and", "in", "on", "some", "please", "draw", "emoji", "picture"])
BACKDROPS: dict[str, tuple[str, str, str]] = {
    "Smileys & Emotion": ("teal", "light blue", "pink"),
    "People & Body": ("light blue", "teal", "beige"),
    "Animals & Nature": ("light green", "beige", "light blue"),
    "Food & Drink": ("beige", "light blue", "pink"),
    "Travel & Places": ("navy", "light blue", "beige"),
    "Activities": ("purple", "light green", "yellow"),
    "Objects": ("gray", "beige", "light blue"),
    "Symbols": ("white", "light blue", "beige"),
    "Flags": ("light blue", "white", "gray"),
    "": ("white", "light blue", "beige"),
}
"""Backgrounds that suit a group of pictures, the usual one first."""
_ASKS = ("{}", "{}", "{}", "{}", "a {}", "draw {}", "an emoji of {}", "{} please", "{} emoji")


@dataclass(frozen=True)
class Chat:
    """One exchange: `prompt` asks, `answer` is a caption; `system` may be empty."""

    prompt: str
    answer: str
    system: str = ""

    def messages(self, answered: bool = True) -> list[dict[str, str]]:
        """The exchange as chat-template messages, with or without the answer."""
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        system_messages.append({"role": "user", "content": self.prompt})
        return [*system_messages, {"role": "assistant", "content": self.answer}] if answered else system_messages


def read_coco(data: Path) -> list[str]:
    """Captions of `coco/captions_source.tsv`, in order, whitespace squeezed."""
    with (data / "coco" / "captions_source.tsv").open(encoding="utf-8", newline="") as lines:
        texts = [" ".join(line["caption"].split()) for line in csv.DictReader(lines, delimiter="\t")]
    if not texts:
        raise ValueError("captions_source.tsv: no captions")
    return texts


def split(items: list[str], every: int = 20) -> tuple[list[str], list[str]]:
    """Items to train on, and every `every`-th held out."""
    return [x for n, x in enumerate(items) if n % every], [x for n, x in enumerate(items) if n % every == 0]


def words(text: str) -> set[str]:
    """Content words, lower-cased, with plural endings dropped, so that "cats" asks for "cat"."""
    return {stem(word) for word in _WORD.findall(text.lower()) if word not in _STOP}


def stem(word: str) -> str:
    """The crudest stem that makes singular and plural meet."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def vocabulary(row: PictureRow) -> set[str]:
    """All the words under which a picture may be asked for."""
    return words(" ".join([row.name, *row.keywords]))


class Expander:
    """Draws chats: keywords or a piece of the name ask, a picture's whole caption answers.

    An asked colour is kept; where none is asked the answer brings one that suits the picture's kind, which is
    the expansion's share of invention.
    """

    def __init__(self, rows: list[PictureRow]) -> None:
        # One entry a base name: with five tones each, people would be nine tenths of all talk.
        by_base: dict[str, list[PictureRow]] = {}
        for row in rows:
            by_base.setdefault(captions.split_tone(row.name)[0], []).append(row)
        self.bases = sorted(by_base)
        self.rows = by_base

    def draw(self, draw: random.Random) -> Chat:
        """One chat."""
        row = draw.choice(self.rows[draw.choice(self.bases)])
        base, tone = captions.split_tone(row.name)
        keys = [word for word in row.keywords if not word.endswith(captions.TONE_SUFFIX)]
        kind = draw.random()
        if kind < 0.3 or not keys:
            request = base
        elif kind < 0.5:
            request = draw.choice(keys)
        elif kind < 0.85:
            request = " ".join(draw.sample(keys, min(len(keys), 2)))
        else:
            request = f"{draw.choice(keys)} {base}"
        if tone is not None:
            request = f"{request} with {tone} skin tone"
        colour = draw.choices(BACKDROPS.get(row.group, BACKDROPS[""]), weights=(6, 3, 1))[0]
        if draw.random() < 0.2:
            colour = draw.choice(captions.COLOUR_NAMES)
            request = draw.choice((f"{request} on {colour}", captions.with_background(request, colour)))
        prompt = draw.choice(_ASKS).format(request)
        answer = captions.with_background(row.name, colour)
        return Chat(prompt, answer, SYSTEM if draw.random() < 0.1 else "")


def corpus(data: Path, rows: list[PictureRow]) -> list[str]:
    """Plain text for the tokenizer: captions, keywords and the training part of COCO."""
    expander, draw = Expander(rows), random.Random(0)
    chats = [expander.draw(draw) for _ in range(3 * len(rows))]
    keys = [" ".join(row.keywords) for row in rows]
    return [
        *(text for chat in chats for text in (chat.prompt, chat.answer)),
        *keys,
        *split(read_coco(data))[0],
    ]


def names_the_subject(prompt: str, answer: str, rows: Iterable[PictureRow]) -> bool:
    """Return whether `answer` parses into the caption language and its subject is a picture that `prompt` may mean.

    Every content word of the prompt, colours aside, must belong to the named picture's words.
    """
    try:
        caption = captions.read_caption(answer)
    except ValueError:
        return False
    subject = next((row for row in rows if row.name.lower() == caption.subject), None)
    if subject is None:
        return False
    colours = words(" ".join(captions.COLOURS)) | {"background", "skin", "tone"}
    return words(prompt) - colours <= vocabulary(subject) | set(captions.TONES)
