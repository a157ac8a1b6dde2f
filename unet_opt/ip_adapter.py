"""An IP-Adapter on torch: tokens of what a vision encoder sees in a picture, and their keys and values for a UNet.

The layout is that of Ye et al., 2023 (github.com/tencent-ailab/IP-Adapter), whose file holds a projection of images to
tokens, and for each cross-attention layer two projections of these beside the text's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unet_opt.modules import UNet
from unet_opt.unet import cross_attentions


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class IPAdapter:
    """An IP-Adapter, whose `projection` makes `tokens` tokens of an encoder's output with so many `channels`.

    That output is the projected embedding [B, channels] or, of `fine` ones (Plus), the hidden states behind the last
    layer but one, [B, patches, channels]. `layers` are to_k and to_v [n, D] of each cross-attention layer, in
    their order in the UNet and in the type of their file: they are read once for each picture.
    """

    projection: nn.Module
    layers: Sequence[tuple[Tensor, Tensor]]
    tokens: int
    channels: int
    fine: bool

    @property
    def width(self) -> int:
        """Return the channels of what `keys` returns: `SplitUNet.text_width`."""
        return sum(len(part) for pair in self.layers for part in pair)

    @property
    def size_bytes(self) -> int:
        projection_bytes = sum(parameter.nbytes for parameter in self.projection.parameters())
        return projection_bytes + sum(part.nbytes for pair in self.layers for part in pair)

    def project(self, seen: Tensor) -> Tensor:
        """Project an encoder's output to tokens [B, T, D]."""
        tokens: Tensor = self.projection(seen.float())
        return tokens

    def keys(self, tokens: Tensor, strength: float) -> Tensor:
        """Compute all layers' keys and values of tokens [R, T, D], [R, T, width] in fp32, packed as `unet.text_keys`.

        Values are times `strength`, which is what attention then gives of them.
        """
        return torch.cat(
            [part for k, v in self.layers for part in (tokens @ k.float().T, tokens @ v.float().T * strength)], dim=-1
        )


def layer_shapes(unet: UNet) -> list[tuple[int, int]]:
    """Return the shape of to_k and of to_v of each layer of this UNet's adapters."""
    return [(attn.inner_dim, attn.to_k.in_features) for attn in cross_attentions(unet)]
