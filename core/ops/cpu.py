"""The CPU lowering: a walk becomes a program of C++ kernel calls, once for each shape, and runs in one call.

A row's bits depend neither on the number of rows nor on its place among them.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from core.kernels.cpu.arguments import pointer
from core.kernels.cpu.program import HEAD_MULTIPLE
from core.kernels.cpu.token_program import TokenProgram
from core.ops.branches import LowRank, PackedBranches, RowBranches
from core.ops.cpu_arrays import Array, ArrayPair, Bound
from core.ops.ops import Activation, Layer, Walk, doubled, rms_eps
from core.ops.packed import PackedLayer, PackedLayers

Watch = Callable[[PackedLayer, Tensor], None]
"""Called with a layer and the input [rows, channels] that it is about to read; the buffer is written over later."""

_WASTE = 2  # times the largest program's memory: as much as all of a lowering's may use
_CAPACITY = 256  # programs of a lowering: one for each walk, size of a picture and number of rows


class CpuOps:
    """`core.ops.ops.Ops` on arrays of one program."""

    def __init__(self, library: ctypes.CDLL, layers: PackedLayers) -> None:
        self.program = TokenProgram(library, layers.blocks)
        self.bound_calls: list[tuple[Any, Bound, Bound]] = []  # attention calls whose keys and values come later
        self._layers = layers
        self.products: list[tuple[Any, PackedLayer]] = []  # calls and their layers
        self._reads: list[tuple[int, PackedLayer, Tensor]] = []  # number of the call, the layer and its input

    def linear(
        self,
        x: Array | ArrayPair,
        *layers: Layer,
        act: Activation | None = None,
        residual: Array | None = None,
        out: Array | None = None,
        within: Array | None = None,
    ) -> Array:
        if isinstance(x, ArrayPair):
            return self._linear_of_pair(x, *layers)
        packed = self._layers(*layers)
        return self._product(x, packed, x.shape[:-1], residual=residual, within=within, act=act)

    def biases(self, x: Array, *layers: Layer) -> Array:
        return self.linear(x, *layers)

    def gated(self, x: Array, *layers: Layer, act: Activation, to: Layer) -> Array:
        packed = self._layers(*layers, geglu=True)
        return self._product(x, packed, x.shape[:-1], inverse=self._layers.inverse(to), act=act)

    def conv(
        self, x: Array, layer: Layer, *, bias: Array | None = None, act: Activation | None = None,
        residual: Array | None = None, out: Array | None = None,
    ) -> Array:  # fmt: skip
        stride, before = (int(v if isinstance(v, int) else v[0]) for v in (layer.stride, layer.padding))
        sides = tuple((side + before - 2) // stride + 1 for side in x.sides)
        packed, grid = self._layers(layer), (x.images, *x.sides)
        return self._product(
            x, packed, (x.images, *sides), grid, row_bias=_of(bias), residual=residual, stride=stride, before=before,
            act=act,
        )  # fmt: skip

    def upsample(self, x: Array, layer: Layer, *, target: Array | None = None, out: Array | None = None) -> Array:
        packed, (height, width) = self._layers(layer), x.sides
        sides = doubled((height, width), None if target is None else target.sides)
        cut = 2 * height - sides[0], 2 * width - sides[1]
        return self._product(x, packed, (x.images, *sides), (x.images, height, width), upsample=True, cut=cut)

    def group_norm(self, x: Array | ArrayPair, norm: Layer, *, silu: bool = False, to: Sequence[Layer] = ()) -> Array:
        first, second = x if isinstance(x, ArrayPair) else (x, None)
        out = self.program.group_norm(
            first.x, None if second is None else second.x, norm, images=first.images, silu=silu,
            inverse=self._layers.inverse(*to),
        )  # fmt: skip
        return self._own(out, first.shape[:-1])

    def layer_norm(self, x: Array, norm: Layer, *, scale: Array | None = None, to: Sequence[Layer] = ()) -> Array:
        out = self.program.layer_norm(x.x, norm, self._layers.inverse(*to), row_scale=_of(scale))
        return self._own(out, x.shape[:-1])

    def rms_norm(
        self, x: Array, norm: Layer, *, scale: Array | None = None, residual: Array | None = None,
        to: Sequence[Layer] = (),
    ) -> Array:  # fmt: skip
        out = self.program.rms_norm(
            x.x, norm.weight, rms_eps(norm), self._layers.inverse(*to), row_scale=_of(scale), residual=_of(residual)
        )
        return self._own(out, x.shape[:-1])

    def rotate(
        self, x: Array, angles: Array, *, heads: int, norms: tuple[Layer, Layer] | None = None,
        interleaved: bool = False,
    ) -> Array:  # fmt: skip
        d = angles.shape[-1]
        kv_heads = (x.shape[-1] // d - heads) // 2
        q, k = x.x[:, : heads * d], x.x[:, heads * d : (heads + kv_heads) * d]
        self.program.rotate_heads(
            q, k, angles.x, heads=heads, kv_heads=kv_heads, interleaved=interleaved, **head_norms(norms)
        )
        return x

    def attend(
        self, q: Array, k: Array | Bound, v: Array | Bound, *, heads: int, lengths: Array | None = None,
        causal: bool = False, to: Sequence[Layer] = (),
    ) -> Array:  # fmt: skip
        keys, values = (q.x if isinstance(part, Bound) else part.x for part in (k, v))
        d = q.x.shape[-1] // heads
        out = self.program.attention(
            q.x, keys, values, images=q.images, heads=heads, kv_heads=keys.shape[-1] // d, scale=1 / math.sqrt(d),
            inverse=self._layers.inverse(*to), lengths=_of(lengths), causal=causal,
        )  # fmt: skip
        bound = [part for part in (k, v) if isinstance(part, Bound)]
        if bound:
            if len(bound) < 2 or any(part.shape != (q.images, q.shape[-1]) for part in bound):
                raise ValueError(f"keys and values do not fit queries {[*q.shape]}")
            self.bound_calls.append((self.program.last, bound[0], bound[1]))
        return self._own(out, q.shape[:-1])

    def columns(self, x: Array | Bound, start: int, count: int) -> Array | Bound:
        if start + count > x.shape[-1]:
            raise ValueError(f"there are no {count} channels from {start} on in {[*x.shape]}")
        if isinstance(x, Bound):
            return Bound(x.images, count, x.start + start)
        return Array(x.x[:, start : start + count], (*x.shape[:-1], count), None, x)

    def cat(self, x: Array, y: Array) -> ArrayPair:
        return ArrayPair(x, y)

    def join(self, x: Array, y: Array) -> Array:
        images, rows = x.images, x.images * (x.shape[1] + y.shape[1])
        out = self.program.buffer(rows, x.shape[-1])
        self.program.place(x.x, out, images=images)
        self.program.place(y.x, out, images=images, at=x.shape[1])
        return self._own(out, (images, x.shape[1] + y.shape[1]))

    def tokens(self, x: Array, count: int) -> Array:
        return self._own(self.program.take(x.x, images=x.images, at=0, rows=count), (x.images, count))

    def add(self, x: Array, y: Array) -> Array:
        rows = torch.arange(x.x.shape[0], dtype=torch.int32)
        return self._own(self.program.embed(x.x, rows, positions=y.x), x.shape[:-1])

    def shape(self, x: Array) -> tuple[int, ...]:
        return x.shape

    def joint(self, target: Array, channels: tuple[int, int], halvings: int) -> tuple[Array | None, Array | None]:
        return None, None

    def place(self, x: Array, out: Array | None) -> Array:
        return x

    # -- programs ----------------------------------------------------------------------------------------------------

    def input(self, shape: tuple[int, ...]) -> Array:
        """A buffer for an input: floats, or, of one dimension, int32 numbers of each image."""
        if len(shape) == 1:
            return Array(self.program.buffer(*shape, dtype=torch.int32), shape, self.program)
        return self._own(self.program.buffer(math.prod(shape[:-1]), shape[-1]), shape[:-1])

    def run_watched(self, watch: Watch) -> None:
        """Run the program, and stop before each layer to call `watch`."""
        done = 0
        for call, layer, x in self._reads:
            self.program.run(done, call)
            watch(layer, x)
            done = call
        self.program.run(done)

    def _own(self, out: Tensor, shape: tuple[int, ...]) -> Array:
        return Array(out, (*shape, out.shape[-1]), self.program)

    def _product(
        self, x: Array, layer: PackedLayer, shape: tuple[int, ...], grid: tuple[int, int, int] | None = None, *,
        residual: Array | None = None, within: Array | None = None, **options: Any,
    ) -> Array:  # fmt: skip
        weights, inverse = layer.weights, layer.inverse
        if weights.by_row or (within is not None and inverse is not None):
            conversion = None if weights.by_row or inverse is None or within is None else (inverse, within.x)
            quantized, scales = self.program.quantize_rows(x.x, conversion)
            x, by = self._own(quantized, x.shape[:-1]), Array(scales, scales.shape, self.program)
            weights, options["a_scale"] = replace(weights, by_row=True), by.x  # of one tap they are laid out alike
        elif inverse is not None and x.x.dtype == torch.float32:
            x = self._own(self.program.quantize(x.x, inverse), x.shape[:-1])
        _check_reader(x, layer)
        self._reads.append((len(self.program), layer, x.x))
        out = self.program.product(x.x, weights, grid=grid or (1, 1, x.x.shape[0]), residual=_of(residual), **options)
        self.products.append((self.program.last, layer))
        return self._own(out, shape)

    def _linear_of_pair(self, pair: ArrayPair, *layers: Layer) -> Array:
        """A layer in floats over two arrays: the share of the second is added onto that of the first."""
        (layer,) = layers
        width = pair.x.x.shape[-1]
        first = self._layers.columns(layer, 0, width, bias=True)
        second = self._layers.columns(layer, width, pair.y.x.shape[-1], bias=False)
        out = self._product(pair.x, first, pair.x.shape[:-1])
        self._reads.append((len(self.program), second, pair.y.x))
        rows = pair.y.x.shape[0]
        self.program.product(pair.y.x, second.weights, grid=(1, 1, rows), residual=out.x, out=out.x)
        self.products.append((self.program.last, second))
        return out


def adapt(ops: CpuOps, branches: RowBranches | None) -> list[Any]:
    """Point each product at its branches; returns what is to be kept as long as they are. None: without any."""
    kept = []
    for call, layer in ops.products:
        addresses = None if branches is None else branches.addresses(layer)
        call.branches = None if addresses is None else ctypes.addressof(addresses)
        call.rows = None if addresses is None or branches is None else branches.table.address
        kept.append(addresses)
    return kept


def head_norms(norms: tuple[Layer, Layer] | None) -> dict[str, Any]:
    """The RMSNorms of queries' and keys' heads as arguments of a program's rotations."""
    if norms is None:
        return {}
    return {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": rms_eps(norms[0])}


def _of(x: Array | None) -> Tensor | None:
    return None if x is None else x.x


def _check_reader(x: Array, layer: PackedLayer) -> None:
    """Raise ValueError for bytes that another layer reads by other scales."""
    if x.x.dtype != torch.uint8:
        return
    first = x.reader = x.reader or layer
    if first.weights.by_row and layer.weights.by_row:
        return
    if first.inverse is None or layer.inverse is None or not torch.equal(first.inverse, layer.inverse):
        raise ValueError(f"layer {layer.names[0]}: {first.names[0]} reads the same input, by other scales")


class _Written:
    """A walk written down for one shape."""

    def __init__(self, ops: CpuOps, walk: Walk, shapes: Sequence[tuple[int, ...]], bound: int | None) -> None:
        self.ops, self._bound = ops, bound
        self._inputs = [
            Bound(shape[0], shape[-1]) if index == bound else ops.input(shape) for index, shape in enumerate(shapes)
        ]
        outputs = walk(ops, *self._inputs)
        self._outputs: tuple[Array, ...] = outputs if isinstance(outputs, tuple) else (outputs,)
        self._kept: tuple[Tensor, Tensor | None] | None = None
        # The branches that the products point to. Held weakly: a program that is not used again must not keep adapters
        # that a cache has evicted.
        self._adapted: ref[RowBranches] | None = None
        self._addresses: list[Any] = []

    def __call__(
        self, tensors: Sequence[Tensor], lengths: Tensor | None, branches: RowBranches | None, watch: Watch | None
    ) -> tuple[Tensor, ...]:
        now = None if self._adapted is None else self._adapted()
        if now is not branches or (branches is None and self._adapted is not None):
            self._adapt(branches)
        for buffer, tensor in zip(self._inputs, tensors, strict=True):
            if isinstance(buffer, Bound):
                self._bind(buffer, tensor, lengths)
            else:
                buffer.x.view(buffer.shape).copy_(tensor)
        if watch is None:
            self.ops.program.run()
        else:
            self.ops.run_watched(watch)
        first, *views = (out.x.view(out.shape) for out in self._outputs)
        return first.clone(), *views

    def _adapt(self, branches: RowBranches | None) -> None:
        """Point each product at its branches. Without any it has none, and the rows' bits are those of the model."""
        images = self._inputs[0].shape[0]
        if branches is not None and branches.table.images != images:
            raise ValueError(f"adapters of {branches.table.images} rows do not fit a batch of {images}")
        self._addresses = adapt(self.ops, branches)
        self._adapted = None if branches is None else ref(branches)

    def _bind(self, bound: Bound, tensor: Tensor, lengths: Tensor | None) -> None:
        """Point attention at these keys and values, [B, tokens, channels], of which `lengths` [B] count."""
        shape = (bound.images, max(1, tensor.shape[1]), bound.channels)
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.shape != shape or not _on_cpu(tensor):
            raise ValueError(
                f"keys and values must be contiguous fp32 [{shape[0]}, tokens, {shape[2]}] on the CPU, "
                f"not {tensor.dtype} {[*tensor.shape]} on {tensor.device}"
            )
        if lengths is not None:
            if lengths.shape != shape[:1] or not _on_cpu(lengths):
                raise ValueError(f"lengths must be [{shape[0]}] on the CPU, not {[*lengths.shape]} on {lengths.device}")
            lengths = lengths.to(torch.int32).contiguous()
        self._kept = tensor, lengths  # while the program may read it
        for call, k, v in self.ops.bound_calls:
            call.k, call.v = (tensor.data_ptr() + tensor.itemsize * part.start for part in (k, v))
            call.keys, call.k_stride, call.v_stride = shape[1], shape[2], shape[2]
            call.lengths = pointer(lengths)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class CpuLowering:
    """Walks of one model as programs, run by one thread at a time.

    Weights are packed when a walk is first written; programs are written on first use, in milliseconds, and the
    `capacity` that were used last are kept. They share their memory, at most twice what the largest of them needs:
    beyond that the oldest are dropped.
    """

    dtype = torch.float32
    head_multiple = HEAD_MULTIPLE

    def __init__(
        self, library: ctypes.CDLL, model: nn.Module, *, half: bool = False, capacity: int = _CAPACITY
    ) -> None:
        """`half` as for `PackedLayers`."""
        self.watch: Watch | None = None  # called for each layer of every run, which makes runs slower
        self.layers = PackedLayers(library, model, half=half)
        self._library = library
        self._capacity = capacity
        self._programs: OrderedDict[tuple[str, tuple[tuple[int, ...], ...]], _Written] = OrderedDict()
        self._lock = threading.Lock()  # programs share their buffers among runs
        self._branches: RowBranches | None = None  # of the calls inside `adapted`
        self._last: RowBranches | None = None

    def prepare(self, walk: Walk, *shapes: tuple[int, ...], bound: int | None = None) -> None:
        """Write a program of these shapes, and drop it; see `core.ops.ops.Lowering`."""
        with self._lock:
            _Written(CpuOps(self._library, self.layers), walk, shapes, bound)

    def lower(self, walk: Walk, name: str, *, bound: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        """Return the walk as a program; see `core.ops.ops.Lowering`. Calls raise ValueError, naming the layer, for one
        that is unsupported.

        Calls take `lengths` [B]: how many of each image's tokens of the bound input count; default: all.
        """

        def run(*tensors: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
            shapes = tuple(
                (tensor.shape[0], tensor.shape[-1]) if index == bound else tuple(tensor.shape)
                for index, tensor in enumerate(tensors)
            )
            key = name, shapes
            with self._lock:
                program = self._programs.get(key) or self._write(walk, key, bound)
                self._programs.move_to_end(key)
                return program(tensors, lengths, self._branches, self.watch)

        return run

    def pack_branches(self, factors: Mapping[str, LowRank]) -> PackedBranches:
        """An adapter for `adapted`, by names of layers that prepared walks read. On any thread.

        Raises ValueError, naming the layer, for a factor that does not fit it.
        """
        return PackedBranches(self._library, self.layers.all, factors)

    @contextmanager
    def adapted(self, rows: Sequence[Sequence[tuple[PackedBranches, float]]]) -> Iterator[None]:
        """Context: row i of every call's batch gets these adapters, each with its scale, in this order."""
        branches = RowBranches(rows) if any(rows) else None
        last = self._last  # another thread may clear it
        if branches is not None and last is not None and branches.key == last.key:
            branches = last  # which programs are bound to
        self._branches = self._last = branches
        try:
            yield
        finally:
            self._branches = None

    def clear_branches(self) -> None:
        """Let go of the last adapters. Thread-safe."""
        self._last = None

    def _write(self, walk: Walk, key: tuple[str, tuple[tuple[int, ...], ...]], bound: int | None) -> _Written:
        """Write a program and keep it, dropping the oldest where there are too many or they hold too much memory."""
        while len(self._programs) >= self._capacity:
            self._programs.popitem(last=False)
        made = self._programs[key] = _Written(CpuOps(self._library, self.layers), walk, key[1], bound)
        # A program cannot use the smaller blocks of those before it, which would add up over rising sizes.
        largest = max(each.ops.program.size_bytes for each in self._programs.values())
        while len(self._programs) > 1 and self.layers.blocks.size_bytes > _WASTE * largest:
            self._programs.popitem(last=False)
        return made

    @property
    def size_bytes(self) -> tuple[int, dict[tuple[str, tuple[int, ...]], int]]:
        """Bytes of packed weights, and of each program's buffers by its name and first input, which overlap."""
        buffers = {(name, shapes[0]): each.ops.program.size_bytes for (name, shapes), each in self._programs.items()}
        return self.layers.size_bytes, buffers
