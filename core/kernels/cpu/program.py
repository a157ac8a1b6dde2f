"""Compiles a network into a list of C++ kernel calls over fixed buffers, once per batch size, and runs it in one call.

The CPU's counterpart of a CUDA graph. All activations are channels-last: [images · pixels, channels] floats, or bytes
around 128 as input of an INT8 layer. The kernels do not check their arguments, so shapes are checked here, when a call
is added.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from core.kernels.cpu import calls
from core.kernels.cpu.arguments import (
    ACTIVATIONS,
    Activation,
    as_floats,
    check,
    dtype_for,
    ends,
    modulation,
    output_size,
    pointer,
)

_LANES = 16
HEAD_MULTIPLE = 16  # of the width of attention's heads
_MOST = 2**31  # rows of a product, which the kernels count in 32 bits; also the limit of a sum of bytes
INT8, FP32, BF16 = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's weights as the kernels read them. `scale` and `bias` are padded to a multiple of 16 columns."""

    packed: Tensor
    offset: Tensor | None
    scale: Tensor | None
    bias: Tensor
    kind: int
    n: int
    taps: int
    channels: int
    geglu: bool
    by_row: bool  # each row of the input comes with a scale of its own


def pack_int8(
    library: ctypes.CDLL, weight: Tensor, scale: Tensor, bias: Tensor | None, *, geglu: bool = False,
    by_row: bool = False,
) -> Weights:  # fmt: skip
    """Pack an INT8 layer: int8 [n, taps, channels], fp32 scale [n] (static input scale included) and bias [n].

    For `geglu` the first half of n is the hidden half and n / 2 must be a multiple of 16. Raises ValueError for shapes
    that the kernels do not support: channels must be a multiple of 4.
    """
    _, taps, channels = weight.shape
    if weight.dtype != torch.int8:
        raise ValueError(f"INT8 weights must be int8, not {weight.dtype}")
    if channels % 4:
        raise ValueError(f"INT8 weights of {channels} input channels do not fit the kernels: no multiple of 4")
    if taps * channels * 127 * 127 >= _MOST:
        raise ValueError(f"INT8 weights of {taps} × {channels} inputs do not fit the kernels: sums could overflow")
    # Activations come as x + 128: subtract the weights' share of that.
    offset = -128 * weight.sum(dim=2 if by_row else (1, 2), dtype=torch.int32)
    return _pack(library, weight.contiguous(), INT8, offset, scale, bias, geglu, by_row)


def pack_float(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, *, geglu: bool = False) -> Weights:
    """Pack a layer in floats: fp32 or bf16 [n, taps, channels]; the computation is in fp32.

    `geglu` as for INT8. Raises ValueError for shapes that the kernels do not support.
    """
    kind = BF16 if weight.dtype == torch.bfloat16 else FP32
    weight = weight.contiguous() if kind == BF16 else weight.float().contiguous()
    return _pack(library, weight, kind, None, None, bias, geglu)


def _pack(
    library: ctypes.CDLL, weight: Tensor, kind: int, offset: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    geglu: bool, by_row: bool = False,
) -> Weights:  # fmt: skip
    n, taps, channels = weight.shape
    if weight.device.type != "cpu":
        raise ValueError(f"weights are on {weight.device}, not on the CPU")
    if taps not in (1, 9) or not weight.numel():
        raise ValueError(f"weights of shape {[*weight.shape]} do not fit the kernels: they have one tap or nine")
    if geglu and (n % (2 * _LANES) or taps != 1):
        raise ValueError(f"GEGLU of {n} columns does not fit the kernels: no multiple of {2 * _LANES}")
    padded = -(-n // _LANES) * _LANES
    packed = torch.empty(padded * taps * channels, dtype=weight.dtype)
    library.diptych_pack(weight.data_ptr(), packed.data_ptr(), n, taps, channels, kind, int(geglu))

    def reach(field: str, values: Tensor) -> Tensor:
        if values.shape != (n,):
            raise ValueError(f"{field} of shape {[*values.shape]} does not fit {n} columns")
        if geglu:  # column order: vectors of hidden and gate alternate
            return values.reshape(2, -1, _LANES).transpose(0, 1).reshape(-1).contiguous()
        return torch.cat([values, values.new_zeros(padded - n)])

    return Weights(
        packed,
        None if offset is None else torch.cat([reach("offset", each) for each in offset.view(n, -1).T]),
        None if scale is None else reach("scale", scale.detach().float()),
        reach("bias", torch.zeros(n) if bias is None else bias.detach().float()),
        kind, n, taps, channels, geglu, by_row,
    )  # fmt: skip


class ScratchArena:
    """Memory shared by programs that never run at the same time: together they use what the largest needs."""

    def __init__(self) -> None:
        self._blocks: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by address, while a program uses them

    def take(self, size_bytes: int, allocated: dict[int, Tensor]) -> Tensor:
        """A block of at least this size that the same program does not use yet; added to those that it uses."""
        unused = [block for address, block in self._blocks.items() if address not in allocated]
        block = min((b for b in unused if b.nbytes >= size_bytes), key=lambda b: b.nbytes, default=None)
        if block is None:
            block = torch.empty(size_bytes, dtype=torch.uint8)
            self._blocks[block.data_ptr()] = block
        allocated[block.data_ptr()] = block
        return block

    @property
    def size_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())


class Program:
    """Kernel calls in the order in which they were added. Not thread-safe.

    Nor may it run at the same time as another program with the same `blocks`. Methods that add a call raise ValueError
    for tensors that do not fit it.
    """

    def __init__(self, library: ctypes.CDLL, blocks: ScratchArena | None = None) -> None:
        for structure in calls.STRUCTURES:
            if library.diptych_size(structure.KIND) != ctypes.sizeof(structure):
                raise RuntimeError(f"the kernels and Python disagree on {structure.__name__}")
        self._library = library
        self._list: list[Any] = []
        self._kept: list[Any] = []  # all memory that the calls point into
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._lent: dict[int, int] = {}  # buffers in use: number of elements by address
        self._ready: Any = None
        self._blocks = blocks or ScratchArena()
        self._taken: dict[int, Tensor] = {}  # of the blocks, by address
        self.size_bytes = 0

    # -- buffers ---------------------------------------------------------------------------------------------------

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer of this shape: a released one, or one that this program has not used yet."""
        count = math.prod(shape)
        if min(shape) < 1:
            raise ValueError(f"a buffer of shape {[*shape]} holds nothing")
        free = self._free[count, dtype]
        if free:
            block = free.pop()
        else:
            size_bytes = count * dtype.itemsize
            with torch.inference_mode(False):  # else calls outside of it could not write here
                block = self._blocks.take(size_bytes, self._taken)[:size_bytes].view(dtype)
            self.size_bytes += size_bytes
        self._lent[block.data_ptr()] = count
        return block.view(shape)

    def give_back(self, *tensors: Tensor | None) -> None:
        """Release these buffers: calls added from now on may overwrite them.

        Raises ValueError for a tensor that is no buffer in use: two calls would otherwise write to one.
        """
        for tensor in tensors:
            if tensor is None:
                continue
            if self._lent.get(tensor.data_ptr()) != tensor.numel():
                raise ValueError(f"what is given back is no buffer in use (shape {[*tensor.shape]})")
            del self._lent[tensor.data_ptr()]
            self._free[tensor.numel(), tensor.dtype].append(tensor.view(-1))

    # -- calls -----------------------------------------------------------------------------------------------------

    def product(
        self,
        a: Tensor,
        weights: Weights,
        *,
        grid: tuple[int, int, int],
        a_scale: Tensor | None = None,
        row_bias: Tensor | None = None,
        residual: Tensor | None = None,
        inverse: Tensor | None = None,
        stride: int = 1,
        before: int = 1,
        upsample: bool = False,
        cut: tuple[int, int] = (0, 0),
        act: Activation | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """A linear layer or 3×3 convolution of `a`, whose (images, height, width) is `grid`, to [rows, columns].

        `a` is [images · height · width, channels], for weights `by_row` with each row's scale, `a_scale`. The result is
        bytes for the next layer with `inverse` [columns], else floats. `row_bias` is [images, n], `residual` [rows, n];
        `out` may be `residual`. `act` acts on the sum, or on GEGLU's gate (default: GELU). The rest as in product.h.
        """
        images, height, width = grid
        h, w = output_size(height, width, weights.taps, stride, before, upsample, cut)
        rows = images * h * w
        if min(images, h, w) < 1 or max(rows, a.shape[0]) >= _MOST:
            raise ValueError(f"product: {images} pictures of {height}×{width} do not fit the kernels")
        if weights.geglu and (row_bias is not None or residual is not None):
            raise ValueError("product: nothing else is added to GEGLU")
        columns = weights.n // 2 if weights.geglu else weights.n
        check("a", a, images * height * width, weights.channels, dtype=dtype_for(weights.kind == INT8), rows_apart=True)
        if weights.by_row != (a_scale is not None):
            raise ValueError("product: weights by row, and no others, need scales of the input's rows")
        check("a_scale", a_scale, a.shape[0])
        check("row_bias", row_bias, images, weights.n, rows_apart=True)
        check("residual", residual, rows, weights.n)
        check("inverse", inverse, columns)
        out = self._out(out, rows, columns, inverse)
        self._add(
            calls.Product(
                a=a.data_ptr(), w=weights.packed.data_ptr(), offset=pointer(weights.offset),
                scale=pointer(weights.scale), bias=weights.bias.data_ptr(),
                a_scale=pointer(a_scale), row_bias=pointer(row_bias), residual=pointer(residual), **ends(out, inverse),
                images=images, height=height, width=width, channels=weights.channels, n=weights.n,
                a_stride=a.stride(0), row_stride=0 if row_bias is None else row_bias.stride(0), kind=weights.kind,
                taps=weights.taps, stride=stride, before=before, upsample=int(upsample),
                cut_height=cut[0], cut_width=cut[1],
                geglu=int(weights.geglu), act=ACTIVATIONS[act],
            ),
            a, weights, a_scale, row_bias, residual, inverse, out,
        )  # fmt: skip
        return out

    def quantize(self, x: Tensor, inverse: Tensor) -> Tensor:
        """Floats [rows, channels] to bytes, with `inverse` [channels]."""
        rows, channels = x.shape
        check("x", x, rows, channels)
        check("inverse", inverse, channels)
        out = self.buffer(rows, channels, dtype=torch.uint8)
        self._add(
            calls.Quantize(
                x=x.data_ptr(), inverse=inverse.data_ptr(), bytes=out.data_ptr(), rows=rows, channels=channels
            ),
            x, inverse, out,
        )  # fmt: skip
        return out

    def layer_norm(
        self,
        x: Tensor,
        norm: torch.nn.LayerNorm,
        inverse: Tensor | None,
        *,
        row_scale: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """LayerNorm of [rows, channels], with weight and bias or without both.

        `row_scale` [images, channels], which may be a slice, multiplies each image's rows by its own; `residual` [rows,
        channels] is added. The result is bytes with `inverse` [channels], else floats; `out` may be `residual`.
        """
        rows, channels = x.shape
        weight = bias = None
        if norm.weight is not None:
            weight, bias = (
                as_floats("LayerNorm with a weight and no bias", tensor) for tensor in (norm.weight, norm.bias)
            )
        check("x", x, rows, channels)
        for name, tensor in (("weight", weight), ("bias", bias), ("inverse", inverse)):
            check(name, tensor, channels)
        after = modulation("layer_norm", x, row_scale, residual)
        out = self._out(out, rows, channels, inverse)
        self._add(
            calls.LayerNorm(
                x=x.data_ptr(), weight=pointer(weight), bias=pointer(bias), **ends(out, inverse), **after,
                rows=rows, channels=channels, eps=norm.eps,
            ),
            x, weight, bias, row_scale, residual, inverse, out,
        )  # fmt: skip
        return out

    def group_norm(
        self, x: Tensor, y: Tensor | None, norm: torch.nn.GroupNorm, *, images: int, silu: bool, inverse: Tensor | None
    ) -> Tensor:
        """GroupNorm of [images · pixels, channels], `y`'s channels after x's; bytes with `inverse`, else floats."""
        (rows, c1), c2 = x.shape, 0 if y is None else y.shape[-1]
        weight, bias = (as_floats("GroupNorm without weight and bias", tensor) for tensor in (norm.weight, norm.bias))
        check("x", x, rows, c1)
        check("y", y, rows, c2)
        for name, tensor in (("weight", weight), ("bias", bias), ("inverse", inverse)):
            check(name, tensor, c1 + c2)
        if rows % images or (c1 + c2) % norm.num_groups:
            raise ValueError(f"group_norm: {rows} pixels of {images} images, {c1 + c2} channels in {norm.num_groups}")
        out = self.buffer(rows, c1 + c2, dtype=dtype_for(inverse is not None))
        self._add(
            calls.GroupNorm(
                x=x.data_ptr(), y=pointer(y), weight=weight.data_ptr(), bias=bias.data_ptr(), **ends(out, inverse),
                images=images, pixels=rows // images, c1=c1, c2=c2, groups=norm.num_groups, eps=norm.eps,
                silu=int(silu),
            ),
            x, y, weight, bias, inverse, out,
        )  # fmt: skip
        return out

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        images: int,
        heads: int,
        scale: float,
        inverse: Tensor | None,
        kv_heads: int | None = None,
        lengths: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attention of q [images · tokens, heads · d] on k and v [images · keys, kv_heads · d], which may be slices.

        With int32 `lengths` [images], read when the program runs, an image attends to its first keys only, at least to
        one; with `causal`, a token to itself and to those before it.
        """
        rows, width = q.shape
        kv_heads = kv_heads or heads
        d = width // heads
        if d % HEAD_MULTIPLE or d * heads != width or not d:
            raise ValueError(f"heads of width {d} do not fit the kernels: it must be a multiple of {HEAD_MULTIPLE}")
        if heads % kv_heads:
            raise ValueError(f"attention: {heads} heads do not share {kv_heads} heads of keys evenly")
        if causal and k.shape[0] != rows:
            raise ValueError(f"attention: {rows} queries on {k.shape[0]} keys cannot be causal")
        if rows % images or k.shape[0] % images:
            raise ValueError(f"attention: {rows} queries and {k.shape[0]} keys are not those of {images} images")
        check("q", q, rows, width, rows_apart=True)
        for name, tensor in (("k", k), ("v", v)):
            check(name, tensor, k.shape[0], kv_heads * d, rows_apart=True)
        check("inverse", inverse, width)
        check("lengths", lengths, images, dtype=torch.int32)
        out = self.buffer(rows, width, dtype=dtype_for(inverse is not None))
        self._add(
            calls.Attention(
                q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), **ends(out, inverse),
                lengths=pointer(lengths), images=images, heads=heads, kv_heads=kv_heads,
                tokens=rows // images, keys=k.shape[0] // images, d=d,
                q_stride=q.stride(0), k_stride=k.stride(0), v_stride=v.stride(0), scale=scale, causal=int(causal),
            ),
            q, k, v, lengths, inverse, out,
        )  # fmt: skip
        return out

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Run calls `first` to `last` (default: all), in order, on as many threads as torch uses.

        Releases the GIL meanwhile.
        """
        if self._ready is None:
            program_calls = (calls.Call(s.KIND, ctypes.addressof(s)) for s in self._list)
            self._ready = (calls.Call * len(self._list))(*program_calls)
        torch.get_num_threads()  # OpenMP counts threads per calling thread: applies torch's setting here
        count = (len(self._list) if last is None else last) - first
        self._library.diptych_run(ctypes.byref(self._ready, first * ctypes.sizeof(calls.Call)), count)

    @property
    def last(self) -> Any:
        """The arguments of the last call added: its pointers may be changed between runs."""
        return self._list[-1]

    def __len__(self) -> int:
        return len(self._list)

    def _out(self, out: Tensor | None, rows: int, columns: int, inverse: Tensor | None) -> Tensor:
        """A call's output [rows, columns]: as given, or a new buffer; bytes with `inverse`, else floats."""
        dtype = dtype_for(inverse is not None)
        if out is None:
            return self.buffer(rows, columns, dtype=dtype)
        check("out", out, rows, columns, dtype=dtype)
        return out

    def _add(self, structure: Any, *owner: Any) -> None:
        self._list.append(structure)
        self._kept.extend(owner)
        self._ready = None
