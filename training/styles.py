"""Styles of whole batches of pictures, which LoRAs learn: pixel art, and pencil on paper."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.scenes import hues

# Of pixel art: a block's side in pixels (a latent's), and each channel's levels: the 216 web colours
BLOCK, LEVELS = 8, 6
_PAPER, _GRAPHITE = (0.97, 0.95, 0.90), (0.16, 0.16, 0.19)
_GAIN, _SHADE = 1.8, 0.30  # how dark an edge gets by its gradient, and a black surface by its darkness


def mosaic(pixels: Tensor) -> Tensor:
    """Pixel art of pixels [B, 3, H, W] in -1..1: blocks of `BLOCK`, of few colours."""
    small = F.avg_pool2d(pixels.float(), BLOCK, ceil_mode=True, count_include_pad=False)
    few = ((small + 1) / 2 * (LEVELS - 1)).round() / (LEVELS - 1) * 2 - 1
    height, width = pixels.shape[-2:]
    return few.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[..., :height, :width]


def pencil(pixels: Tensor) -> Tensor:
    """A pencil drawing of pixels [B, 3, H, W] in -1..1: their edges in graphite on paper, lightly shaded, without
    colours. An edge is where any of the three channels changes.
    """
    grey = (pixels.float() + 1) / 2
    padded = F.pad(grey, (1, 1, 1, 1), mode="replicate")
    rows = (padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]) / 4
    columns = (padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]) / 4
    slope = ((rows[..., 2:] - rows[..., :-2]).square() + (columns[..., 2:, :] - columns[..., :-2, :]).square()).sqrt()
    ink = torch.maximum(_GAIN * slope.amax(1), _SHADE * (1 - hues.luma(grey))).clamp(0, 1)[:, None]
    channels = [paper + (graphite - paper) * ink for paper, graphite in zip(_PAPER, _GRAPHITE, strict=True)]
    return torch.cat(channels, 1) * 2 - 1


STYLES: dict[str, Callable[[Tensor], Tensor]] = {"mosaic": mosaic, "pencil": pencil}
"""By the names of their LoRAs."""
