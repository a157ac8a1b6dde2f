"""Splits an SDXL UNet into two callables over its own modules: `deep` runs all of it, `shallow` only its end, on
features of `deep`.

DeepCache (Ma et al., 2023) in the variant of NVIDIA's MLPerf v4.0 submission: a shallow step computes conv_in, the last
up block (or only its last residual block) and the head anew; that block's input from below, and the skips of all but
conv_in, are features of the last deep step. Supports diffusers' UNet2DConditionModel, quantized or not.
`unet_opt.program` has the same two for CPU kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from contract.plan import BLOCK

Features = tuple[Tensor, ...]
"""Maps with a row for each of the forward's: what shallow steps of every depth read (see `kept`)."""


def kept(features: Sequence[Tensor], depth: str) -> Features:
    """Of all that `deep` returns, what a shallow step of this depth reads.

    `deep` returns n + 1 maps for n residual blocks in the last up block: the first one's input, the skips of all but
    the last, and the last one's input.
    """
    return tuple(features[:-1]) if depth == BLOCK else (features[-1],)


def shapes(unet: Any, depth: str, height: int, width: int) -> list[tuple[int, int, int]]:
    """(channels, height, width) of each map that a shallow step of this depth reads, for latents of this size."""
    widths = [resnet.conv1.in_channels for resnet in unet.up_blocks[-1].resnets]
    out = [resnet.out_channels for resnet in unet.up_blocks[-1].resnets]
    into = [widths[0] - _skip_widths(unet)[0], *out[:-1]]
    channels = [into[0], *_skip_widths(unet)[:-1]] if depth == BLOCK else [into[-1]]
    return [(count, height, width) for count in channels]


def _skip_widths(unet: Any) -> list[int]:
    """Channels of the skips that the last up block reads, in its order; the last is conv_in's."""
    first = unet.down_blocks[0]
    widths = [unet.conv_in.out_channels, *(resnet.out_channels for resnet in first.resnets)]
    return widths[::-1][: len(unet.up_blocks[-1].resnets)]


class SplitUNet:
    """The two callables. They share the UNet's weights, and `deep` computes what the UNet itself computes."""

    def __init__(self, unet: Any) -> None:
        """Raises ValueError for a UNet whose last up block does not read conv_in's skip last, as SDXL's does."""
        last, first = unet.up_blocks[-1], unet.down_blocks[0]
        if len(last.resnets) != len(first.resnets) + 1 or (last.upsamplers or ()):
            raise ValueError("unet: its last up block does not mirror its first down block, so it cannot be split")
        self.unet = unet

    def deep(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...]:
        """As the UNet itself; its output [B, C, h, w] is followed by the features, [B, channels, h, w] each."""
        unet = self.unet
        emb, x = self._start(sample, timestep, encoder_hidden_states, timestep_cond, added_cond_kwargs)
        skips: tuple[Tensor, ...] = (x,)
        for block in unet.down_blocks:
            x, made = block(hidden_states=x, temb=emb, **_text(block, encoder_hidden_states))
            skips += made
        x = unet.mid_block(x, emb, **_text(unet.mid_block, encoder_hidden_states))
        for block in unet.up_blocks[:-1]:
            count = len(block.resnets)
            own, skips = skips[-count:], skips[:-count]
            text = _text(block, encoder_hidden_states)
            # Sides that do not halve evenly are restored to the next skip's size.
            x = block(hidden_states=x, temb=emb, res_hidden_states_tuple=own, upsample_size=skips[-1].shape[2:], **text)
        waiting = list(skips[::-1])
        eps, inputs = self._end(x, waiting, emb, encoder_hidden_states)
        return (eps, x, *waiting[:-1], inputs[-1])

    def shallow(
        self,
        depth: str,
        features: Features,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """The UNet's output [B, C, h, w] from `kept` features of an earlier deep step."""
        emb, x = self._start(sample, timestep, encoder_hidden_states, timestep_cond, added_cond_kwargs)
        eps, _ = self._end(features[0], [*features[1:], x], emb, encoder_hidden_states)
        return (eps,)

    def _start(
        self,
        sample: Tensor,
        timestep: Tensor,
        text: Tensor,
        timestep_cond: Tensor | None,
        added: dict[str, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The embedding of time, size and pooled text, and conv_in's output."""
        unet = self.unet
        emb = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=timestep), timestep_cond)
        emb = emb + unet.get_aug_embed(emb=emb, encoder_hidden_states=text, added_cond_kwargs=added)
        if unet.time_embed_act is not None:
            emb = unet.time_embed_act(emb)
        return emb, unet.conv_in(sample)

    def _end(self, x: Tensor, skips: Sequence[Tensor], emb: Tensor, text: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The last up block from where so many skips are left, and the head; and the input of each of its parts."""
        unet, block, inputs = self.unet, self.unet.up_blocks[-1], []
        attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
        count = len(skips)
        for resnet, attention, skip in zip(block.resnets[-count:], attentions[-count:], skips, strict=True):
            inputs.append(x)
            x = resnet(torch.cat([x, skip], dim=1), emb)
            if attention is not None:
                x = attention(x, encoder_hidden_states=text, return_dict=False)[0]
        if unet.conv_norm_out:
            x = unet.conv_act(unet.conv_norm_out(x))
        return unet.conv_out(x), inputs


def _text(block: Any, hidden: Tensor) -> dict[str, Tensor]:
    return {"encoder_hidden_states": hidden} if getattr(block, "has_cross_attention", False) else {}
