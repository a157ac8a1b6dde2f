"""The decoder of a tiny autoencoder, written down once in the layout of diffusers' AutoencoderTiny.

Bohan's TAESD (2023): convolutions and ReLU alone, distilled from a VAE's decoder.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from core.ops.ops import Lowering, Ops, bind
from unet_opt.layout import check_tiny_decoder

A = TypeVar("A")


def decode(ops: Ops[A], decoder: Any, z: A) -> A:
    """Decode clamped latents [B, h, w, C] to pixels [B, H, W, 3] in about [0, 1]."""
    h = ops.conv(z, decoder.layers[0], act="relu")
    doubles = False
    for layer in decoder.layers[2:]:
        if isinstance(layer, nn.Upsample):
            doubles = True
        elif isinstance(layer, nn.Conv2d):
            h, doubles = ops.upsample(h, layer) if doubles else ops.conv(h, layer), False
        else:
            h = _block(ops, layer.conv, h)
    return h


def _block(ops: Ops[A], convs: Any, x: A) -> A:
    """Run an AutoencoderTinyBlock: three convolutions around a residual."""
    h = ops.conv(ops.conv(x, convs[0], act="relu"), convs[2], act="relu")
    return ops.conv(h, convs[4], residual=x, act="relu")


class TinyDecoder:
    """The decoder on any lowering."""

    def __init__(self, lowering: Lowering, vae: Any) -> None:
        """Build it on a lowering. Raises ValueError for a decoder of an unsupported layout or layer."""
        check_tiny_decoder(vae)
        self.vae, self.lowering = vae, lowering
        walk = bind(decode, vae.decoder)
        lowering.prepare(walk, (1, 1, 1, vae.config.latent_channels))
        self._decode = lowering.lower(walk, "vae-tiny")

    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, h, w] as the denoiser leaves them, to pixels [B, H, W, 3] in about [-1, 1].

        Raises ValueError for another number of channels.
        """
        channels = self.vae.config.latent_channels
        if latents.shape[1] != channels:
            raise ValueError(f"vae-tiny: latents have {latents.shape[1]} channels, not {channels}")
        clamped = torch.tanh(latents / 3) * 3  # in the type that they come in
        pixels = self._decode(clamped.to(self.lowering.dtype).permute(0, 2, 3, 1).contiguous())[0]
        return pixels.mul(2).sub(1)
