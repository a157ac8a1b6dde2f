"""Follows a walk without computing: the shapes of its arrays, and each operation with its layers and its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from core.ops.ops import Activation, Layer, Walk, doubled

Shape = tuple[int, ...]  # of an array, channels last


class TracedCall(NamedTuple):
    """An operation that a walk asks for."""

    operation: str  # the method of `Ops`
    layers: tuple[Layer, ...]
    inputs: Shape
    output: Shape


class Trace(NamedTuple):
    """The calls of a walk in order, and the shapes that it returned."""

    calls: list[TracedCall]
    outputs: tuple[Shape, ...]


def trace(walk: Walk, *shapes: Shape) -> Trace:
    """Follow a walk over inputs of these shapes. Needs no weights, only their modules."""
    ops = TraceOps()
    outputs = walk(ops, *shapes)
    is_single = bool(outputs) and isinstance(outputs[0], int)
    return Trace(ops.calls, (outputs,) if is_single else tuple(outputs))


class TraceOps:
    """`core.ops.ops.Ops` on shapes."""

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []

    def linear(
        self,
        x: Shape,
        *layers: Layer,
        act: Activation | None = None,
        residual: Shape | None = None,
        out: Shape | None = None,
        within: Shape | None = None,
    ) -> Shape:
        return self._call("linear", layers, x, (*x[:-1], sum(_width(layer) for layer in layers)))

    def biases(self, x: Shape, *layers: Layer) -> Shape:
        return self._call("biases", layers, x, (*x[:-1], sum(_width(layer) for layer in layers)))

    def gated(self, x: Shape, *layers: Layer, act: Activation, to: Layer) -> Shape:
        return self._call("gated", layers, x, (*x[:-1], sum(_width(layer) for layer in layers) // 2))

    def conv(
        self, x: Shape, layer: Layer, *, bias: Shape | None = None, act: Activation | None = None,
        residual: Shape | None = None, out: Shape | None = None,
    ) -> Shape:  # fmt: skip
        stride, before = (int(v if isinstance(v, int) else v[0]) for v in (layer.stride, layer.padding))
        height, width = ((side + before - 2) // stride + 1 for side in x[1:3])
        return self._call("conv", (layer,), x, (x[0], height, width, _width(layer)))

    def upsample(self, x: Shape, layer: Layer, *, target: Shape | None = None, out: Shape | None = None) -> Shape:
        height, width = doubled(x[1:3], None if target is None else target[1:3])
        return self._call("upsample", (layer,), x, (x[0], height, width, _width(layer)))

    def group_norm(self, x: Shape, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Shape:
        return self._call("group_norm", (norm,), x, x)

    def layer_norm(self, x: Shape, norm: Layer, *, scale: Shape | None = None, to: Sequence[Layer] = ()) -> Shape:
        return self._call("layer_norm", (norm,), x, x)

    def rms_norm(
        self, x: Shape, norm: Layer, *, scale: Shape | None = None, residual: Shape | None = None,
        to: Sequence[Layer] = (),
    ) -> Shape:  # fmt: skip
        return self._call("rms_norm", (norm,), x, x)

    def rotate(
        self, x: Shape, angles: Shape, *, heads: int, norms: tuple[Layer, Layer] | None = None,
        interleaved: bool = False,
    ) -> Shape:  # fmt: skip
        return self._call("rotate", norms or (), x, x)

    def attend(
        self, q: Shape, k: Shape, v: Shape, *, heads: int, lengths: Shape | None = None, causal: bool = False,
        to: Sequence[Layer] = (),
    ) -> Shape:  # fmt: skip
        return self._call("attend", (), q, q)

    def embed(self, tokens: Shape, embedding: Layer, *, scale: float = 1.0) -> Shape:
        return self._call("embed", (embedding,), tokens, (*tokens, embedding.embedding_dim))

    def rotate_paged(
        self, qkv: Shape, rows: Any, layer: int, *, heads: int, norms: tuple[Layer, Layer] | None = None
    ) -> Shape:
        return self._call("rotate_paged", norms or (), qkv, qkv)

    def attend_paged(
        self, q: Shape, rows: Any, layer: int, *, scale: float, to: Layer, window: int = 0, cap: float = 0.0
    ) -> Shape:
        return self._call("attend_paged", (), q, (*q[:-1], to.in_features))

    def head(self, x: Shape, layer: Layer, out: Any = None) -> Shape:
        return self._call("head", (layer,), x, (*x[:-1], _width(layer)))

    def columns(self, x: Shape, start: int, count: int) -> Shape:
        return (*x[:-1], count)

    def cat(self, x: Shape, y: Shape) -> Shape:
        return (*x[:-1], x[-1] + y[-1])

    def join(self, x: Shape, y: Shape) -> Shape:
        return (x[0], x[1] + y[1], x[2])

    def tokens(self, x: Shape, count: int) -> Shape:
        return (x[0], count, x[2])

    def add(self, x: Shape, y: Shape) -> Shape:
        return x

    def shape(self, x: Shape) -> Shape:
        return x

    def joint(self, target: Shape, channels: tuple[int, int], halvings: int) -> tuple[Shape | None, Shape | None]:
        return None, None

    def place(self, x: Shape, out: Shape | None) -> Shape:
        return x

    def _call(self, operation: str, layers: tuple[Layer, ...], inputs: Shape, output: Shape) -> Shape:
        self.calls.append(TracedCall(operation, layers, inputs, output))
        return output


def _width(layer: Any) -> int:
    """Output channels of a layer."""
    return int(layer.out_features if hasattr(layer, "out_features") else layer.out_channels)
