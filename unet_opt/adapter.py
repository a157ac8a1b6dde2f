"""The T2I-Adapter of SDXL on torch: what it makes of a picture, once, which a UNet's down path adds in every step.

The layout is that of diffusers' T2IAdapter (Mou et al., 2023), whose modules compute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.ops.ops import Lowering
from unet_opt.inputs import map_of
from unet_opt.modules import UNet
from unet_opt.unet import adapter_shapes

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow makes pictures of one channel


class AdapterBranch:
    """A T2I-Adapter of a UNet."""

    text_width = 0
    kinds = 0

    def __init__(self, lowering: Lowering, net: Any, unet: UNet, scale: int) -> None:
        """Build it for a UNet whose latents stand for `scale` pixels a side. Raises ValueError for a misfit."""
        self.net, self.lowering, self.multiple = net, lowering, int(net.downscale_factor)
        side = 2 * self.multiple * 2 ** len(unet.down_blocks)
        self._channels = int(net.config.in_channels)
        if self._channels not in (1, 3):
            raise ValueError(f"adapter: in_channels is {self._channels}; supported are 1 and 3")
        expected = [(channels, side // scale >> halvings) for channels, halvings in adapter_shapes(unet)]
        with torch.inference_mode():
            actual = [(feature.shape[3], feature.shape[1]) for feature in self.features(torch.zeros(1, side, side, 3))]
        if actual != expected[: len(actual)] or not actual:
            raise ValueError(
                f"adapter: of {side} pixels it makes maps of (channels, side) {actual}, "
                f"the model's unet takes {expected}"
            )
        self.maps = adapter_shapes(unet)[: len(actual)]

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> list[Tensor]:
        """Return the maps that are added to the blocks', [1, h, w, C] each, of a picture [1, H, W, 3] in bytes."""
        first = next(self.net.parameters())
        image = pixels.float()
        if self._channels == 1:
            image = (image @ image.new_tensor(_LUMA)).round()[..., None]
        maps = self.net((image / 255).permute(0, 3, 1, 2).to(first.device, first.dtype))
        return [map_of(self.lowering, feature) for feature in maps]
