"""Decodes and encodes large pictures by a VAE in overlapping tiles, so that its memory does not grow with them.

Tiles and their blending are those of diffusers' `AutoencoderKL.enable_tiling`, with tiles of the model's native size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.finite import finite_rows

if TYPE_CHECKING:
    from contract.card import Size
    from pipeline.families.family import ImageModel

OVERLAP = 0.25  # of two neighbouring tiles

Compute = Callable[[Tensor], Tensor]
Decode = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Decodes latents [B, C, h, w] to levels, uint8 [B, H, W, 3], and bool [B]: which pictures were finite before that."""


def in_tiles(x: Tensor, compute: Compute, side: int, out_side: int, finish: Compute = lambda tile: tile) -> Tensor:
    """Apply `compute` to a large x [B, h, w, C], tile by tile: [B, H, W, D].

    A tile of x has `side` elements along each side, and its result `out_side`. Where tiles overlap the results are
    mixed linearly. `finish` is applied to each blended tile, element by element; only its results are kept.
    """
    stride, extent = int(side * (1 - OVERLAP)), int(out_side * OVERLAP)
    rows, above = [], list[Tensor]()  # the lowest `extent` lines of the tiles above
    for top in range(0, x.shape[1], stride):
        row, below, before = [], list[Tensor](), None
        for column, left in enumerate(range(0, x.shape[2], stride)):
            tile = compute(x[:, top : top + side, left : left + side])
            if above:
                tile = _blend(above[column], tile, extent, 1)
            if before is not None:
                tile = _blend(before, tile, extent, 2)
            below.append(tile[:, out_side - extent : out_side].clone())
            before = tile[:, :, out_side - extent : out_side].clone()
            # A copy: `compute` may use its memory again.
            row.append(finish(tile[:, : out_side - extent, : out_side - extent]).clone())
        rows.append(torch.cat(row, dim=2))
        above = below
    return torch.cat(rows, dim=1)


def _blend(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """Return the tile, whose first elements along this side fade in over the last of the tile before it."""
    count = min(before.shape[dim], tile.shape[dim], extent)
    if not count:
        return tile
    shape = [count if at == dim else 1 for at in range(tile.dim())]
    share = (torch.arange(count, device=tile.device) / count).to(tile.dtype).view(shape)
    first = tile.narrow(dim, 0, count)
    faded = before.narrow(dim, before.shape[dim] - count, count) * (1 - share) + first * share
    return torch.cat([faded, tile.narrow(dim, count, tile.shape[dim] - count)], dim=dim)


def tile_side(model: ImageModel, size: Size) -> int:
    """Return the side in pixels of the tiles in which a picture of this size is decoded; 0: it is not divided."""
    side = model.native // model.vae_scale * model.vae_scale
    return side if size[0] * size[1] > model.tiled_above and max(size) > side else 0


def decoder(model: ImageModel, decode: Compute, finish: Compute) -> Decode:
    """Return the function of latents [B, C, h, w] to `finish(decode(…))`, [B, H, W, 3], of large pictures in tiles, and
    bool [B]: which pictures `decode` made of finite numbers alone.

    `decode` turns latents into pixels [B, H, W, 3].
    """
    scale = model.vae_scale

    def run(latents: Tensor) -> tuple[Tensor, Tensor]:
        side = tile_side(model, (scale * latents.shape[3], scale * latents.shape[2]))
        if not side:
            pixels = decode(latents)
            return finish(pixels), finite_rows(pixels)

        def decode_tile(tile: Tensor) -> Tensor:
            return decode(tile.permute(0, 3, 1, 2).contiguous())

        images, flags = [], []
        for x in latents.permute(0, 2, 3, 1).split(1):
            parts: list[Tensor] = []
            images.append(in_tiles(x, decode_tile, side // scale, side, _observed(finish, parts)))
            flags.append(torch.stack(parts).all(0))
        return torch.cat(images), torch.cat(flags)

    return run


def _observed(finish: Compute, flags: list[Tensor]) -> Compute:
    """Return `finish`, which also notes of each tile which rows are finite."""

    def run(tile: Tensor) -> Tensor:
        flags.append(finite_rows(tile))
        return finish(tile)

    return run


def posterior(model: ImageModel, pixels: Tensor) -> Any:
    """Return the VAE's posterior of pixels [B, 3, H, W] in [-1, 1], of large pictures in tiles."""
    side = tile_side(model, (pixels.shape[3], pixels.shape[2]))
    if not side:
        return model.vae.encode(pixels, return_dict=False)[0]
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    def moments(tile: Tensor) -> Tensor:
        parameters: Tensor = model.vae.encode(tile.permute(0, 3, 1, 2), return_dict=False)[0].parameters
        return parameters.permute(0, 2, 3, 1)

    blended = in_tiles(pixels.permute(0, 2, 3, 1), moments, side, side // model.vae_scale)
    return DiagonalGaussianDistribution(blended.permute(0, 3, 1, 2).contiguous())
