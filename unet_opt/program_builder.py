"""Adds the blocks of SDXL's UNet and VAE to a program: residual blocks, attention, resampling.

Supports diffusers' ResnetBlock2D, Transformer2DModel, Downsample2D and Upsample2D.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from core.kernels.cpu.program import Program
from core.ops.packed import PackedLayer, PackedLayers


class FeatureMap(NamedTuple):
    """Activations [images · height · width, channels] in floats."""

    x: Tensor
    height: int
    width: int


class CrossAttentionCall(NamedTuple):
    """A cross-attention layer's call, whose keys and values are bound when the program runs."""

    call: Any
    name: int  # id of the layer
    width: int


Watch = Callable[[PackedLayer, Tensor], None]
"""Called with a layer and the input [rows, channels] that it is about to read; the buffer is written over later."""


class ProgramBuilder:
    """Writes for one number of images. Buffers are released as soon as no later call reads them."""

    def __init__(self, library: ctypes.CDLL, layers: PackedLayers, images: int) -> None:
        self.program = Program(library, layers.blocks)
        self.layers = layers
        self.images = images
        self.cross: list[CrossAttentionCall] = []
        self._reads: list[tuple[int, PackedLayer, Tensor]] = []  # number of the call, the layer and its input

    def run(self, watch: Watch | None = None) -> None:
        """Run the program; with `watch`, stop before each layer to call it."""
        if watch is None:
            self.program.run()
            return
        done = 0
        for call, layer, x in self._reads:
            self.program.run(done, call)
            watch(layer, x)
            done = call
        self.program.run(done)

    def product(self, a: FeatureMap, layer: PackedLayer, **options: Any) -> Tensor:
        """A layer over a map, [images · height · width, n]; options as `Program.product` has them."""
        self._reads.append((len(self.program), layer, a.x))
        return self.program.product(a.x, layer.weights, grid=(self.images, a.height, a.width), **options)

    def linear(self, a: Tensor, layer: PackedLayer, **options: Any) -> Tensor:
        """A layer of one tap over rows, [rows, channels] to [rows, n]."""
        self._reads.append((len(self.program), layer, a))
        return self.program.product(a, layer.weights, grid=(1, 1, a.shape[0]), **options)

    def resnet(self, h: FeatureMap, skip: FeatureMap | None, block: Any, time: Tensor | None) -> FeatureMap:
        """ResnetBlock2D of h concatenated with the skip; `time` [images, n] is added after the first half."""
        p = self.program
        y = None if skip is None else skip.x
        first, second = self.layers(block.conv1), self.layers(block.conv2)
        a = p.group_norm(h.x, y, block.norm1, images=self.images, silu=True, inverse=first.inverse)
        made = self.product(h._replace(x=a), first, row_bias=time)
        p.give_back(a)
        b = p.group_norm(made, None, block.norm2, images=self.images, silu=True, inverse=second.inverse)
        p.give_back(made)
        around = h.x if block.conv_shortcut is None else self._shortcut(h.x, y, block.conv_shortcut)
        out = self.product(h._replace(x=b), second, residual=around)
        p.give_back(b, None if around is h.x else around)
        return h._replace(x=out)

    def _shortcut(self, x: Tensor, y: Tensor | None, conv: Any) -> Tensor:
        """A 1×1 convolution in floats, of two concatenated inputs."""
        width = x.shape[-1]
        out = self.linear(x, self.layers.columns(conv, 0, width, bias=True))
        if y is not None:
            out = self.linear(y, self.layers.columns(conv, width, y.shape[-1], bias=False), residual=out, out=out)
        return out

    def transformer(self, h: FeatureMap, block: Any) -> FeatureMap:
        """Transformer2DModel with linear projections, or 1×1 convolutions, which are the same here."""
        p = self.program
        first, last = self.layers(block.proj_in), self.layers(block.proj_out)
        a = p.group_norm(h.x, None, block.norm, images=self.images, silu=False, inverse=first.inverse)
        x = self.linear(a, first)
        p.give_back(a)
        for inner in block.transformer_blocks:
            x = self._self_attention(x, inner)
            x = self._cross_attention(x, inner)
            x = self._feed_forward(x, inner)
        q = x if last.inverse is None else p.quantize(x, last.inverse)
        out = self.linear(q, last, residual=h.x)
        p.give_back(x, None if q is x else q)
        return h._replace(x=out)

    def _self_attention(self, x: Tensor, block: Any) -> Tensor:
        attn = block.attn1
        qkv = self.layers(attn.to_q, attn.to_k, attn.to_v)
        a = self.program.layer_norm(x, block.norm1, qkv.inverse)
        made = self.linear(a, qkv)
        q, k, v = made.chunk(3, dim=-1)
        return self._attended(x, attn, q, k, v, (a, made))

    def _cross_attention(self, x: Tensor, block: Any) -> Tensor:
        attn = block.attn2
        query = self.layers(attn.to_q)
        a = self.program.layer_norm(x, block.norm2, query.inverse)
        q = self.linear(a, query)
        return self._attended(x, attn, q, q, q, (a, q), cross=True)

    def _attended(
        self, x: Tensor, attn: Any, q: Tensor, k: Tensor, v: Tensor, done: tuple[Tensor, ...], *, cross: bool = False
    ) -> Tensor:
        p, out = self.program, self.layers(attn.to_out[0])
        scale = 1 / math.sqrt(q.shape[-1] // attn.heads)
        b = p.attention(q, k, v, images=self.images, heads=attn.heads, scale=scale, inverse=out.inverse)
        if cross:
            self.cross.append(CrossAttentionCall(p.last, id(attn), q.shape[-1]))
        made = self.linear(b, out, residual=x)
        p.give_back(x, b, *done)
        return made

    def attention(self, h: FeatureMap, attn: Any) -> FeatureMap:
        """The VAE's single attention layer over all pixels."""
        p = self.program
        qkv = self.layers(attn.to_q, attn.to_k, attn.to_v)
        a = p.group_norm(h.x, None, attn.group_norm, images=self.images, silu=False, inverse=qkv.inverse)
        made = self.linear(a, qkv)
        q, k, v = made.chunk(3, dim=-1)
        return h._replace(x=self._attended(h.x, attn, q, k, v, (a, made)))

    def _feed_forward(self, x: Tensor, block: Any) -> Tensor:
        p = self.program
        wide, out = self.layers(block.ff.net[0].proj, geglu=True), self.layers(block.ff.net[2])
        a = p.layer_norm(x, block.norm3, wide.inverse)
        b = self.linear(a, wide, inverse=out.inverse)
        made = self.linear(b, out, residual=x)
        p.give_back(x, a, b)
        return made

    def downsample(self, h: FeatureMap, block: Any) -> FeatureMap:
        """Downsample2D: a 3×3 convolution of stride 2."""
        before = block.padding  # 0 pads only the right and the bottom, as autoencoders do
        out = self._resampled(h, block.conv, stride=2, before=before)
        return FeatureMap(out, (h.height + before - 2) // 2 + 1, (h.width + before - 2) // 2 + 1)

    def upsample(self, h: FeatureMap, block: Any) -> FeatureMap:
        """Upsample2D: a 3×3 convolution of the map doubled by nearest neighbours."""
        return FeatureMap(self._resampled(h, block.conv, upsample=True), 2 * h.height, 2 * h.width)

    def _resampled(self, h: FeatureMap, conv: Any, **options: Any) -> Tensor:
        layer = self.layers(conv)
        q = h.x if layer.inverse is None else self.program.quantize(h.x, layer.inverse)
        out = self.product(h._replace(x=q), layer, **options)
        if q is not h.x:
            self.program.give_back(q)
        return out
