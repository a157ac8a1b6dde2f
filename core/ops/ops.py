"""The vocabulary: the operations in which a family writes its network down once, as a walk.

A walk is a plain function `walk(ops, weights, *arrays)` in the order of the published architecture. Its weights are the
library's own modules, read for their names and parameters only. A lowering gives the operations their meaning: torch
computes them at once (`core.ops.reference`), a CPU writes them into a program of kernels (`core.ops.cpu`), a GPU
launches fused kernels (`core.ops.cuda`).

Arrays are opaque handles, channels last: maps [B, H, W, C], tokens [B, T, C], vectors [B, C], numbers int32 [B]. An
operation is given who reads its result (`to`), so that it can end in the 8 bits that a quantized reader wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

A = TypeVar("A")
Layer = Any
"""A module of torch, diffusers, transformers or `core.quant`: a linear layer, a convolution or a norm."""
Walk = Callable[..., Any]
"""`walk(ops, *arrays)`: returns an array, or a tuple of arrays."""


def bind(walk: Callable[..., Any], weights: Any) -> Walk:
    """A walk with its weights: `walk(ops, weights, *arrays)` as `walk(ops, *arrays)`."""
    return lambda ops, *arrays: walk(ops, weights, *arrays)


def norm_eps(norm: Layer) -> float:
    """Of an RMSNorm as transformers, diffusers or torch name it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class Ops(Protocol[A]):
    """The operations. Each method is one entry of the vocabulary; a lowering implements those that its walks use."""

    def linear(self, x: A, *layers: Layer, act: str = "", residual: A | None = None, out: A | None = None) -> A:
        """act(x · Wᵀ + b + residual): one layer, or several side by side that read the same input.

        A 1×1 convolution is a linear layer. `act` is "" or "silu". `out` is a slot of `joint`.
        """

    def biases(self, x: A, *layers: Layer) -> A:
        """x · Wᵀ + b of vectors, side by side, as `conv` adds them: in fp32."""

    def gated(self, x: A, *layers: Layer, act: str, to: Layer) -> A:
        """hidden · act(gate) for the layer `to`: `layers` give the hidden half and then the gate, as one or as two."""

    def conv(self, x: A, layer: Layer, *, bias: A | None = None, residual: A | None = None, out: A | None = None) -> A:
        """A 3×3 convolution with its own stride, plus `bias` [B, N] of each image, plus `residual`.

        Padding is 1, or, for a layer without, 1 on the right and at the bottom, as autoencoders halve maps.
        """

    def upsample(self, x: A, layer: Layer, *, like: A | None = None, out: A | None = None) -> A:
        """A 3×3 convolution of the map doubled by nearest neighbours, or stretched to the sides of `like`."""

    def group_norm(self, x: A, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> A:
        """GroupNorm, and SiLU, for the layers `to`."""

    def layer_norm(self, x: A, norm: Layer, *, to: Sequence[Layer] = ()) -> A:
        """LayerNorm for the layers `to`."""

    def rms_norm(self, x: A, norm: Layer, *, to: Sequence[Layer] = ()) -> A:
        """RMSNorm for the layers `to`."""

    def rotate_heads(
        self, x: A, angles: A, *, heads: int, kv_heads: int, norms: Sequence[Layer] = (), interleaved: bool = False
    ) -> A:
        """x [..., (heads + kv_heads) · d or more], queries and then keys, rotated, perhaps in place; the rest stays.

        `angles` fp32 [..., d]: cosines, then sines, of each token. `norms`: the RMSNorms of queries' and keys' heads,
        which come before. Channel c turns with channel c + d/2, or, `interleaved`, 2c with 2c + 1.
        """

    def attend(
        self, q: A, k: A, v: A, *, heads: int, causal: bool = False, lengths: A | None = None, to: Sequence[Layer] = ()
    ) -> A:
        """softmax(q · kᵀ / √d) · v for the layers `to`. Maps count as tokens.

        Keys may have fewer heads than queries. With `causal` a token attends up to itself; with `lengths` to so many
        keys of its image, beyond which results are meaningless.
        """

    def columns(self, x: A, start: int, count: int) -> A:
        """A view of so many channels from `start` on."""

    def cat(self, x: A, y: A) -> A:
        """Channels of x, then of y. Where both lie in one `joint`, this is free."""

    def joint(self, like: A, channels: tuple[int, int], halvings: int) -> tuple[A | None, A | None]:
        """Slots side by side for two arrays that are concatenated later; None where that brings nothing.

        The maps are those of `like` with sides halved so many times.
        """

    def place(self, x: A, out: A | None) -> A:
        """x, written into a slot if there is one."""


class TokenOps(Ops[A], Protocol[A]):
    """The operations of a decoder whose rows are tokens [T] of any sequences, with a KV cache that the lowering holds.

    `rows` says where the tokens are, in the lowering's own type. Of `linear` the `residual` is read the last time: the
    result may take its place.
    """

    def embed(self, tokens: A, embedding: Layer) -> A:
        """Rows of the embedding's weight, [T, C]."""

    def rotate(self, qkv: A, rows: Any, layer: int, *, heads: int, kv_heads: int, norms: Sequence[Layer] = ()) -> A:
        """Queries [T, heads · d] of qkv, rotated for their positions; keys, too, and values go into this layer's pages.

        `norms` as in `rotate_heads`; channel c turns with channel c + d/2.
        """

    def attend_paged(self, q: A, rows: Any, layer: int, *, scale: float, to: Layer) -> A:
        """softmax(q · kᵀ · scale) · v for the layer `to`, on the pages of each row's sequence up to its position."""

    def head(self, x: A, layer: Layer, out: Any = None) -> A:
        """x · Wᵀ + b in fp32: logits [T, V]. `out`, a tensor, may receive them."""


class Lowering(Protocol):
    """Turns walks into callables on tensors."""

    dtype: torch.dtype  # of activations
    odd_sides: bool  # whether a map's sides may be odd where the network halves them

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """Pack all layers that the walk reads, on inputs of these shapes. Raises ValueError for unsupported ones."""

    def lower(
        self, walk: Walk, name: str, *, bound: int | None = None, exact: Sequence[int] = ()
    ) -> Callable[..., tuple[Tensor, ...]]:
        """The walk as a callable: tensors in, in the walk's layouts, a tuple of tensors out.

        The first result is the caller's own; the others may lie in buffers that the next call of any walk of this
        lowering overwrites. `name` is what its memory is listed under. `bound` is the number of an input that is read
        where it lies, instead of being copied, and whose number of tokens may change freely. `exact`: the numbers of
        inputs that keep their type.
        """
