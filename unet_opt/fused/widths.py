"""How many rows of a UNet's forward a device's measured tiles were found for (`core/kernels/cuda/tiles.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.kernels.cuda import tiles


def tuned_rows(unet: Any, height: int, width: int, device: str) -> int | None:
    """The most rows, of latents of this size, that all of the UNet's products on this device have a measured tile for.

    `device` is its name as CUDA gives it. Products that were measured at no width are left out; None where there is no
    other, as on a device without a table.
    """
    measured = tiles.table(device)
    found = []
    for kernel, columns, depth, positions in products(unet, height, width):
        rows = measured.get(kernel, {}).get(f"{columns},{depth}", {})
        if rows:
            found.append(max(map(int, rows)) // positions)
    return min(found, default=None)


def products(unet: Any, height: int, width: int) -> Iterator[tuple[str, int, int, int]]:
    """Each product of the fused UNet as tiles are looked up for it, with what one row of latents brings into it.

    Yields (kernel, columns N, depth K, positions of one row): tokens of linear layers, pixels of convolutions' output.
    """
    levels = len(unet.down_blocks)
    blocks = [
        *((level, block) for level, block in enumerate(unet.down_blocks)),
        (levels - 1, unet.mid_block),
        *((levels - 1 - index, block) for index, block in enumerate(unet.up_blocks)),
    ]

    def positions(level: int) -> int:
        return (height >> level) * (width >> level)

    for level, block in blocks:
        for resnet in block.resnets:
            for conv in (resnet.conv1, resnet.conv2):
                yield "conv", conv.out_channels, 9 * conv.in_channels, positions(level)
        for sampler in getattr(block, "downsamplers", None) or ():
            yield "conv", sampler.conv.out_channels, 9 * sampler.conv.in_channels, positions(level + 1)
        for sampler in getattr(block, "upsamplers", None) or ():
            yield "upsample", sampler.conv.out_channels, 4 * sampler.conv.in_channels, positions(level - 1)
        for transformer in getattr(block, "attentions", None) or ():
            for layer in transformer.transformer_blocks:
                wide, inner = layer.attn1.to_q.in_features, layer.ff.net[2].in_features
                for kernel, columns, depth in (
                    ("linear", 3 * wide, wide),
                    ("linear", wide, wide),
                    ("geglu", 2 * inner, wide),
                    ("linear", wide, inner),
                ):
                    yield kernel, columns, depth, positions(level)
