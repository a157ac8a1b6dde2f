"""The vocabulary: the operations in which a family writes its network down once, as a walk.

A walk is a plain function `walk(ops, weights, *arrays)` in the order of the published architecture. Its weights are the
library's own modules, read for their names and parameters only. A lowering gives the operations their meaning: torch
computes them at once (`core.ops.reference`), a CPU writes them into a program of kernels (`core.ops.cpu`), a GPU
launches fused kernels (`core.ops.cuda`).

Arrays are opaque handles, channels last: maps [B, H, W, C], tokens [B, T, C], vectors [B, C], int32 numbers [B]. An
operation is given who reads its result (`to`), so that it can end in the 8 bits that a quantized reader wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from core.kernels.cpu.arguments import Activation as Activation

A = TypeVar("A")
Layer = Any
"""A module of torch, diffusers, transformers or `core.quant`: a linear layer, a convolution or a norm."""
Walk = Callable[..., Any]
"""`walk(ops, *arrays)`: returns an array, or a tuple of arrays."""


def rms_eps(norm: Layer) -> float:
    """The epsilon of an RMSNorm of diffusers or transformers."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def doubled(sides: Sequence[int], target: Sequence[int] | None) -> tuple[int, int]:
    """Height and width of a map after `Ops.upsample`: those of `target`, or twice its own.

    They may be one less, where a map of odd sides was halved: nearest neighbours then give the doubled map without its
    last row or column. Raises ValueError for any other.
    """
    height, width = (2 * side for side in sides)
    if target is None:
        return height, width
    if target[0] not in (height - 1, height) or target[1] not in (width - 1, width):
        raise ValueError(f"a map of {sides[0]}×{sides[1]} does not double to {target[0]}×{target[1]}")
    return target[0], target[1]


def bind(walk: Callable[..., Any], weights: Any) -> Walk:
    """A walk with its weights: `walk(ops, weights, *arrays)` as `walk(ops, *arrays)`."""
    return lambda ops, *arrays: walk(ops, weights, *arrays)


class Ops(Protocol[A]):
    """The operations. Each method is one entry of the vocabulary; a lowering implements those that its walks use."""

    def linear(
        self, x: A, *layers: Layer, act: Activation | None = None, residual: A | None = None, out: A | None = None,
        within: A | None = None,
    ) -> A:  # fmt: skip
        """act(x · Wᵀ + b + residual): one layer, or several side by side that read the same input.

        A 1×1 convolution is a linear layer. `act` is one of `Activation`. `out` is a slot of `joint`. Of images that
        `within` [B] is not 0 for, tokens beyond the range of a quantized layer's static scales are scaled into it,
        where those of others are cut off; x is then in floats, and there is one layer.
        """

    def biases(self, x: A, *layers: Layer) -> A:
        """x · Wᵀ + b of vectors, side by side, as `conv` adds them: in fp32."""

    def gated(self, x: A, *layers: Layer, act: Activation, to: Layer) -> A:
        """hidden · act(gate) for the layer `to`: `layers` give the hidden half and then the gate, as one or as two."""

    def conv(
        self, x: A, layer: Layer, *, bias: A | None = None, act: Activation | None = None, residual: A | None = None,
        out: A | None = None,
    ) -> A:  # fmt: skip
        """act(a 3×3 convolution with its own stride, plus `bias` [B, N] of each image, plus `residual`).

        Padding is 1, or, for a layer without, 1 on the right and at the bottom, as autoencoders halve maps.
        """

    def upsample(self, x: A, layer: Layer, *, target: A | None = None, out: A | None = None) -> A:
        """A 3×3 convolution of the map doubled by nearest neighbours, to the sides of `target`: see `doubled`."""

    def group_norm(self, x: A, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> A:
        """GroupNorm, and SiLU, for the layers `to`."""

    def layer_norm(self, x: A, norm: Layer, *, scale: A | None = None, to: Sequence[Layer] = ()) -> A:
        """LayerNorm times `scale` [B, C], for the layers `to`."""

    def rms_norm(
        self, x: A, norm: Layer, *, scale: A | None = None, residual: A | None = None, to: Sequence[Layer] = ()
    ) -> A:
        """residual + RMSNorm(x) · scale [B, C], for the layers `to`."""

    def rotate(
        self, x: A, angles: A, *, heads: int, norms: tuple[Layer, Layer] | None = None, interleaved: bool = False
    ) -> A:
        """Queries, keys and values [B, T, 3·C] with rotary positions in the first two; x may be overwritten.

        `angles` [B, T, d] fp32: d/2 cosines, then d/2 sines, for pairs of neighbours (`interleaved`) or of halves.
        `norms` are RMSNorms of each head of queries and of keys before.
        """

    def attend(
        self, q: A, k: A, v: A, *, heads: int, lengths: A | None = None, causal: bool = False, to: Sequence[Layer] = ()
    ) -> A:
        """softmax(q · kᵀ / √d) · v for the layers `to`. Maps count as tokens.

        `lengths` [B]: of each image only so many of the first keys count, at least one. `causal`: to each token only
        itself and those before.
        """

    def columns(self, x: A, start: int, count: int) -> A:
        """A view of so many channels from `start` on."""

    def cat(self, x: A, y: A) -> A:
        """Channels of x, then of y. Where both lie in one `joint`, this is free."""

    def join(self, x: A, y: A) -> A:
        """Tokens of x [B, S, C], then of y [B, T, C]."""

    def tokens(self, x: A, count: int) -> A:
        """The first so many tokens of each image."""

    def add(self, x: A, y: A) -> A:
        """x + y."""

    def shape(self, x: A) -> tuple[int, ...]:
        """The shape of x, channels last."""

    def joint(self, target: A, channels: tuple[int, int], halvings: int) -> tuple[A | None, A | None]:
        """Slots side by side for two arrays that are concatenated later; None where that brings nothing.

        The maps are those of `target` with sides halved so many times.
        """

    def place(self, x: A, out: A | None) -> A:
        """x, written into a slot if there is one."""


class TokenOps(Ops[A], Protocol[A]):
    """The operations of a decoder whose rows are tokens [T] of any sequences, with a KV cache that the lowering holds.

    `rows` says where the tokens are, in the lowering's own type. Of `linear` the `residual` is read the last time: the
    result may take its place.
    """

    def embed(self, tokens: A, embedding: Layer, *, scale: float = 1.0) -> A:
        """Rows of the embedding's weight, times `scale`, [T, C], by int32 numbers [T]."""

    def rotate_paged(self, qkv: A, rows: Any, layer: int, *, heads: int, norms: tuple[Layer, Layer] | None = None) -> A:
        """Queries [T, heads · d] of queries, keys and values, rotated for their positions, in pairs of halves.

        Keys, rotated, too, and values go into this layer's pages. `norms` as in `rotate`.
        """

    def attend_paged(
        self, q: A, rows: Any, layer: int, *, scale: float, to: Layer, window: int = 0, cap: float = 0.0
    ) -> A:
        """softmax(q · kᵀ · scale) · v for the layer `to`, on the pages of each row's sequence up to its position.

        `window`: the last so many tokens only, itself among them. `cap`: a score s is cap · tanh(s / cap). 0: none.
        """

    def head(self, x: A, layer: Layer, out: Any = None) -> A:
        """x · Wᵀ + b in fp32: logits [T, V]. `out`, a tensor, may receive them."""


class Lowering(Protocol):
    """Turns walks into callables on tensors."""

    dtype: torch.dtype  # of activations
    head_multiple: int  # of the width of attention's heads

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """Pack all layers that the walk reads, on inputs of these shapes. Raises ValueError for unsupported ones."""

    def lower(self, walk: Walk, name: str, *, bound: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        """The walk as a callable: tensors in, in the walk's layouts, a tuple of tensors out.

        The first result is the caller's own; the others may lie in buffers that the next call of any walk of this
        lowering overwrites. `name` is what its memory is listed under. `bound` is the number of an input that is read
        where it lies, instead of being copied, and whose number of tokens may change freely.
        """
