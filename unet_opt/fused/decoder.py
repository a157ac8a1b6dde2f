"""A VAE's decoder on fused layers: NHWC from latents to pixels.

Takes its weights from a diffusers AutoencoderKL, quantized or not. Scaling of latents and rounding of pixels are the
caller's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unet_opt.decoder import check
from unet_opt.fused.layers import Norm, UpConv, for_layer
from unet_opt.fused.network import Resnet


class FusedDecoder:
    """Latents [B, C, h, w] as the decoder reads them → pixels [B, H, W, 3] in about [-1, 1], in the base type."""

    def __init__(self, vae: Any) -> None:
        """Raises ValueError for a decoder without SDXL's layout."""
        check(vae)
        decoder = vae.decoder
        self.base: torch.dtype = decoder.conv_in.weight.dtype
        self._enter = getattr(vae, "post_quant_conv", None)
        self._conv_in, self._conv_out = decoder.conv_in, decoder.conv_out
        self._first = Resnet(decoder.mid_block.resnets[0], self.base)
        self._rest = [
            (None if attention is None else _Attention(attention, self.base), Resnet(resnet, self.base))
            for attention, resnet in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True)
        ]
        self._stages = [
            (
                [Resnet(r, self.base) for r in block.resnets],
                UpConv(block.upsamplers[0].conv, self.base) if block.upsamplers else None,
            )
            for block in decoder.up_blocks
        ]
        self._norm_out = Norm(decoder.conv_norm_out, self.base, silu=True)

    def __call__(self, latents: Tensor) -> Tensor:
        x = latents.to(self.base).contiguous(memory_format=torch.channels_last)
        x = x if self._enter is None else self._enter(x)
        x = self._first(self._conv_in(x).permute(0, 2, 3, 1), None)
        for attention, resnet in self._rest:
            x = resnet(x if attention is None else attention(x), None)
        for resnets, up in self._stages:
            for resnet in resnets:
                x = resnet(x, None)
            if up is not None:
                x = up(for_layer(x, up))
        y: Tensor = self._conv_out(self._norm_out(x, None).permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1)


class _Attention:
    """One head of all channels: scores of one image at a time, since they take 2·(h·w)² bytes."""

    def __init__(self, attention: Any, base: torch.dtype) -> None:
        if attention.heads != 1:
            raise ValueError("vae: the attention of its middle has several heads")
        self._norm = Norm(attention.group_norm, base)
        parts = (attention.to_q, attention.to_k, attention.to_v)
        self._qkv = torch.cat([part.weight.detach() for part in parts]).to(base)
        self._bias = torch.cat([part.bias.detach() for part in parts]).to(base)
        self._out = attention.to_out[0]

    def __call__(self, x: Tensor) -> Tensor:
        qkv = F.linear(self._norm(x, None).flatten(1, 2), self._qkv, self._bias)
        q, k, v = qkv.chunk(3, dim=-1)
        scale = 1.0 / math.sqrt(q.shape[-1])
        y = torch.stack([((q[i] * scale) @ k[i].t()).softmax(-1) @ v[i] for i in range(x.shape[0])])
        return x + F.linear(y, self._out.weight, self._out.bias).view(x.shape)
