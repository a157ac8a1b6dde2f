"""Composes scenes of emoji: what is in them, where it stands, and a caption, each a function of a seed and an index.

Whole families are held out by rule: some pairs of subject and colour, of subject and count, and of two subjects. A
stable hash of the family decides, so that training, judges and checkers agree without a list. Does not draw: see
lab.training.render.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, islice

from lab.scenes.grammar import CaptionParser, Foils, render_caption
from lab.scenes.subjects import Subject
from lab.scenes.truth import SceneItem, Truth
from lab.training import captions, layout
from lab.training.layout import Square, hidden

Family = tuple[str, ...]
HELD_SHARES = {"colour": 0.2, "count": 0.2, "pair": 0.1}
"""Which share of each kind of family training never sees."""
KINDS = {"colour": 0.22, "count": 0.22, "pair": 0.28, "row": 0.10, "groups": 0.12, "one": 0.06}
"""Kinds of scenes and how often each is drawn."""
_CONTRAST = 0.38  # RGB distance (of sqrt 3) between a subject's mean colour and the background, at least
_CROPPED, _ENLARGED = 0.10, 0.06  # shares of scenes cut from a larger canvas, and enlarged from half the size
_VISIBLE, _CROPS = 0.60, 12  # share of every square that a crop must show, and how many crops are tried


@dataclass(frozen=True)
class Layer:
    """One sprite: its picture's row, its square, and the hue word that it is painted in."""

    row: int
    square: Square
    colour: str | None = None


@dataclass(frozen=True)
class Backdrop:
    """RGB in 0..1 at both ends; `direction` (x, y) is where the second lies, None where it is around the middle."""

    start: tuple[float, float, float] = (1.0, 1.0, 1.0)
    end: tuple[float, float, float] = (1.0, 1.0, 1.0)
    direction: tuple[float, float] | None = (0.0, 1.0)


@dataclass(frozen=True)
class Scene:
    """A picture to be: `layers` from the hindmost, `size` (width, height) in pixels.

    `truth` is None for a single emoji in its own words, of which only picture and background are known. `foil` is a
    caption with one thing wrong. `canvas` and `corner` are SDXL's original size and crop; `enlarged` scenes are drawn
    at half the size.
    """

    caption: str
    layers: tuple[Layer, ...]
    backdrop: Backdrop
    size: tuple[int, int]
    truth: Truth | None = None
    foil: str | None = None
    sticker: bool = False
    canvas: tuple[int, int] = (0, 0)
    corner: tuple[int, int] = (0, 0)
    enlarged: bool = False

    @property
    def time_ids(self) -> tuple[int, ...]:
        """SDXL's six: original height and width, crop's top and left, height and width."""
        width, height = self.size
        canvas_width, canvas_height = self.canvas if self.canvas != (0, 0) else self.size
        if self.enlarged:
            canvas_width, canvas_height = canvas_width // 2, canvas_height // 2
        left, top = self.corner
        return canvas_height, canvas_width, top, left, height, width


@dataclass(frozen=True)
class ScenePrompt:
    """A caption for a judge, its truth, and a scene that shows it; `kind` is that of its family."""

    kind: str
    caption: str
    truth: Truth
    scene: Scene


def is_held_out(family: Family) -> bool:
    """Return whether training never sees this family."""
    digest = hashlib.blake2b("|".join(family).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_SHARES[family[0]] * 2**64


@dataclass
class Composer:
    """Draws scenes of `subjects`; equal seeds and indices give equal scenes."""

    subjects: list[Subject]
    seed: int = 0
    by_noun: dict[str, Subject] = field(init=False)

    def __post_init__(self) -> None:
        self.by_noun = {subject.noun: subject for subject in self.subjects}
        self._paintable = [subject for subject in self.subjects if subject.colours]
        if len(self.subjects) < 4 or not self._paintable:
            raise ValueError(f"scenes need four subjects and one that takes colours, not {len(self.subjects)}")
        self.reader, self.foils = CaptionParser(self.subjects), Foils(self.subjects)

    def families(self, truth: Truth) -> list[Family]:
        """The families of the truth's combinations. A subject in its own colour is no combination."""
        result: list[Family] = []
        for item in truth.items:
            if item.colour and item.colour != self.by_noun[item.subject].natural:
                result.append(("colour", item.subject, item.colour))
            if item.count > 1:
                result.append(("count", item.subject, str(item.count)))
        for nouns, two in combinations(sorted({item.subject for item in truth.items}), 2):
            result.append(("pair", nouns, two))
        return result

    def compose(self, index: int, size: tuple[int, int] = (128, 128)) -> Scene:
        """The scene of this index, of no held-out family, for a picture of `size` (width, height)."""
        draw = random.Random(f"{self.seed} {index}")
        truth = self.draw_truth(draw, size)
        scene = self.show(truth, draw, size)
        foil = self._foil(truth, draw)
        chance = draw.random()
        if chance < _CROPPED:
            scene = self._cropped(truth, draw, size) or scene
        enlarged = _CROPPED <= chance < _CROPPED + _ENLARGED
        return replace(scene, foil=render_caption(foil, self.by_noun, draw) if foil else None, enlarged=enlarged)

    def draw_truth(self, draw: random.Random, size: tuple[int, int] = (128, 128), *, held_out: bool = False) -> Truth:
        """Draw the truth of a scene of no held-out family, or (`held_out`) of at least one."""
        while True:
            truth = self._truth(draw, size)
            if any(map(is_held_out, self.families(truth))) is held_out:
                return truth

    def backgrounds(self, truth: Truth) -> list[str]:
        """The colours that all things of the truth stand out from."""
        return [name for name in captions.COLOUR_NAMES if self._stands_out(truth, _rgb(name))]

    def _cropped(self, truth: Truth, draw: random.Random, size: tuple[int, int]) -> Scene | None:
        """A picture of `size` cut from a larger scene, in which enough of everything is seen that its caption is true.

        None where no try finds one.
        """
        for _ in range(_CROPS):
            larger = draw.uniform(1.08, 1.35)
            width, height = round(size[0] * larger), round(size[1] * larger)
            left, top = draw.randint(0, width - size[0]), draw.randint(0, height - size[1])
            scene = self.show(truth, draw, (width, height))
            moved = tuple(
                replace(layer, square=layer.square._replace(x=layer.square.x - left, y=layer.square.y - top))
                for layer in scene.layers
            )
            if all(layout.visible(layer.square, size) >= _VISIBLE for layer in moved):
                return replace(scene, layers=moved, size=size, canvas=(width, height), corner=(left, top))
        return None

    def show(self, truth: Truth, draw: random.Random, size: tuple[int, int]) -> Scene:
        """One of the pictures that the truth allows, and one of its captions."""
        width, height = size
        counts_and_sizes = [(item.count, item.size) for item in truth.items]
        if truth.relation is None:
            region = layout.Region(0, 0, width, height)
            places = [layout.group(draw, region, *counts_and_sizes[0], region.short)]
        elif truth.relation == "row":
            places = layout.row(draw, width, height, len(counts_and_sizes))
        else:
            chosen_subjects = [self.by_noun[item.subject] for item in truth.items]
            front, back = chosen_subjects if truth.relation == "in front of" else chosen_subjects[::-1]
            places = layout.pair(draw, width, height, truth.relation, counts_and_sizes, partial(hidden, front, back))
        order = list(zip(truth.items, places, strict=True))
        if truth.relation == "in front of":
            order.reverse()
        layers = tuple(
            Layer(self.by_noun[item.subject].row, square, item.colour) for item, squares in order for square in squares
        )
        caption = render_caption(truth, self.by_noun, draw)
        return Scene(caption, layers, self._backdrop(truth, draw), size, truth, sticker=truth.sticker)

    def prompts(
        self, kind: str, count: int, *, seen: bool = False, size: tuple[int, int] = (128, 128)
    ) -> list[ScenePrompt]:
        """Return at most `count` prompts of different families of this kind, all held out or (`seen`) all trained on.

        Nothing else in them is held out.
        """
        draw = random.Random(f"prompts {self.seed} {kind} {seen}")
        return list(islice(self._prompts(kind, draw, seen, size), count))

    def _prompts(self, kind: str, draw: random.Random, seen: bool, size: tuple[int, int]) -> Iterator[ScenePrompt]:
        families = self._every(kind)
        draw.shuffle(families)
        for family in families:
            if is_held_out(family) == seen:
                continue
            if kind == "colour":
                truth = Truth((SceneItem(family[1], colour=family[2]),))
            elif kind == "count":
                truth = Truth((SceneItem(family[1], count=int(family[2])),))
            else:
                nouns = [family[1], family[2]]
                draw.shuffle(nouns)
                relation = draw.choice(("left of", "right of", "above", "below"))
                truth = Truth(tuple(map(SceneItem, nouns)), relation)
            truth = replace(truth, background=self._background(truth, draw, 0.4))
            scene = self.show(truth, draw, size)
            yield ScenePrompt(kind, scene.caption, truth, scene)

    def _every(self, kind: str) -> list[Family]:
        if kind == "colour":
            return [("colour", s.noun, c) for s in self.subjects for c in s.colours if c != s.natural]
        if kind == "count":
            return [("count", s.noun, str(n)) for s in self.subjects for n in range(2, 6)]
        if kind != "pair":
            raise ValueError(f"kind {kind!r} is not one of {', '.join(HELD_SHARES)}")
        return [("pair", *pair) for pair in combinations(sorted(self.by_noun), 2)]

    def _truth(self, draw: random.Random, size: tuple[int, int]) -> Truth:
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        pick = self._paintable if kind == "colour" else self.subjects
        if kind in ("colour", "one"):
            items = [SceneItem(draw.choice(pick).noun)]
        elif kind == "count":
            items = [SceneItem(draw.choice(pick).noun, draw.randint(2, 5))]
        elif kind == "groups":
            first = draw.randint(2, 4)
            counts = [first, draw.randint(1, min(3, layout.MOST - first))]
            draw.shuffle(counts)
            items = [SceneItem(s.noun, n) for s, n in zip(draw.sample(pick, 2), counts, strict=True)]
        else:
            many = 2 if kind == "pair" else 3 if size[0] < size[1] else draw.choice((3, 3, 4))
            items = [SceneItem(subject.noun) for subject in draw.sample(pick, many)]
        relation = None
        if kind in ("pair", "groups"):
            relations = ("left of", "right of", "above", "below", "beside", "and")
            relation = draw.choice((*relations, "behind", "in front of") if kind == "pair" else relations)
        elif kind == "row":
            relation = "row"
        items = [self._attributes(item, kind, draw) for item in items]
        truth = Truth(tuple(items), relation)
        background = self._background(truth, draw, 0.4)
        return replace(truth, background=background, sticker=background not in ((), ("white",)) and draw.random() < 0.2)

    def _attributes(self, item: SceneItem, kind: str, draw: random.Random) -> SceneItem:
        colours = self.by_noun[item.subject].colours
        chance = {"colour": 1.0, "one": 0.0, "row": 0.15}.get(kind, 0.3)
        colour = draw.choice(colours) if colours and draw.random() < chance else None
        chance = {"one": 0.8, "row": 0.0, "count": 0.12}.get(kind, 0.15)
        # Several big things would not fit.
        sizes = ("tiny", "small", "big") if item.count == 1 else ("tiny", "small")
        return replace(item, colour=colour, size=draw.choice(sizes) if draw.random() < chance else None)

    def _background(self, truth: Truth, draw: random.Random, chance: float) -> tuple[str, ...]:
        """Colours that the caption names: none, one, or a gradient's two; the things stand out from all."""
        if draw.random() >= chance:
            return ()
        names = self.backgrounds(truth)
        count = 2 if draw.random() < 0.25 else 1
        return tuple(draw.sample(names, count)) if len(names) >= count else ()

    def _backdrop(self, truth: Truth, draw: random.Random) -> Backdrop:
        """The named colours; where none is, white as often as not, else any colour or gradient."""
        ends = [_rgb(name) for name in truth.background]
        if not ends:
            white = (1.0, 1.0, 1.0)
            colour_count = 2 if draw.random() < 0.3 else 1
            for attempt in range(40):
                plain = attempt == 0 and draw.random() < 0.5
                colour = white if plain else (draw.random(), draw.random(), draw.random())
                if self._stands_out(truth, colour):
                    ends.append(colour)
                if len(ends) == colour_count or (ends and plain):
                    break
            ends = ends or [white]
        angle = draw.choice(((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (0.7, 0.7), (-0.7, 0.7), None))
        return Backdrop(ends[0], ends[-1], angle)

    def _stands_out(self, truth: Truth, rgb: tuple[float, float, float]) -> bool:
        for item in truth.items:
            mean = _hue_rgb(item.colour) if item.colour else self.by_noun[item.subject].mean
            if sum((a - b) ** 2 for a, b in zip(mean, rgb, strict=True)) < _CONTRAST**2:
                return False
        return True

    def _foil(self, truth: Truth, draw: random.Random) -> Truth | None:
        """The truth with one thing wrong, of no held-out family either: judges would learn that these are wrong."""
        for _ in range(8):
            wrong = self.foils.wrong(truth, draw)
            if wrong != truth and not any(map(is_held_out, self.families(wrong))):
                return wrong
        return None


def single_emoji(row: int, subject: str, colour: str, draw: random.Random, size: tuple[int, int]) -> Scene:
    """One emoji in its own words on a plain background; half of the time as its picture is, else smaller and aside."""
    width, height = size
    side = float(min(size))
    square = Square(width / 2, height / 2, side)
    if draw.random() < 0.5:
        side *= draw.uniform(0.72, 1.0)
        room_x, room_y = (width - side) / 2, (height - side) / 2
        square = Square(width / 2 + draw.uniform(-room_x, room_x), height / 2 + draw.uniform(-room_y, room_y), side)
    caption = subject if not colour else captions.with_background(subject, colour)
    rgb = _rgb(colour or "white")
    return Scene(caption, (Layer(row, square),), Backdrop(rgb, rgb), size)


def _rgb(name: str) -> tuple[float, float, float]:
    red, green, blue = captions.COLOURS[name]
    return red / 255, green / 255, blue / 255


def _hue_rgb(word: str) -> tuple[float, float, float]:
    from lab.scenes.hues import HUES

    red, green, blue = HUES[word]
    return red / 255, green / 255, blue / 255
