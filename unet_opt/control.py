"""SDXL's ControlNet, written down once, and on any lowering: what it adds to the skips of a UNet, and to its middle.

The layout is that of diffusers' ControlNetModel (Zhang et al., 2023), whose modules hold the weights: the UNet's down
path and mid block, which read a picture's embedding beside the sample and end in 1×1 convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from core.ops.ops import Lowering, Ops, bind
from unet_opt import unet as network
from unet_opt.deepcache import added_of, input_shapes, lengths_of, map_of
from unet_opt.layout import check_control

A = TypeVar("A")
CHANNELS = 3  # of the picture that it reads


def residuals(ops: Ops[A], net: Any, sample: A, time: A, added: A, kv: A, hint: A) -> tuple[A, ...]:
    """What is added to each skip, in the order in which the down path makes them, and then to the mid block's output.

    `hint` [B, h, w, C] is added to what `conv_in` makes of the sample; the others are as for `unet.deep`.
    """
    times, text = network.embed_times(ops, net, time, added), network.read_text(ops, net, kv)
    skips = network.down(ops, net, ops.conv(sample, net.conv_in, residual=hint), times, text)
    h = network.middle(ops, net, skips[-1], times, text)
    made = zip(skips, net.controlnet_down_blocks, strict=True)
    return (*(ops.linear(skip, layer) for skip, layer in made), ops.linear(h, net.controlnet_mid_block))


class ControlBranch:
    """A ControlNet on a lowering. Keys and values of cross-attention are packed once for each prompt, as the UNet's."""

    def __init__(self, lowering: Lowering, net: Any, unet: Any, scale: int) -> None:
        """For this UNet, whose latents stand for `scale` pixels along a side. Raises ValueError, naming what does not
        fit.
        """
        check_control(net, unet, scale, head_multiple=lowering.head_multiple)
        self.net, self.lowering = net, lowering
        attentions = network.cross_attentions(net)
        self.text_width: int = sum(2 * attn.inner_dim for attn in attentions)
        walk, keys = bind(residuals, net), bind(network.text_keys, attentions)
        side = 2 ** (len(net.config.block_out_channels) - 1)
        hint = (1, side, side, net.conv_in.out_channels)
        lowering.prepare(walk, *input_shapes(net, side, side), hint, bound=3)
        lowering.prepare(keys, (1, 1, attentions[0].to_k.in_features))
        self._run = lowering.lower(walk, "control", bound=3)
        self._keys = lowering.lower(keys, "control, keys")

    def prepare_text(self, hidden: Tensor) -> Tensor:
        """Keys and values of all cross-attention layers: [B, T, D] to [B, T, width]."""
        return self._keys(hidden)[0]

    @torch.inference_mode()
    def hint(self, pixels: Tensor) -> Tensor:
        """The embedding of a picture [1, H, W, 3] in bytes: [1, h, w, C]. By torch, once for each picture."""
        first = self.net.controlnet_cond_embedding.conv_in.weight
        shown = pixels.to(first.device, first.dtype).permute(0, 3, 1, 2) / 255
        if self.net.config.controlnet_conditioning_channel_order == "bgr":
            shown = shown.flip(1)
        made: Tensor = self.net.controlnet_cond_embedding(shown)
        return map_of(self.lowering, made)

    def __call__(
        self, sample: Tensor, timestep: Tensor, added: Mapping[str, Tensor], given: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """`residuals` for rows of a UNet's step, [B, h, w, channels] each, which the next call may overwrite.

        `sample` [B, C, h, w] and `added` are as for the UNet. `given`: `kv` [B, T, width], with `kv_lengths` where
        their texts differ in length, and `hint` [B, h, w, C].
        """
        time = self.net.time_proj(timestep).to(self.lowering.dtype)
        wide = added_of(self.lowering, self.net, sample, added)
        lengths = lengths_of(given.get("kv_lengths"))
        return self._run(map_of(self.lowering, sample), time, wide, given["kv"], given["hint"], **lengths)
