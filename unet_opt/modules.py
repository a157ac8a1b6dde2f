"""The attributes that the walks read of diffusers' modules, which hold the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from core.ops.ops import Layer


class Attention(Protocol):
    """A self- or cross-attention layer."""

    to_q: Layer
    to_k: Layer
    to_v: Layer
    to_out: Sequence[Layer]
    heads: int
    inner_dim: int


class ResBlock(Protocol):
    """A ResnetBlock2D; `conv_shortcut` is a 1×1 convolution or None."""

    norm1: Layer
    conv1: Layer
    norm2: Layer
    conv2: Layer
    conv_shortcut: Layer
    time_emb_proj: Layer
    out_channels: int


class TransformerBlock(Protocol):
    """A BasicTransformerBlock: attention to itself and to the text, and a gated feed-forward."""

    attn1: Attention
    attn2: Attention
    norm1: Layer
    norm2: Layer
    norm3: Layer
    ff: Any


class Transformer(Protocol):
    """A Transformer2DModel."""

    norm: Layer
    proj_in: Layer
    proj_out: Layer
    transformer_blocks: Sequence[TransformerBlock]


class Level(Protocol):
    """A down, mid or up block. Some have no `attentions`; samplers are None where sides stay as they are."""

    resnets: Sequence[ResBlock]
    attentions: Sequence[Transformer | None]
    downsamplers: Sequence[Any] | None
    upsamplers: Sequence[Any] | None


class DownPath(Protocol):
    """The half that a UNet and a ControlNet share."""

    config: Any
    conv_in: Layer
    time_embedding: Any
    down_blocks: Sequence[Level]
    mid_block: Level


class ControlNet(DownPath, Protocol):
    """A ControlNetModel, or a ControlNetUnionModel."""

    controlnet_down_blocks: Sequence[Layer]
    controlnet_mid_block: Layer


class UNet(DownPath, Protocol):
    """A UNet2DConditionModel; one of SDXL also has `add_embedding` and `add_time_proj`."""

    up_blocks: Sequence[Level]
    conv_norm_out: Layer
    conv_out: Layer

    def get_time_embed(self, sample: Tensor, timestep: Tensor) -> Tensor: ...
