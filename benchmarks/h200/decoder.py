"""SDXL's VAE decoder rebuilt on fused layers: NHWC from latents to pixels, convolutions in bf16 or 8 bits.

Takes its weights from a diffusers AutoencoderKL. Knows the decoder's blocks; does not know kernels nor clocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.h200.layers import Layer, Norm, Precision, UpConv, for_layer
from benchmarks.h200.network import Resnet


class FusedDecoder:
    """Latents [B, 4, h, w] (as the UNet leaves them) → pictures [B, 3, 8h, 8w], 0…1, in the base type."""

    def __init__(self, vae: Any, base: torch.dtype = torch.bfloat16) -> None:
        self.precision = p = Precision(base)
        self.scaling = vae.config.scaling_factor
        self.enter, self.conv_in, self.conv_out = vae.post_quant_conv, vae.decoder.conv_in, vae.decoder.conv_out
        mid = vae.decoder.mid_block
        self.first, self.second = (Resnet(p, r) for r in mid.resnets)
        attention = mid.attentions[0]
        self.norm = Norm(p, attention.group_norm)
        parts = (attention.to_q, attention.to_k, attention.to_v)
        self.qkv = torch.cat([part.weight.detach() for part in parts]).to(base)
        self.qkv_bias = torch.cat([part.bias.detach() for part in parts]).to(base)
        self.out = attention.to_out[0]
        self.stages = [
            ([Resnet(p, r) for r in b.resnets], UpConv(p, b.upsamplers[0].conv) if b.upsamplers else None)
            for b in vae.decoder.up_blocks
        ]
        self.norm_out = Norm(p, vae.decoder.conv_norm_out, True)

    def layers(self) -> list[Layer]:
        resnets = [self.first, self.second, *(r for stage, _ in self.stages for r in stage)]
        found: list[Layer] = [c for r in resnets for c in (r.conv1, r.conv2)]
        return found + [up for _, up in self.stages if up is not None]

    def _attend(self, x: Tensor) -> Tensor:
        """One head of all channels: scores of one picture at a time, since they take 2·(h·w)² bytes."""
        qkv = F.linear(self.norm(x, None).flatten(1, 2), self.qkv, self.qkv_bias)
        q, k, v = qkv.chunk(3, dim=-1)
        scale = 1.0 / math.sqrt(q.shape[-1])
        y = torch.stack([((q[i] * scale) @ k[i].t()).softmax(-1) @ v[i] for i in range(x.shape[0])])
        return x + F.linear(y, self.out.weight, self.out.bias).view(x.shape)

    def forward(self, latents: Tensor) -> Tensor:
        x = (latents / self.scaling).to(self.precision.base).contiguous(memory_format=torch.channels_last)
        x = self.conv_in(self.enter(x)).permute(0, 2, 3, 1)
        x = self.second(self._attend(self.first(x, None)), None)
        for resnets, up in self.stages:
            for resnet in resnets:
                x = resnet(x, None)
            if up is not None:
                x = up(for_layer(self.precision, x, up))
        y: Tensor = self.conv_out(self.norm_out(x, None).permute(0, 3, 1, 2))
        return (y * 0.5 + 0.5).clamp(0.0, 1.0)
