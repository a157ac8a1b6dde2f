"""Checks what a picture shows against what its prompt asks for: subject, count, colour and place.

The categories are GenEval's (Ghosh et al., 2023); where GenEval has a detector, sprites are matched here: the cosine
between what stands out from the background and a sprite on that background, over all places and sizes. What is found
must look like its subject more than like any other that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from evaluation import bootstrap
from evaluation.bootstrap import Interval
from lab.scenes import hues
from lab.scenes.gallery import Gallery
from lab.scenes.truth import SceneItem, Truth

FOUND = 0.70  # cosine from which a sprite is there
_HIDDEN = 0.60  # the same for what stands behind another, over what is seen of it
_EQUAL = 0.82  # share of the best match's cosine that another of the same things must reach
_SMALLEST, _LARGEST, _STEP = 0.17, 1.0, 1.09  # sides looked for, as shares of the picture's shorter one
_SAME_SIDE = 1.34  # ratio of sides up to which two matches are of one size
_TIE = 0.01  # by how much another sprite may look more like a match
_MOST = 8  # matches of one thing that are counted


class Match(NamedTuple):
    """A sprite found: cosine, centre and side in pixels, and its colour (0: unpainted, else 1 + number in `WORDS`)."""

    score: float
    x: float
    y: float
    side: float
    variant: int


@dataclass(frozen=True)
class Verdict:
    """The parts that are right; None where the prompt does not ask. `score` is the lowest of the best cosines."""

    subject: bool
    count: bool | None
    colour: bool | None
    place: bool | None
    score: float

    @property
    def right(self) -> bool:
        """Return whether all that is asked is right."""
        return all(part is not False for part in (self.subject, self.count, self.colour, self.place))


@dataclass(frozen=True)
class Sprite:
    """A subject's picture: premultiplied uint8 [4, S, S], and whether it may be painted."""

    pixels: Tensor
    paintable: bool = True


class Checker:
    """Finds `sprites`, by noun, in pictures; computes on `device`."""

    def __init__(self, sprites: dict[str, Sprite], device: torch.device | str = "cpu") -> None:
        self._sprites = sprites
        self._device = torch.device(device)
        self._places = {noun: place for place, noun in enumerate(sprites)}
        self._gallery = Gallery(
            torch.stack([sprite.pixels for sprite in sprites.values()]).to(self._device),
            torch.tensor([sprite.paintable for sprite in sprites.values()], device=self._device),
        )

    @torch.inference_mode()
    def check(self, picture: Tensor, truth: Truth) -> Verdict:
        """The verdict on a picture [3, H, W] in 0..1. Raises `KeyError` for a subject without a sprite."""
        seen = _Seen(picture.to(self._device).float())
        behind = {"behind": 0, "in front of": 1}.get(truth.relation or "")
        matches_of = self._all(seen, truth, behind)
        levels = [_HIDDEN if place == behind else FOUND for place in range(len(matches_of))]
        best = [matches[0].score if matches else 0.0 for matches in matches_of]
        subject = all(score >= level for score, level in zip(best, levels, strict=True))
        alike = [self._alike(matches, level) for matches, level in zip(matches_of, levels, strict=True)]
        count = self._counted(truth, alike)
        colours = [self._coloured(seen, item, m) for item, m in zip(truth.items, alike, strict=True) if item.colour]
        placed = subject and self._placed(truth, alike) if truth.relation not in (None, "and") else None
        if placed and behind is not None:
            placed = self._ordered(seen, truth, alike, behind)
        return Verdict(subject, count, all(colours) if colours else None, placed, min(best))

    def _all(self, seen: _Seen, truth: Truth, behind: int | None) -> list[list[Match]]:
        """The matches of every thing; the thing `behind` comes last, as what covers it says nothing about it."""
        matches_of: list[list[Match]] = [[] for _ in truth.items]
        for place in sorted(range(len(matches_of)), key=lambda place: place == behind):
            item = truth.items[place]
            if place == behind:  # of what is half hidden too little is seen to tell it from all others
                matches_of[place] = self._find(seen, item, truth.sticker, self._cover(seen, truth, matches_of, place))
            else:
                matches_of[place] = self._its_own(seen, item, self._find(seen, item, truth.sticker, None))
        return matches_of

    @staticmethod
    def _counted(truth: Truth, matches_of: list[list[Match]]) -> bool | None:
        """Return whether there are as many of each thing as asked; None where one of each is."""
        if all(item.count == 1 for item in truth.items):
            return None
        return all(len(matches) == item.count for matches, item in zip(matches_of, truth.items, strict=True))

    def _find(self, seen: _Seen, item: SceneItem, sticker: bool, cover: Tensor | None) -> list[Match]:
        """All matches of a thing, best first; where a colour is asked it may have any."""
        variants = self._variants(item)
        best: Tensor | None = None
        for side in sides(seen.height, seen.width):
            scores = seen.match(_resized(variants, side), sticker, cover)  # [V, H, W]
            score, variant = scores.max(0)
            now = torch.stack([score, torch.full_like(score, side), variant.float()])
            best = now if best is None else torch.where(score > best[0], now, best)
        assert best is not None
        return _peaks(best)

    def _its_own(self, seen: _Seen, item: SceneItem, matches: list[Match]) -> list[Match]:
        """The matches above `FOUND` that look like no other subject more."""
        own_matches = []
        for match in matches:
            if match.score < FOUND:
                break
            scores = self._gallery.scores(seen.stands_out, seen.ground, (match.x, match.y), match.side, match.variant)
            if float(scores[self._places[item.subject]]) >= float(scores.max()) - _TIE:
                own_matches.append(match)
        return own_matches

    def _variants(self, item: SceneItem) -> Tensor:
        """Sprites [V, 4, S, S] in 0..1: as it is, and in all eight colours where one is asked."""
        sprites = self._sprites[item.subject]
        sprite = sprites.pixels.to(self._device).float()[None] / 255
        if not (item.colour and sprites.paintable):
            return sprite
        painted = hues.tint(
            sprite.expand(len(hues.WORDS), -1, -1, -1),
            hues.mean_luma(sprite).expand(len(hues.WORDS)),
            hues.palette(self._device),
        )
        return torch.cat([sprite, painted])

    def _alpha(self, seen: _Seen, item: SceneItem, match: Match) -> Tensor:
        """The area of the picture that a match covers, [H, W]."""
        return self._placed_sprite(seen, item, match)[3]

    def _placed_sprite(self, seen: _Seen, item: SceneItem, match: Match) -> Tensor:
        sprite = _resized(self._variants(item)[match.variant][None], round(match.side))[0]
        canvas = torch.zeros(4, seen.height, seen.width, device=self._device)
        side = sprite.shape[-1]
        top, left = round(match.y - side / 2), round(match.x - side / 2)
        y0, x0, y1, x1 = max(0, top), max(0, left), min(seen.height, top + side), min(seen.width, left + side)
        canvas[:, y0:y1, x0:x1] = sprite[:, y0 - top : y1 - top, x0 - left : x1 - left]
        return canvas

    def _cover(self, seen: _Seen, truth: Truth, matches_of: list[list[Match]], behind: int) -> Tensor | None:
        """The area that stays visible beside the thing in front, [H, W] of 0 and 1."""
        other = 1 - behind
        if not matches_of[other] or matches_of[other][0].score < FOUND:
            return None
        alpha = self._alpha(seen, truth.items[other], matches_of[other][0])
        grown = F.max_pool2d(alpha[None, None], 5 if truth.sticker else 3, 1, 2 if truth.sticker else 1)[0, 0]
        return (grown < 0.1).float()

    @staticmethod
    def _alike(matches: list[Match], level: float) -> list[Match]:
        if not matches:
            return []
        best = matches[0]
        return [
            match
            for match in matches
            if match.score >= max(level, _EQUAL * best.score)
            and max(match.side, best.side) <= _SAME_SIDE * min(match.side, best.side)
        ]

    def _coloured(self, seen: _Seen, item: SceneItem, matches: list[Match]) -> bool:
        """Return whether most of the sprite's coloured part has the hue asked for, in enough of the best matches."""
        for match in matches[: item.count]:
            plain = self._placed_sprite(seen, SceneItem(item.subject), match._replace(variant=0))
            straight = plain[:3] / plain[3:].clamp(min=1e-3)
            weight = (plain[3] > 0.9).float() * hues.coloured(straight)
            shares = hues.shares(seen.picture.flatten(1).T, weight.flatten())
            if hues.WORDS[int(shares.argmax())] != item.colour or float(shares.max()) < 0.5:
                return False
        return bool(matches)

    @staticmethod
    def _placed(truth: Truth, matches_of: list[list[Match]]) -> bool:
        """Return whether the centres of the things' matches stand as the relation says."""
        best = [part[: item.count] for part, item in zip(matches_of, truth.items, strict=True)]
        centres = [(sum(m.x for m in part) / len(part), sum(m.y for m in part) / len(part)) for part in best]
        if truth.relation == "row":
            return all(b[0] - a[0] > abs(b[1] - a[1]) for a, b in pairwise(centres))
        (x0, y0), (x1, y1) = centres
        across, down = x1 - x0, y1 - y0
        match truth.relation:
            case "left of":
                return across > abs(down)
            case "right of":
                return -across > abs(down)
            case "above":
                return down > abs(across)
            case "below":
                return -down > abs(across)
            case "beside":
                return abs(across) > abs(down)
        reach = (matches_of[0][0].side + matches_of[1][0].side) / 2
        return math.hypot(across, down) < reach

    def _ordered(self, seen: _Seen, truth: Truth, matches_of: list[list[Match]], behind: int) -> bool:
        """Return whether the picture shows the front thing where both would be."""
        layers = [self._placed_sprite(seen, item, m[0]) for item, m in zip(truth.items, matches_of, strict=True)]
        both = (layers[0][3] > 0.9) & (layers[1][3] > 0.9)
        if not bool(both.any()):
            return False
        errors = [(seen.picture - layer[:3])[:, both].square().mean() for layer in layers]
        return bool(errors[1 - behind] < errors[behind])


class _Seen:
    """A picture [3, H, W] in 0..1, its background, and what stands out from it."""

    def __init__(self, picture: Tensor) -> None:
        self.picture = picture
        self.height, self.width = picture.shape[-2:]
        self.ground = background(picture)
        self.stands_out = picture - self.ground
        self._padded = (0, 0)
        self._spectra: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def match(self, sprites: Tensor, sticker: bool, visible: Tensor | None) -> Tensor:
        """Cosines [V, H, W] of premultiplied sprites [V, 4, s, s] centred at every pixel, over `visible` alone."""
        if sticker:
            sprites = _outlined(sprites)
        side = sprites.shape[-1]
        colour, alpha = sprites[:, :3], sprites[:, 3]
        ring = 2 * max(1, round(side / 24)) + 1
        mask = (F.max_pool2d(alpha[:1, None], ring, 1, ring // 2) > 0.05).float()[0]  # alike in all variants
        # Nothing may wrap around; sizes of few prime factors transform fastest.
        self._padded = (-(-(self.height + side) // 32) * 32, -(-(self.width + side) // 32) * 32)
        seen, squares = self._whole() if visible is None else self._both(self.stands_out * visible)
        energy = self._slide(squares, mask)  # [1, H, W]
        # What a sprite adds to the background: colour - alpha * ground, the ground being that at the centre.
        with_colour = self._correlate((seen * self._of(colour).conj()).sum(1), side)
        with_alpha = self._correlate(seen * self._of(alpha[:1]).conj(), side)  # [3, H, W]
        product = with_colour - (self.ground * with_alpha).sum(0)
        variance = self._own(colour, alpha, visible).clamp(min=1e-2)
        # Where hardly anything stands out there is nothing to compare, but rounding.
        return product / (variance * torch.maximum(energy, 0.2 * variance)).sqrt()

    def _own(self, colour: Tensor, alpha: Tensor, visible: Tensor | None) -> Tensor:
        """Energy [V, H, W] of sprites on the ground at every place, over what is visible."""
        ground = self.ground
        if visible is None:
            square = colour.square().sum((1, 2, 3))[:, None, None]
            cross = (alpha[:, None] * colour).sum((2, 3))
            flat = alpha[:1].square().sum()
            mixed = torch.einsum("vc,chw->vhw", cross, ground)
            return square - 2 * mixed + ground.square().sum(0) * flat
        seen = self._of(visible)
        square = self._slide(seen, colour.square().sum(1))
        cross = torch.stack([self._slide(seen, (alpha * colour[:, c])) for c in range(3)], 1)
        flat = self._slide(seen, alpha[:1].square())
        return square - 2 * (cross * ground).sum(1) + ground.square().sum(0) * flat

    def _both(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Spectra of what stands out [3, H, W] and of its energy."""
        return self._of(out), self._of(out.square().sum(0))

    def _whole(self) -> tuple[Tensor, Tensor]:
        """The sums of the whole picture, which sizes share."""
        if self._padded not in self._spectra:
            self._spectra[self._padded] = self._both(self.stands_out)
        return self._spectra[self._padded]

    def _of(self, sprite: Tensor) -> Tensor:
        response: Tensor = torch.fft.rfft2(sprite, s=self._padded)
        return response

    def _slide(self, spectrum: Tensor, kernel: Tensor) -> Tensor:
        return self._correlate(spectrum * self._of(kernel).conj(), kernel.shape[-1])

    def _correlate(self, product: Tensor, side: int) -> Tensor:
        """Correlation from its spectrum, indexed by the kernel's centre."""
        response: Tensor = torch.fft.irfft2(product, s=self._padded)
        return torch.roll(response, (side // 2, side // 2), (-2, -1))[..., : self.height, : self.width]


def background(picture: Tensor) -> Tensor:
    """A plane and a cone of colour [3, H, W] fitted to a picture [3, H, W] from its border inwards.

    Pixels that differ from the fit are left out of the next one, so that what stands on the background does not count.
    """
    height, width = picture.shape[-2:]
    y, x = torch.meshgrid(
        (torch.arange(height, device=picture.device) + 0.5) / height * 2 - 1,
        (torch.arange(width, device=picture.device) + 0.5) / width * 2 - 1,
        indexing="ij",
    )
    basis = torch.stack([torch.ones_like(x), x, y, ((x * x + y * y) / 2).sqrt()], -1).flatten(0, 1).double()
    values = picture.flatten(1).T.double()
    margin = 2
    border = torch.ones(height, width, dtype=torch.bool, device=picture.device)
    border[margin:-margin, margin:-margin] = False
    weight = border.flatten().double()
    plain = values[border.flatten()].median(0).values
    distance = (values - plain).abs().amax(1)
    for level in (0.5, 0.3, 0.15, 0.08, 0.04, 0.04, 0.04):
        # Cauchy weights: they do not forget far pixels at once, as gradients look far at first.
        near = 1 / (1 + (distance / level).square()) ** 2
        part = (weight * near)[:, None]
        gram = basis.T @ (part * basis) + 1e-6 * torch.eye(4, device=picture.device, dtype=torch.float64)
        fitted = basis @ torch.linalg.solve(gram, basis.T @ (part * values))
        distance = (values - fitted).abs().amax(1)
        weight = torch.where(border.flatten(), 1.0, 0.1).double() if level < 0.2 else weight
    colour: Tensor = fitted.T.reshape(3, height, width).float().clamp(0, 1)
    return colour


def sides(height: int, width: int) -> list[int]:
    """The sprites' sides that are looked for, in pixels."""
    short = min(height, width)
    steps = int(math.log(_LARGEST / _SMALLEST) / math.log(_STEP))
    return sorted({round(short * _LARGEST / _STEP**n) for n in range(steps + 1)})


def _resized(sprites: Tensor, side: int) -> Tensor:
    return F.interpolate(sprites, size=side, mode="bilinear", antialias=True).clamp(0, 1)


def _outlined(sprites: Tensor) -> Tensor:
    """Sprites with a white outline, as stickers have."""
    reach = max(1, round(sprites.shape[-1] / 24))
    sprites = F.pad(sprites, (reach,) * 4)
    grown = F.max_pool2d(sprites[:, 3:], 2 * reach + 1, 1, reach)
    white = (grown - sprites[:, 3:]).clamp(min=0)
    return torch.cat([sprites[:, :3] + white, grown], 1)


def _peaks(best: Tensor) -> list[Match]:
    """Local maxima of (score, side, variant) [3, H, W], best first; none lies within half a side of a better one."""
    score = best[0].clone()
    height, width = score.shape
    y, x = torch.meshgrid(
        torch.arange(height, device=score.device), torch.arange(width, device=score.device), indexing="ij"
    )
    peaks: list[Match] = []
    while len(peaks) < _MOST:
        place = int(score.argmax())
        row, column = divmod(place, width)
        value, side, variant = (float(part[row, column]) for part in (score, best[1], best[2]))
        if value <= 0.3:
            break
        peaks.append(Match(value, column + 0.5, row + 0.5, side, int(variant)))
        score[((x - column).square() + (y - row).square()).float().sqrt() < 0.55 * side] = -1.0
    return peaks


def summary(verdicts: Sequence[Verdict]) -> dict[str, Interval]:
    """The share that is right of each part and of the whole, over the prompts that ask for it, with 95% intervals."""
    intervals: dict[str, Interval] = {}
    columns = {part.name: [getattr(v, part.name) for v in verdicts] for part in fields(Verdict) if part.name != "score"}
    columns["all"] = [verdict.right for verdict in verdicts]
    for name, values in columns.items():
        applicable = [value for value in values if value is not None]
        if applicable:
            intervals[name] = bootstrap.share(sum(applicable), len(applicable))
    return intervals
