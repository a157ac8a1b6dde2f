"""Ranks all known sprites by how much one place of a picture looks like each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.scenes import hues

_SIDE = 28  # pixels of a sprite as it was matched
_KERNEL = 36  # of a sprite with what surrounds it
_SHIFT = 3  # pixels by which a sprite may lie elsewhere
_WINDOW = _KERNEL + 2 * _SHIFT
_SCALES = (0.9, 1.0, 1.1)
_CHUNK = 128


class Gallery:
    """Premultiplied sprites uint8 [N, 4, S, S] of which `paintable` [N] may have other colours, on their device."""

    def __init__(self, sprites: Tensor, paintable: Tensor) -> None:
        self._sprites, self._paintable = sprites, paintable
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def scores(
        self, stands_out: Tensor, ground: Tensor, centre: tuple[float, float], side: float, variant: int
    ) -> Tensor:
        """The best cosine [N] of every sprite near `centre` (x, y) at about `side` pixels.

        Sprites are taken as they are and, where `variant` is not 0, painted in that word of `hues.WORDS` too.
        `stands_out` and `ground` are [3, H, W], see `composition`.
        """
        window = _window(stands_out, centre, side)
        middle = _window(ground, centre, side)[:, _WINDOW // 2, _WINDOW // 2]
        every = torch.arange(len(self._sprites), device=window.device)
        best = self._against(window, middle, 0, every)
        if variant:
            painted = every[self._paintable]
            best[painted] = torch.maximum(best[painted], self._against(window, middle, variant, painted))
        return best

    def _against(self, window: Tensor, ground: Tensor, variant: int, which: Tensor) -> Tensor:
        """Cosines [n] of the sprites `which` [n]: the best over scales and shifts."""
        colour, alpha, mask = (part[which] if len(which) < len(part) else part for part in self._kernels(variant))
        shifted = F.unfold(window[None], _KERNEL)[0]  # [3 K K, shifts]
        energy = mask.flatten(0, 1) @ F.unfold(window.square().sum(0)[None, None], _KERNEL)[0]  # [n scales, shifts]
        added = (colour - ground[:, None] * alpha[:, :, None]).flatten(2).flatten(0, 1)
        sprite_energy = added.square().sum(1, keepdim=True).clamp(min=1e-2)
        cosine = added @ shifted / (sprite_energy * torch.maximum(energy, 0.2 * sprite_energy)).sqrt()
        return cosine.view(len(colour), -1).amax(1)

    def _kernels(self, variant: int) -> tuple[Tensor, Tensor, Tensor]:
        """Colours [N, scales, 3, K K], alphas and masks [N, scales, K K], in one variant."""
        if variant not in self._kept:
            parts = [self._scaled(part, variant) for part in self._sprites.split(_CHUNK)]
            colour, alpha, mask = (torch.cat(part) for part in zip(*parts, strict=True))
            self._kept[variant] = colour, alpha, mask
        return self._kept[variant]

    @staticmethod
    def _scaled(sprites: Tensor, variant: int) -> tuple[Tensor, Tensor, Tensor]:
        pixels = sprites.float() / 255
        if variant:
            pixels = F.interpolate(pixels, size=2 * _SIDE, mode="area")
            base = hues.palette(pixels.device)[variant - 1].expand(len(pixels), 3)
            pixels = hues.tint(pixels, hues.mean_luma(pixels), base)
        scaled: list[Tensor] = []
        for scale in _SCALES:
            side = 2 * round(_SIDE * scale / 2)
            small = F.interpolate(pixels, size=side, mode="bilinear", antialias=True).clamp(0, 1)
            padded = F.pad(small, ((_KERNEL - side) // 2,) * 4)
            grown = (F.max_pool2d(padded[:, 3:], 3, 1, 1) > 0.05).float()
            scaled.append(torch.cat([padded, grown], 1).flatten(2))
        kernels = torch.stack(scaled, 1)
        return kernels[:, :, :3], kernels[:, :, 3], kernels[:, :, 4]


def _window(values: Tensor, centre: tuple[float, float], side: float) -> Tensor:
    """The surroundings of `centre` (x, y) in [3, H, W], scaled so that `side` is `_SIDE`: [3, _WINDOW, _WINDOW]."""
    height, width = values.shape[-2:]
    scale = side / _SIDE
    steps = (torch.arange(_WINDOW, device=values.device) - _WINDOW // 2 + 0.5) * scale
    x = (centre[0] + steps) / width * 2 - 1
    y = (centre[1] + steps) / height * 2 - 1
    if scale > 1.2:  # an average first, that the sampling misses nothing
        reach = round(scale) | 1
        values = F.avg_pool2d(values[None], reach, 1, reach // 2, count_include_pad=False)[0]
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)
    return F.grid_sample(values[None], grid[None], padding_mode="zeros", align_corners=False)[0]
