"""SDXL's UNet on fused layers: tokens and NHWC share one memory, without permutations or concatenations.

Takes its weights from a diffusers UNet, quantized or not. The up path's concatenations are written side by side in the
first place: each skip's producer and each up layer write their own channels of one buffer. A shallow step of DeepCache
(`unet_opt.deepcache`) fills the same buffers with features of an earlier deep one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.plan import BLOCK
from unet_opt.deepcache import Features
from unet_opt.fused.layers import GEGLU, Conv, Linear, Norm, UpConv, attend, for_layer
from unet_opt.program import check


class Resnet:
    """GroupNorm, SiLU, convolution, time embedding, GroupNorm, SiLU, convolution, shortcut."""

    def __init__(self, block: Any, base: torch.dtype) -> None:
        self.norm1, self.norm2 = Norm(block.norm1, base, silu=True), Norm(block.norm2, base, silu=True)
        self.conv1, self.conv2 = Conv(block.conv1, base), Conv(block.conv2, base)
        shortcut = block.conv_shortcut
        self.shortcut = None if shortcut is None else shortcut.weight.detach().flatten(1).to(base)
        self.shortcut_bias = None if shortcut is None or shortcut.bias is None else shortcut.bias.detach().to(base)
        self.out_channels = self.conv1.out_channels
        self.time: slice | None = None  # its part of the time projections of all resnets

    def __call__(self, x: Tensor, times: Tensor | None, out: Tensor | None = None) -> Tensor:
        row_bias = None if self.time is None or times is None else times[:, self.time]
        y = self.conv1(self.norm1(x, self.conv1), row_bias)
        if self.shortcut is not None:
            x = F.linear(x.flatten(0, 2), self.shortcut, self.shortcut_bias).view(*x.shape[:3], -1)
        return self.conv2(self.norm2(y, self.conv2), None, x, out)


class Block:
    """Self-attention, cross-attention, gated feed-forward; cross-attention's keys and values are inputs."""

    def __init__(self, block: Any, base: torch.dtype, kv_at: int) -> None:
        own, cross = block.attn1, block.attn2
        self.norms = [Norm(norm, base) for norm in (block.norm1, block.norm2, block.norm3)]
        self.qkv, self.own_out = Linear([own.to_q, own.to_k, own.to_v], base), Linear([own.to_out[0]], base)
        self.query, self.cross_out = Linear([cross.to_q], base), Linear([cross.to_out[0]], base)
        self.gate, self.down = GEGLU([block.ff.net[0].proj], base), Linear([block.ff.net[2]], base)
        self.heads, self.kv_at = own.heads, kv_at

    def __call__(self, x: Tensor, images: int, kv: Tensor) -> Tensor:
        """x [M, C] tokens of all images; kv [images, T, width], keys and values of all layers."""
        shape = (images, -1, self.heads, x.shape[1] // self.heads)
        qkv = self.qkv(self.norms[0](x, self.qkv)).view(images, -1, 3, *shape[2:])
        x = self.own_out(attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], self.own_out), x)
        q = self.query(self.norms[1](x, self.query)).view(shape)
        at, width = self.kv_at, x.shape[1]
        k = kv[..., at : at + width].unflatten(-1, shape[2:])
        v = kv[..., at + width : at + 2 * width].unflatten(-1, shape[2:])
        x = self.cross_out(attend(q, k, v, self.cross_out), x)
        return self.down(self.gate.gate(self.norms[2](x, self.gate), self.down), x)


class Transformer:
    def __init__(self, model: Any, base: torch.dtype, kv_at: dict[int, int]) -> None:
        self.norm = Norm(model.norm, base)
        self.enter, self.leave = Linear([model.proj_in], base), Linear([model.proj_out], base)
        self.blocks = [Block(block, base, kv_at[id(block.attn2)]) for block in model.transformer_blocks]

    def __call__(self, x: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        tokens = self.enter(self.norm(x, self.enter).flatten(0, 2))
        for block in self.blocks:
            tokens = block(tokens, x.shape[0], kv)
        to = None if out is None else out.flatten(0, 2)
        return self.leave(for_layer(tokens, self.leave), x.flatten(0, 2), to).view(x.shape)


class FusedUNet:
    """Runs a UNet at any number of rows, by one thread at a time; calls may be captured in CUDA graphs.

    Keys and values of cross-attention are given as `pipeline.denoise.PackedKeys` packs them.
    """

    def __init__(self, unet: Any, *, rows: int) -> None:
        """`rows` is the most that one call may have. Raises ValueError for a UNet without SDXL's layout."""
        check_layout(unet)
        self.unet, self._rows = unet, rows
        self.base: torch.dtype = unet.conv_in.weight.dtype
        self.kv_at: dict[int, int] = {}
        self.kv_width = 0
        projections: list[nn.Linear] = []
        for name in unet.attn_processors:
            attention = unet.get_submodule(name.removesuffix(".processor"))
            if attention.is_cross_attention:
                self.kv_at[id(attention)] = self.kv_width
                self.kv_width += 2 * attention.to_k.out_features
                projections += [attention.to_k, attention.to_v]
        self._keys = Linear(projections, self.base)
        self._norm_out = Norm(unet.conv_norm_out, self.base, silu=True)
        self._resnets: list[Resnet] = []
        self._down = [self._stage(b, getattr(b, "downsamplers", None)) for b in unet.down_blocks]
        self._mid = self._stage(unet.mid_block, None)
        self._up = [self._stage(b, getattr(b, "upsamplers", None)) for b in unet.up_blocks]
        sources = [r for b in (*unet.down_blocks, unet.mid_block, *unet.up_blocks) for r in b.resnets]
        self._time = Linear([r.time_emb_proj for r in sources], self.base)
        at = 0
        for resnet in self._resnets:
            resnet.time = slice(at, at + resnet.out_channels)
            at += resnet.out_channels
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}

    def _stage(self, block: Any, samplers: Any) -> tuple[list[Resnet], list[Transformer], Conv | None]:
        resnets = [Resnet(r, self.base) for r in block.resnets]
        attentions = getattr(block, "attentions", None) or []
        transformers = [Transformer(a, self.base, self.kv_at) for a in attentions]
        self._resnets += resnets
        sampler = None
        if samplers:
            kind = UpConv if "Up" in type(samplers[0]).__name__ else Conv
            sampler = kind(samplers[0].conv, self.base)
        return resnets, transformers, sampler

    def keys(self, hidden: Tensor) -> Tensor:
        """Keys and values of all cross-attention layers: [B, T, D] to [B, T, width], once per request."""
        return self._keys(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def __call__(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...]:
        """As `deepcache.SplitUNet.deep`, with packed keys and values [B, T, width] for hidden states.

        `sample` [B, C, h, w] to the model's output [B, C, h, w] and features [B, h, w, channels]. Features lie in
        buffers that the next call overwrites. Raises ValueError for more rows than there is room for.
        """
        assert not return_dict and added_cond_kwargs is not None
        times = self._times(sample, timestep, timestep_cond, added_cond_kwargs)
        kv, wide = encoder_hidden_states, self._wide(sample)
        slots = [w[..., w.shape[3] - c :] for w, c in zip(reversed(wide), self._skips(), strict=True)]
        x = slots[0].copy_(self._first(sample))
        slot = iter(slots[1:])
        for resnets, transformers, sampler in self._down:
            for i, resnet in enumerate(resnets):
                x = resnet(x, times, None if transformers else next(slot))
                if transformers:
                    x = transformers[i](x, kv, next(slot))
            if sampler is not None:
                x = sampler(for_layer(x, sampler), out=next(slot))
        resnets, transformers, _ = self._mid
        x = transformers[0](resnets[0](x, times), kv)
        resnets[1](x, times, wide[0][..., : resnets[1].out_channels])
        eps = self._rise(0, 0, times, kv, wide)
        return (eps, *self._features(wide))

    def shallow(
        self,
        depth: str,
        features: Features,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...]:
        """As `deepcache.SplitUNet.shallow`, with `kept` features [B, h, w, channels] of an earlier call."""
        assert not return_dict and added_cond_kwargs is not None
        times = self._times(sample, timestep, timestep_cond, added_cond_kwargs)
        wide = self._wide(sample)
        last = len(self._up[-1][0])
        found = self._features(wide)
        for slot, given in zip(found[:-1] if depth == BLOCK else found[-1:], features, strict=True):
            slot.copy_(given)
        head = wide[-1]
        head[..., head.shape[3] - self.unet.conv_in.out_channels :].copy_(self._first(sample))
        count = last if depth == BLOCK else 1
        return (self._rise(len(self._up) - 1, len(wide) - count, times, encoder_hidden_states, wide),)

    def _features(self, wide: Sequence[Tensor]) -> list[Tensor]:
        """The features for shallow steps, as parts of the buffers: `deepcache.kept` says which depth reads which."""
        last = wide[-len(self._up[-1][0]) :]
        skips = self._skips()[: len(last)][::-1]  # the first of all is conv_in's, which comes last
        into = [w[..., : w.shape[3] - c] for w, c in zip(last, skips, strict=True)]
        waiting = [w[..., w.shape[3] - c :] for w, c in zip(last[:-1], skips[:-1], strict=True)]
        return [into[0], *waiting, into[-1]]

    def _times(
        self, sample: Tensor, timestep: Tensor, timestep_cond: Tensor | None, added: dict[str, Tensor]
    ) -> Tensor:
        """Time projections [B, sum of channels] of all resnets, fp32."""
        u = self.unet
        emb = u.time_embedding(u.get_time_embed(sample=sample, timestep=timestep), timestep_cond)
        ids = u.add_time_proj(added["time_ids"].flatten()).reshape(sample.shape[0], -1)
        emb = emb + u.add_embedding(torch.cat([added["text_embeds"], ids.to(self.base)], dim=-1).to(self.base))
        return self._time(F.silu(emb)).float()

    def _wide(self, sample: Tensor) -> list[Tensor]:
        """The buffers of the up path's concatenations, first to last: [.., hidden | skip]. One memory for calls of all
        widths.
        """
        rows, _, height, width = sample.shape
        if rows > self._rows:
            raise ValueError(f"{rows} rows, and there is room for {self._rows}")
        multiple = 2 ** (len(self._up) - 1)
        if height % multiple or width % multiple:
            raise ValueError(f"a sample of {height}x{width} does not fit: sides that are multiples of {multiple} do")
        if (height, width) not in self._buffers:
            widths, hidden = [], self._mid[0][-1].out_channels
            skips = self._skips()
            for level, (resnets, _, _) in enumerate(self._up):
                shift = len(self._up) - 1 - level
                for resnet in resnets:
                    widths.append((hidden + skips.pop(), shift))
                    hidden = resnet.out_channels
            self._buffers[height, width] = [
                torch.empty(self._rows, height >> s, width >> s, c, dtype=self.base, device=sample.device)
                for c, s in widths
            ]
        return [buffer[:rows] for buffer in self._buffers[height, width]]

    def _skips(self) -> list[int]:
        channels = [self.unet.conv_in.out_channels]
        for resnets, _, sampler in self._down:
            channels += [r.out_channels for r in resnets]
            if sampler is not None:
                channels.append(resnets[-1].out_channels)
        return channels

    def _first(self, sample: Tensor) -> Tensor:
        x = sample.to(self.base).contiguous(memory_format=torch.channels_last)
        y: Tensor = self.unet.conv_in(x).permute(0, 2, 3, 1)
        return y

    def _head(self, x: Tensor) -> Tensor:
        noise: Tensor = self.unet.conv_out(self._norm_out(x, None).permute(0, 3, 1, 2))
        return noise

    def _rise(self, level: int, at: int, times: Tensor, kv: Tensor | None, wide: Sequence[Tensor]) -> Tensor:
        """The up path from the buffer `at` on, which is within the block `level`, and the head."""
        skipped = at - sum(len(resnets) for resnets, _, _ in self._up[:level])
        for i, (resnets, transformers, sampler) in enumerate(self._up[level:]):
            first = skipped if i == 0 else 0
            for j, resnet in enumerate(resnets[first:], first):
                at += 1
                last_here = j + 1 == len(resnets)
                to = wide[at][..., : resnet.out_channels] if at < len(wide) and not (last_here and sampler) else None
                x = resnet(wide[at - 1], times, None if transformers else to)
                if transformers:
                    assert kv is not None
                    x = transformers[j](x, kv, to)
            if sampler is not None:
                sampler(for_layer(x, sampler), out=wide[at][..., : sampler.out_channels])
        return self._head(x)


def check_layout(unet: Any) -> None:
    """Reject, by name, what these layers would compute differently from diffusers. Raises ValueError."""
    check(unet)
    if len(unet.mid_block.resnets) != 2 or len(unet.mid_block.attentions) != 1:
        raise ValueError("unet: its middle is not two residual blocks around one transformer")
    if getattr(unet.up_blocks[-1], "attentions", None):
        raise ValueError("unet: its last up block has attention, which SDXL's has not")
    for name, module in unet.named_modules():
        if type(module).__name__ == "BasicTransformerBlock" and type(module.ff.net[0]).__name__ != "GEGLU":
            raise ValueError(f"unet {name}: its feed-forward is not gated by GEGLU")
        if type(module).__name__ == "Transformer2DModel" and not module.use_linear_projection:
            raise ValueError(f"unet {name}: it is entered by convolutions, and SDXL's by linear layers")
        sampler = type(module).__name__ in ("Downsample2D", "Upsample2D") and getattr(module, "conv", None) is None
        if sampler:
            raise ValueError(f"unet {name}: has no convolution")
