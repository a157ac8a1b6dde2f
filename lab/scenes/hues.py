"""Colours of subjects: eight hue words, painting a sprite in one of them, and naming the hue of pixels."""

from __future__ import annotations

import torch
from torch import Tensor

HUES: dict[str, tuple[int, int, int]] = {
    "red": (216, 36, 36),
    "orange": (246, 130, 20),
    "yellow": (250, 214, 40),
    "green": (44, 160, 68),
    "turquoise": (24, 182, 176),
    "blue": (38, 90, 226),
    "purple": (134, 54, 190),
    "pink": (242, 104, 176),
}
"""The colour at the middle of each word's shades, RGB in 0..255."""
WORDS = tuple(HUES)

# Where a word's hues end, in degrees; the first is red's end, and red begins where pink ends.
_ENDS = torch.tensor([15.0, 41.0, 66.0, 158.0, 198.0, 252.0, 303.0, 345.0])
_PALE, _VIVID = 0.10, 0.22  # chroma (max - min) at which a pixel begins to count as coloured, and counts whole
_DARK = 0.35  # share of the colour that the darkest shade keeps
_CLEAR = 0.30  # chroma from which a pixel's hue is named


def chroma(rgb: Tensor) -> Tensor:
    """max - min of straight RGB [..., 3, H, W] in 0..1: [..., H, W]."""
    return rgb.amax(-3) - rgb.amin(-3)


def coloured(rgb: Tensor) -> Tensor:
    """The degree to which each pixel of [..., 3, H, W] is coloured and not grey, 0..1."""
    return ((chroma(rgb) - _PALE) / (_VIVID - _PALE)).clamp(0, 1)


def luma(rgb: Tensor) -> Tensor:
    """Rec. 601 luma of [..., 3, H, W]: [..., H, W]."""
    return 0.299 * rgb[..., 0, :, :] + 0.587 * rgb[..., 1, :, :] + 0.114 * rgb[..., 2, :, :]


def mean_luma(sprites: Tensor) -> Tensor:
    """Mean luma of the coloured pixels of premultiplied sprites [N, 4, H, W] in 0..1: [N]; 0.5 where none is."""
    alpha = sprites[:, 3]
    straight = sprites[:, :3] / alpha.clamp(min=1e-3)[:, None]
    weight = alpha * coloured(straight)
    total = weight.sum((1, 2))
    mean = (weight * luma(straight)).sum((1, 2)) / total.clamp(min=1e-3)
    return torch.where(total > 1, mean, torch.full_like(mean, 0.5)).clamp(min=0.08)


def tint(sprites: Tensor, mean: Tensor, colours: Tensor) -> Tensor:
    """Paints the coloured pixels of premultiplied sprites [N, 4, H, W] in shades of RGB `colours` [N, 3] in 0..1.

    A pixel as bright as `mean` [N] takes the colour itself, darker ones its shades, brighter ones its tints: all have
    the colour's hue. Grey pixels (outlines, eyes, highlights) stay.
    """
    alpha = sprites[:, 3:]
    straight = sprites[:, :3] / alpha.clamp(min=1e-3)
    ratio = (luma(straight) / mean[:, None, None])[:, None]
    base = colours[:, :, None, None]
    shade = base * (_DARK + (1 - _DARK) * ratio.clamp(max=1))
    painted = shade + (1 - base) * (0.5 * (ratio - 1)).clamp(0, 0.5)
    mask = coloured(straight)[:, None]
    return torch.cat([(straight + (painted - straight) * mask) * alpha, alpha], dim=1)


def palette(device: torch.device | str = "cpu") -> Tensor:
    """The words' colours [8, 3] in 0..1."""
    return torch.tensor([HUES[word] for word in WORDS], device=device) / 255


def hue(rgb: Tensor) -> Tensor:
    """Hue in degrees, 0..360, of RGB [..., 3] in 0..1."""
    r, g, b = rgb.unbind(-1)
    maximum, minimum = rgb.amax(-1), rgb.amin(-1)
    span = (maximum - minimum).clamp(min=1e-6)
    angle = torch.where(
        maximum == r, ((g - b) / span) % 6, torch.where(maximum == g, (b - r) / span + 2, (r - g) / span + 4)
    )
    return angle * 60


def hue_name(rgb: Tensor) -> Tensor:
    """Number in `WORDS` of the hue of RGB [..., 3] in 0..1."""
    return torch.bucketize(hue(rgb), _ENDS.to(rgb.device)) % len(WORDS)


def shares(rgb: Tensor, weight: Tensor) -> Tensor:
    """Share of each word [8] among the clearly coloured of pixels [P, 3] in 0..1, weighted by `weight` [P].

    All zeros where less than a tenth of the weight is clearly coloured.
    """
    clear = weight * ((rgb.amax(-1) - rgb.amin(-1)) > _CLEAR)
    total = clear.sum()
    if float(total) < 0.1 * float(weight.sum()) or float(total) == 0:
        return torch.zeros(len(WORDS))
    return torch.zeros(len(WORDS)).scatter_add_(0, hue_name(rgb).cpu(), (clear / total).cpu())
