"""SDXL's UNet rebuilt on fused layers: tokens and NHWC share one memory, nothing is permuted, nothing is concatenated.

Takes its weights from a diffusers UNet. What the up path concatenates is written side by side in the first place: each
skip connection's producer and each up layer write their own channels of one buffer. Knows SDXL's blocks; does not know
kernels (`layers.py`) nor clocks (`unet.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.h200.layers import Conv, Gated, Layer, Linear, Norm, Precision, UpConv, attend, for_layer


class Resnet:
    """GroupNorm, SiLU, convolution, time embedding, GroupNorm, SiLU, convolution, shortcut."""

    def __init__(self, precision: Precision, block: Any) -> None:
        self.norm1, self.norm2 = Norm(precision, block.norm1, True), Norm(precision, block.norm2, True)
        self.conv1, self.conv2 = Conv(precision, block.conv1), Conv(precision, block.conv2)
        shortcut = block.conv_shortcut
        self.shortcut = None if shortcut is None else shortcut.weight.detach().flatten(1).to(precision.base)
        self.shortcut_bias = None if shortcut is None else shortcut.bias.detach().to(precision.base)
        self.out_channels = block.conv1.out_channels
        self.time: slice | None = None  # its part of the time projections of all resnets

    def __call__(self, x: Tensor, times: Tensor | None, out: Tensor | None = None) -> Tensor:
        row_bias = None if self.time is None or times is None else times[:, self.time]
        y = self.conv1(self.norm1(x, self.conv1), row_bias)
        if self.shortcut is not None:
            x = F.linear(x.flatten(0, 2), self.shortcut, self.shortcut_bias).view(*x.shape[:3], -1)
        return self.conv2(self.norm2(y, self.conv2), None, x, out)


class Block:
    """Self-attention, cross-attention, gated feed-forward; cross-attention's keys and values are given."""

    def __init__(self, precision: Precision, block: Any) -> None:
        def linear(*layers: Any) -> Linear:
            bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
            return Linear(precision, torch.cat([layer.weight.detach() for layer in layers]), bias)

        self.precision = precision
        self.norms = [Norm(precision, norm) for norm in (block.norm1, block.norm2, block.norm3)]
        own, cross = block.attn1, block.attn2
        self.qkv, self.own_out = linear(own.to_q, own.to_k, own.to_v), linear(own.to_out[0])
        self.query, self.cross_out = linear(cross.to_q), linear(cross.to_out[0])
        self.key_value = torch.cat([cross.to_k.weight, cross.to_v.weight]).detach().to(precision.base)
        gate, self.down = block.ff.net[0].proj, linear(block.ff.net[2])
        self.gate = Gated(precision, gate.weight.detach(), gate.bias.detach())

    def __call__(self, x: Tensor, images: int, keys_values: Tensor) -> Tensor:
        """x [M, C] tokens of all images; keys_values [images, 77, 2, heads, 64]."""
        p = self.precision
        qkv = self.qkv(self.norms[0](x, self.qkv)).view(images, -1, 3, x.shape[1] // 64, 64)
        x = self.own_out(attend(p, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], self.own_out), x)
        q = self.query(self.norms[1](x, self.query)).view(images, -1, x.shape[1] // 64, 64)
        x = self.cross_out(attend(p, q, keys_values[:, :, 0], keys_values[:, :, 1], self.cross_out), x)
        return self.down(self.gate(self.norms[2](x, self.gate), self.down), x)


class Transformer:
    def __init__(self, precision: Precision, model: Any) -> None:
        self.norm = Norm(precision, model.norm)
        self.enter = Linear(precision, model.proj_in.weight.detach(), model.proj_in.bias.detach())
        self.leave = Linear(precision, model.proj_out.weight.detach(), model.proj_out.bias.detach())
        self.blocks = [Block(precision, block) for block in model.transformer_blocks]
        self.context: slice = slice(0)  # its blocks' part of the keys and values of all

    def __call__(self, x: Tensor, keys_values: list[Tensor], out: Tensor | None = None) -> Tensor:
        tokens = self.enter(self.norm(x, self.enter).flatten(0, 2))
        for block, one in zip(self.blocks, keys_values[self.context], strict=True):
            tokens = block(tokens, x.shape[0], one)
        to = None if out is None else out.flatten(0, 2)
        return self.leave(for_layer(self.leave.precision, tokens, self.leave), x.flatten(0, 2), to).view(x.shape)


class FusedUNet:
    """SDXL's UNet at fixed shapes. `features` of the last deep forward stay in its buffers for `shallow`."""

    def __init__(self, unet: Any, base: torch.dtype = torch.bfloat16) -> None:
        self.precision = p = Precision(base)
        self.source = unet
        self.conv_in, self.conv_out = unet.conv_in, unet.conv_out
        self.norm_out = Norm(p, unet.conv_norm_out, True)
        self.resnets: list[Resnet] = []
        self.transformers: list[Transformer] = []
        self.down = [self._stage(b, getattr(b, "downsamplers", None)) for b in unet.down_blocks]
        self.mid = self._stage(unet.mid_block, None)
        self.up = [self._stage(b, getattr(b, "upsamplers", None)) for b in unet.up_blocks]
        sources = [r for b in (*unet.down_blocks, unet.mid_block, *unet.up_blocks) for r in b.resnets]
        self.time_weight = torch.cat([r.time_emb_proj.weight.detach() for r in sources]).to(base)
        self.time_bias = torch.cat([r.time_emb_proj.bias.detach() for r in sources]).to(base)
        at = 0
        for resnet in self.resnets:
            resnet.time = slice(at, at + resnet.out_channels)
            at += resnet.out_channels
        at = 0
        for transformer in self.transformers:
            transformer.context = slice(at, at + len(transformer.blocks))
            at += len(transformer.blocks)
        self.buffers: dict[tuple[int, int, int], list[Tensor]] = {}

    def _stage(self, block: Any, samplers: Any) -> tuple[list[Resnet], list[Transformer], Conv | None]:
        resnets = [Resnet(self.precision, r) for r in block.resnets]
        transformers = [Transformer(self.precision, a) for a in getattr(block, "attentions", None) or []]
        self.resnets += resnets
        self.transformers += transformers
        sampler = None
        if samplers:
            kind = UpConv if "Up" in type(samplers[0]).__name__ else Conv
            sampler = kind(self.precision, samplers[0].conv)
        return resnets, transformers, sampler

    def layers(self) -> list[Layer]:
        found: list[Layer] = [c for r in self.resnets for c in (r.conv1, r.conv2)]
        found += [s for _, _, s in (*self.down, *self.up) if s is not None]
        for t in self.transformers:
            found += [t.enter, t.leave]
            for b in t.blocks:
                found += [b.qkv, b.own_out, b.query, b.cross_out, b.gate, b.down]
        return found

    def contexts(self, text: Tensor) -> list[Tensor]:
        """Every cross-attention's keys and values [B, 77, 2, heads, 64] of text [B, 77, 2048]: once per request."""
        blocks = [b for t in self.transformers for b in t.blocks]
        return [F.linear(text, b.key_value).view(*text.shape[:2], 2, -1, 64) for b in blocks]

    def times(self, timestep: Tensor, pooled: Tensor, time_ids: Tensor) -> Tensor:
        """Time projections [B, sum of channels] of all resnets, fp32."""
        u = self.source
        emb = u.time_embedding(u.time_proj(timestep).to(self.precision.base))
        ids = u.add_time_proj(time_ids.flatten()).reshape(pooled.shape[0], -1).to(self.precision.base)
        emb = emb + u.add_embedding(torch.cat([pooled, ids], dim=-1))
        return F.linear(F.silu(emb), self.time_weight, self.time_bias).float()

    def _wide(self, rows: int, height: int, width: int) -> list[Tensor]:
        """The up path's concatenations, first to last: [.., hidden | skip]."""
        key = (rows, height, width)
        if key not in self.buffers:
            widths, hidden = [], self.mid[0][-1].out_channels
            skips = self._skips()
            for level, (resnets, _, _) in enumerate(self.up):
                shift = len(self.up) - 1 - level
                for resnet in resnets:
                    widths.append((hidden + skips.pop(), shift))
                    hidden = resnet.out_channels
            like = self.time_weight
            self.buffers[key] = [like.new_empty((rows, height >> s, width >> s, c)) for c, s in widths]
        return self.buffers[key]

    def _skips(self) -> list[int]:
        channels = [self.conv_in.out_channels]
        for resnets, _, sampler in self.down:
            channels += [r.out_channels for r in resnets]
            if sampler is not None:
                channels.append(resnets[-1].out_channels)
        return channels

    def _first(self, latents: Tensor) -> Tensor:
        x = latents.to(self.precision.base).contiguous(memory_format=torch.channels_last)
        y: Tensor = self.conv_in(x).permute(0, 2, 3, 1)
        return y

    def _head(self, x: Tensor) -> Tensor:
        noise: Tensor = self.conv_out(self.norm_out(x, None).permute(0, 3, 1, 2))
        return noise

    def forward(self, latents: Tensor, times: Tensor, contexts: list[Tensor]) -> Tensor:
        """The whole UNet: latents [B, 4, H, W], `times`, `contexts` → noise [B, 4, H, W]."""
        wide = self._wide(latents.shape[0], *latents.shape[2:])
        skips = self._skips()
        slots = [w[..., w.shape[3] - c :] for w, c in zip(reversed(wide), skips, strict=True)]
        x = slots[0].copy_(self._first(latents))
        slot = iter(slots[1:])
        for resnets, transformers, sampler in self.down:
            for i, resnet in enumerate(resnets):
                if transformers:
                    x = transformers[i](resnet(x, times), contexts, next(slot))
                else:
                    x = resnet(x, times, next(slot))
            if sampler is not None:
                x = sampler(for_layer(self.precision, x, sampler), out=next(slot))
        resnets, transformers, _ = self.mid
        x = transformers[0](resnets[0](x, times), contexts)
        x = resnets[1](x, times, wide[0][..., : resnets[1].out_channels])
        return self._up(0, 0, times, contexts, wide)

    def shallow(self, latents: Tensor, times: Tensor) -> Tensor:
        """DeepCache: fresh conv_in, the last up block on the cached features of the last deep forward, and the head."""
        wide = self._wide(latents.shape[0], *latents.shape[2:])
        last = wide[-1]
        last[..., last.shape[3] - self.conv_in.out_channels :].copy_(self._first(latents))
        return self._up(len(self.up) - 1, len(wide) - len(self.up[-1][0]), times, [], wide)

    def _up(self, level: int, at: int, times: Tensor, contexts: list[Tensor], wide: list[Tensor]) -> Tensor:
        x = wide[at]
        for resnets, transformers, sampler in self.up[level:]:
            for i, resnet in enumerate(resnets):
                at += 1
                last_here = i + 1 == len(resnets)
                to = wide[at][..., : resnet.out_channels] if at < len(wide) and not (last_here and sampler) else None
                x = resnet(wide[at - 1], times, None if transformers else to)
                if transformers:
                    x = transformers[i](x, contexts, to)
            if sampler is not None:
                sampler(for_layer(self.precision, x, sampler), out=wide[at][..., : sampler.weight.shape[0]])
        return self._head(x)
