"""Subjects that scenes are composed of: the emoji with a plain countable noun, told apart by their pictures."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.scenes import hues
from lab.scenes.emoji import PictureRow

GROUPS = frozenset(["Animals & Nature", "Food & Drink", "Objects", "Travel & Places", "Activities"])
ALSO = frozenset(["face-costume"])  # ghosts, robots, and such
_LEFT_OUT = frozenset(["time", "place-map", "place-geographic", "av-symbol", "other-object", "sound", "money", "mail"])
_NOUN = re.compile(r"[a-z]+(?:[ -][a-z]+)?")
# Words that mean something else in a caption, and colours, which would be said twice.
_GRAMMAR = frozenset([
    "left", "right", "above", "below", "behind", "front", "row", "side", "next", "top", "sticker", "outline",
    "background", "big", "small", "tiny", "large", "little", "huge", "red", "orange", "yellow", "green",
    "turquoise", "teal", "blue", "purple", "pink", "black", "white", "brown", "gray", "grey", "navy", "beige",
    "golden", "gold", "dark", "light", "one", "two", "three", "four", "five", "six", "first", "second", "and",
    "with", "of", "a", "an", "the", "in", "on", "no", "new", "full", "half",
])  # fmt: skip
# No name of one thing that a picture shows whole, or a name that people would not count.
_SKIP = frozenset([
    "foggy", "fog", "sunrise", "sunset", "cityscape", "cooking", "camping", "wedding", "bowling", "tennis",
    "badminton", "lacrosse", "softball", "softball-bat", "construction", "mate", "dna", "herb", "rosette", "sake",
    "oden", "dango", "curry-rice", "ice", "butter", "salt", "bacon", "garlic", "wood", "coral", "knot", "thread",
    "yarn", "soap", "milk-way", "bread", "custard", "popcorn", "spaghetti", "sushi", "tempura", "desert", "kaaba",
    "label", "link", "memo", "radio-button", "spider-web", "station", "motorway", "metro", "cloud-rain",
    "water-wave", "wind-face", "music", "rain", "bubble", "lotus", "hibiscus", "blossom", "houses", "books",
    "shopping", "cricket", "american-football", "rugby-football", "videocassette", "pager", "batter", "microbe",
    "rice-cracker", "cooked-rice", "shaved-ice", "field-hockey", "ice-hockey", "ping-pong", "video-game",
    "fried-shrimp", "steaming-bowl", "green-salad", "canned-food", "chocolate-bar", "chart-increasing",
    "chart-decreasing", "building-construction", "locked", "unlocked", "high-voltage", "airplane-departure",
    "luggage", "airplane-arrival", "railway-track", "level-slider", "milky-way", "pouring-liquid",
    "pine-decoration", "cyclone", "oncoming-bus", "headphone", "oncoming-taxi", "oncoming-automobile",
    "oncoming-police-car", "diving-mask", "mountain-railway", "suspension-railway", "broccoli", "mountain-cableway",
    "hair-pick", "identification-card", "clinking-glasses", "lab-coat", "flash", "love-hotel", "x-ray",
    "film-projector", "railway-car",
])  # fmt: skip
_IRREGULAR = {
    "mouse": "mice", "wolf": "wolves", "fish": "fish", "sheep": "sheep", "deer": "deer", "goose": "geese",
    "leaf": "leaves", "knife": "knives", "ox": "oxen", "moose": "moose", "bison": "bison", "shrimp": "shrimp",
    "squid": "squid", "scarf": "scarves", "die": "dice", "loaf": "loaves", "blowfish": "blowfish", "buffalo": "buffalo",
    "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes", "jellyfish": "jellyfish", "snowman": "snowmen",
}  # fmt: skip
_ALIKE = 0.93  # correlation of two pictures from which they are one
COARSE = 16  # rows and columns of `Subject.cover`
_COLOURED = 0.55  # share of a subject's surface that must be coloured for a hue word to be true of it


@dataclass(frozen=True)
class Subject:
    """A thing that scenes can show. `row` numbers its picture; `colours` are the hue words that it can be painted in.

    `natural` is the word of its own hue, where it has one: painted so, it is no new combination. `mean` is the mean RGB
    in 0..1 of its surface. `cover` are the rows of its coarse square alpha in 0..1; empty, it fills its square.
    """

    noun: str
    plural: str
    row: int
    colours: tuple[str, ...]
    natural: str | None
    mean: tuple[float, float, float]
    cover: tuple[tuple[float, ...], ...] = ()


def plural(noun: str) -> str:
    """English plural of a noun of one or two words; the last word takes the ending."""
    head, blank, last = noun.rpartition(" ")
    if last in _IRREGULAR:
        return head + blank + _IRREGULAR[last]
    if re.search(r"(s|x|z|ch|sh)$", last):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if re.search(r"[^aeiou]y$", last) else f"{noun}s"


def article(phrase: str) -> str:
    """ "a" or "an"."""
    vowel = phrase[0] in "aeio" or (phrase[0] == "u" and not re.match(r"uni|uku|ute|use", phrase))
    return "an" if vowel and not phrase.startswith(("one", "ewe")) else "a"


def named(row: PictureRow) -> bool:
    """Return whether the row's name is a noun that captions can count, colour and place."""
    name = row.name.lower()
    words = name.replace("-", " ").split()
    if row.group not in GROUPS and row.subgroup not in ALSO:
        return False
    if row.subgroup in _LEFT_OUT or not _NOUN.fullmatch(name) or name.replace(" ", "-") in _SKIP:
        return False
    many = name.endswith("s") and not name.endswith(("ss", "us"))
    return not many and not _GRAMMAR.intersection(words)


def choose(rows: list[PictureRow], images: Tensor) -> list[Subject]:
    """The subjects among `rows`, whose premultiplied pictures are uint8 `images` [N, 4, S, S].

    Of pictures that look alike the first is taken, so that a picture of a scene has one reading.
    """
    candidates = [index for index, row in enumerate(rows) if named(row)]
    sprites = images[candidates].float() / 255
    small = F.interpolate(sprites, size=32, mode="area")
    looks = F.normalize((torch.cat([small[:, :3] + 1 - small[:, 3:], small[:, 3:]], 1) - 0.5).flatten(1), dim=1)
    selected: list[int] = []
    for place in range(len(candidates)):
        if not selected or float((looks[selected] @ looks[place]).max()) < _ALIKE:
            selected.append(place)
    return [_subject(rows[candidates[place]].name.lower(), candidates[place], sprites[place]) for place in selected]


def _subject(noun: str, row: int, sprite: Tensor) -> Subject:
    alpha = sprite[3]
    area = alpha.sum().clamp(min=1e-3)
    straight = sprite[:3] / alpha.clamp(min=1e-3)
    share = float((alpha * hues.coloured(straight)).sum() / area)
    own_shares = hues.shares(straight.flatten(1).T, alpha.flatten())
    natural = hues.WORDS[int(own_shares.argmax())] if float(own_shares.max()) > 0.4 else None
    red, green, blue = (sprite[:3].flatten(1).sum(1) / area).tolist()
    colours = hues.WORDS if share > _COLOURED else ()
    cover = F.adaptive_avg_pool2d(alpha[None], COARSE)[0].tolist()
    return Subject(noun, plural(noun), row, colours, natural, (red, green, blue), tuple(map(tuple, cover)))
