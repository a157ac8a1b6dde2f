"""Draws scenes in batches on any device, from sprites kept as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lab.scenes import emoji, hues
from lab.training.layout import MOST
from lab.training.scenes import Scene

_COLUMNS = 5  # of a layer: row, x, y, side, colour


@dataclass(frozen=True)
class PackedScenes:
    """Scenes of one size as tensors, so that they cross processes and reach a device in a few copies.

    `layers` float32 [B, MOST, 5]: picture's row (-1 where there is none), centre and side in pixels, number of the hue
    word (-1 unpainted). `backdrops` float32 [B, 8]: two colours and a direction, (0, 0) from the middle outwards.
    `flags` bool [B, 2]: sticker, enlarged. `time_ids` float32 [B, 6].
    """

    layers: Tensor
    backdrops: Tensor
    flags: Tensor
    time_ids: Tensor
    size: tuple[int, int]

    def to(self, device: torch.device) -> PackedScenes:
        """Return the scenes on `device`."""
        parts = (self.layers, self.backdrops, self.flags, self.time_ids)
        layers, backdrops, flags, times = (part.to(device, non_blocking=True) for part in parts)
        return PackedScenes(layers, backdrops, flags, times, self.size)


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    """Row numbers on `device`. From memory that is not pinned they would wait for all that the device has queued."""
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def pack(scenes: list[Scene]) -> PackedScenes:
    """Raises `ValueError` where sizes differ."""
    size = scenes[0].size
    if any(scene.size != size for scene in scenes):
        raise ValueError("scenes of one batch have one size")
    layers = np.full((len(scenes), MOST, _COLUMNS), -1, dtype=np.float32)
    backdrops = np.empty((len(scenes), 8), dtype=np.float32)
    for number, scene in enumerate(scenes):
        for place, layer in enumerate(scene.layers):
            colour = -1 if layer.colour is None else hues.WORDS.index(layer.colour)
            layers[number, place] = (layer.row, *layer.square, colour)
        drop = scene.backdrop
        backdrops[number] = (*drop.start, *drop.end, *(drop.direction or (0.0, 0.0)))
    flags = np.array([(scene.sticker, scene.enlarged) for scene in scenes])
    times = np.array([scene.time_ids for scene in scenes], dtype=np.float32)
    tensors = [torch.from_numpy(part) for part in (layers, backdrops, flags, times)]
    return PackedScenes(tensors[0], tensors[1], tensors[2], tensors[3], size)


class Renderer:
    """Holds premultiplied sprites uint8 [N, 4, S, S] on a device and draws scenes of them."""

    def __init__(self, sprites: Tensor, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._sprites = sprites.to(self.device)
        self._mean = torch.cat([hues.mean_luma(part.float() / 255) for part in self._sprites.split(256)])
        self._palette = hues.palette(self.device)

    @torch.no_grad()
    def draw(self, scenes: PackedScenes) -> Tensor:
        """Pixels [B, 3, H, W] in -1..1. Works in float32 whatever autocast says."""
        with torch.autocast(self.device.type, enabled=False):
            count = (scenes.layers[..., 0] >= 0).sum(1)  # on the host: choosing rows must not wait for the device
            moved = scenes.to(self.device)
            canvas = _backdrops(moved.backdrops, scenes.size)
            for place in range(int(count.max())):
                rows = _sent((count > place).nonzero()[:, 0], self.device)
                canvas[rows] = self._lay(canvas[rows], moved.layers[rows, place], moved.flags[rows, 0])
            return _enlarge(canvas, scenes.flags[:, 1]) * 2 - 1

    def _lay(self, canvas: Tensor, layer: Tensor, sticker: Tensor) -> Tensor:
        """Lay one sprite on each of `canvas` [n, 3, H, W] in 0..1."""
        row = layer[:, 0].long()
        sprite = self._sprites[row].float() / 255
        painted = hues.tint(sprite, self._mean[row], self._palette[layer[:, 4].long().clamp(min=0)])
        sprite = torch.where((layer[:, 4] >= 0)[:, None, None, None], painted, sprite)
        height, width = canvas.shape[-2:]
        length = sprite.shape[-1]
        down = resampling(layer[:, 2], layer[:, 3], height, length)
        across = resampling(layer[:, 1], layer[:, 3], width, length)
        sprite_layer = down[:, None] @ sprite @ across[:, None].mT
        return over(canvas, sprite_layer, sticker)


def images_of(renderer: Renderer, scenes: Sequence[Scene], chunk: int = 256) -> list[Image.Image]:
    """Scenes of one size as images, drawn `chunk` at a time."""
    parts = (scenes[start : start + chunk] for start in range(0, len(scenes), chunk))
    return [image for part in parts for image in emoji.to_images(renderer.draw(pack(list(part))))]


def over(canvas: Tensor, layer: Tensor, sticker: Tensor) -> Tensor:
    """Lay premultiplied `layer` [n, 4, H, W] on `canvas` [n, 3, H, W], with a white outline where `sticker` [n] is."""
    outline = halo(layer[:, 3:]) * sticker[:, None, None, None]
    canvas = canvas + (1 - canvas) * outline
    return layer[:, :3] + (1 - layer[:, 3:]) * canvas


def halo(alpha: Tensor) -> Tensor:
    """`alpha` [n, 1, H, W] grown by about a fortieth of the shorter side."""
    reach = max(1, min(alpha.shape[-2:]) // 48)
    # A square grown, then rounded by averaging: a disc is not worth its cost.
    grown = F.max_pool2d(alpha, 2 * reach + 1, stride=1, padding=reach)
    return F.avg_pool2d(F.pad(grown, (1, 1, 1, 1), mode="replicate"), 3, stride=1)


def resampling(centre: Tensor, side: Tensor, length: int, source: int) -> Tensor:
    """Weights [n, length, source] that resize `source` pixels to `side` [n] around `centre` [n], both in pixels.

    Shrinking averages over each pixel's area, enlarging interpolates linearly; what lies outside weighs nothing.
    """
    pixel = torch.arange(length, device=centre.device, dtype=centre.dtype)
    scale = (source / side)[:, None]
    start = (pixel[None] - (centre - side / 2)[:, None]) * scale  # where each pixel begins in the source
    cell = torch.arange(source, device=centre.device, dtype=centre.dtype)
    first, last = start[..., None], (start + scale)[..., None]
    area = (torch.minimum(last, cell + 1) - torch.maximum(first, cell)).clamp(min=0) / scale[..., None]
    middle = (start + scale / 2 - 0.5)[..., None]
    linear = (1 - (middle - cell).abs()).clamp(min=0)
    return torch.where(scale[..., None] >= 1, area, linear)


def _backdrops(flags: Tensor, size: tuple[int, int]) -> Tensor:
    """Gradients [B, 3, H, W] in 0..1 of packed backdrops [B, 8]."""
    width, height = size
    x = (torch.arange(width, device=flags.device) + 0.5) / width * 2 - 1
    y = (torch.arange(height, device=flags.device) + 0.5) / height * 2 - 1
    dx, dy = flags[:, 6, None, None], flags[:, 7, None, None]
    along = (dx * x[None, None] + dy * y[None, :, None]) / (dx.abs() + dy.abs()).clamp(min=1e-6) / 2 + 0.5
    around = ((x[None, None].square() + y[None, :, None].square()) / 2).sqrt().expand_as(along)
    share = torch.where((dx == 0) & (dy == 0), around, along)[:, None]
    start, end = flags[:, :3, None, None], flags[:, 3:6, None, None]
    return start + (end - start) * share


def _enlarge(canvas: Tensor, which: Tensor) -> Tensor:
    """Halves and doubles again those of [B, 3, H, W] that `which` [B], on the host, says."""
    rows = _sent(which.nonzero()[:, 0], canvas.device)
    if len(rows):
        canvas[rows] = F.interpolate(F.avg_pool2d(canvas[rows], 2), scale_factor=2.0, mode="bilinear")
    return canvas
