"""The decoder of SDXL's VAE, written down once, in the layout of diffusers' AutoencoderKL.

Scaling of latents and rounding of pixels are the caller's.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from core.ops.ops import Lowering, Ops, bind
from unet_opt.layout import check_decoder
from unet_opt.unet import attention, resnet

A = TypeVar("A")


def decode(ops: Ops[A], vae: Any, z: A) -> A:
    """Decode latents [B, h, w, C] as the decoder reads them, to pixels [B, H, W, 3] in about [-1, 1]."""
    decoder = vae.decoder
    if getattr(vae, "post_quant_conv", None) is not None:
        z = ops.linear(z, vae.post_quant_conv)
    h = _middle(ops, decoder.mid_block, ops.conv(z, decoder.conv_in))
    for block in decoder.up_blocks:
        for resnet_ in block.resnets:
            h = resnet(ops, resnet_, h)
        for sampler in block.upsamplers or ():
            h = ops.upsample(h, sampler.conv)
    return _head(ops, decoder, h)


def _middle(ops: Ops[A], block: Any, h: A) -> A:
    """Run a UNetMidBlock2D: residual blocks around attention over all pixels, if it has any."""
    h = resnet(ops, block.resnets[0], h)
    for attn, resnet_ in zip(block.attentions, block.resnets[1:], strict=True):
        if attn is not None:
            h = attention(ops, attn, h, ops.group_norm(h, attn.group_norm, to=(attn.to_q, attn.to_k, attn.to_v)))
        h = resnet(ops, resnet_, h)
    return h


def _head(ops: Ops[A], coder: Any, h: A) -> A:
    h = ops.group_norm(h, coder.conv_norm_out, silu=True, to=(coder.conv_out,))
    return ops.conv(h, coder.conv_out)


class VaeDecoder:
    """The decoder on any lowering."""

    def __init__(self, lowering: Lowering, vae: Any) -> None:
        """Build it on a lowering. Raises ValueError for a decoder of an unsupported layout or layer."""
        check_decoder(vae, head_multiple=lowering.head_multiple)
        self.vae, self.lowering = vae, lowering
        walk = bind(decode, vae)
        lowering.prepare(walk, (1, 1, 1, vae.config.latent_channels))
        self._decode = lowering.lower(walk, "vae")

    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, h, w] as the decoder reads them, to pixels [B, H, W, 3] in about [-1, 1].

        Raises ValueError for another number of channels.
        """
        channels = self.vae.config.latent_channels
        if latents.shape[1] != channels:
            raise ValueError(f"vae: latents have {latents.shape[1]} channels, not {channels}")
        return self._decode(latents.to(self.lowering.dtype).permute(0, 2, 3, 1).contiguous())[0]
