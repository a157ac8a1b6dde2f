"""SDXL's T2I-Adapter on torch: what it makes of a picture, once, which a UNet's down path adds in every step.

The layout is that of diffusers' T2IAdapter (Mou et al., 2023), whose modules compute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.ops.ops import Lowering
from unet_opt.inputs import map_of
from unet_opt.modules import UNet
from unet_opt.unet import adapted

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow makes pictures of one channel


class AdapterBranch:
    """A T2I-Adapter of a UNet's."""

    text_width = 0
    kinds = 0

    def __init__(self, lowering: Lowering, net: Any, unet: UNet, scale: int) -> None:
        """For this UNet, whose latents stand for `scale` pixels along a side. Raises ValueError, naming what does not
        fit.
        """
        self.net, self.lowering, self.multiple = net, lowering, int(net.downscale_factor)
        side = 2 * self.multiple * 2 ** len(unet.down_blocks)
        self._channels = int(net.config.in_channels)
        if self._channels not in (1, 3):
            raise ValueError(f"adapter: in_channels is {self._channels}; supported are 1 and 3")
        wanted = [(channels, side // scale >> halvings) for channels, halvings in adapted(unet)]
        with torch.inference_mode():
            found = [(made.shape[3], made.shape[1]) for made in self.features(torch.zeros(1, side, side, 3))]
        if found != wanted[: len(found)] or not found:
            raise ValueError(
                f"adapter: of {side} pixels it makes maps of (channels, side) {found}, the model's unet takes {wanted}"
            )
        self.maps = adapted(unet)[: len(found)]

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> list[Tensor]:
        """What is added to the blocks' maps, [1, h, w, C] each, of a picture [1, H, W, 3] in bytes."""
        first = next(self.net.parameters())
        shown = pixels.float()
        if self._channels == 1:
            shown = (shown @ shown.new_tensor(_LUMA)).round()[..., None]
        made = self.net((shown / 255).permute(0, 3, 1, 2).to(first.device, first.dtype))
        return [map_of(self.lowering, one) for one in made]
