"""Triton products of few rows with large weights on a GPU: decode is bound by reading the weights once, at full
bandwidth.

A program reads a tile of weights over a part of the depth for all rows; there are enough programs that every
multiprocessor has loads in flight. Partial sums are left unsummed: the next kernel sums them inline
(`fused_kernels`), in a fixed order. int8 sums are exact, so a row's bits depend on no tile; E4M3 and bf16 sums use
the same order for any number of rows up to `FEW`. References at the end.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.language import tl
from core.kernels.cuda.launching import enter, kernel, options
from core.kernels.cuda.quantize import rounded, to_type

MOST_ROWS = 256  # beyond, compute dominates and other kernels are better
FEW = 64  # up to which the split is the same
_H200_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class StreamTile:
    """`columns` of the product by `rows`, `depth` at a time, the whole depth cut into `splits` parts."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


@functools.cache
def choose(
    rows: int, columns: int, depth: int, size: int, *, gated: bool = False, processors: int = _H200_MULTIPROCESSORS
) -> StreamTile:
    """The tile for `rows` × `columns` over `depth` elements of `size` bytes; of a gated product half of `columns`.

    The model behind it: the bytes in flight that a multiprocessor needs are latency times bandwidth (4.8 TB/s · 0.8 µs
    / 132 = 29 KB); 64 weights, the fewest that its tensor cores take, by 128 bytes of depth, one line of a swizzled
    tile, six of them in flight, up to three programs per multiprocessor, are several times that. So the depth is split
    until there are about as many programs. A gated product is never split: its programs hold gate and up of the same
    columns and finish them. Nor are products as wide as a vocabulary. The tiles were the fastest, or within 3%, of
    their neighbours on an H200 (`lab/bench/kernels.py`). Small depths (of models for tests) get small tiles.
    """
    tile_rows = 16 if rows <= 16 else 64 if rows <= FEW else 128
    deep = min(max(128 // size, 32), max(32, 1 << (depth - 1).bit_length()))
    if gated:
        return StreamTile(tile_rows, 64, deep, 1, 4, 4 if rows <= FEW else 3)
    tile_columns = 128 if math.ceil(columns / 128) > 3 * processors and rows <= FEW else 64
    steps = math.ceil(depth / deep)
    tiles = math.ceil(columns / tile_columns) * (math.ceil(rows / tile_rows) if rows > FEW else 1)
    fitting = [n for n in (1, 2, 4, 7, 8, 14, 16) if steps % n == 0 and tiles * n <= 3 * processors and steps // n >= 4]
    return StreamTile(
        tile_rows,
        tile_columns,
        deep,
        max(fitting, default=1),
        4,
        {16: 6, 64: 6, 128: 4}[tile_rows] if tile_columns == 64 else 5,
    )


@kernel("rows")
def _stream(  # type: ignore[no-untyped-def]
    x, weight, out, rows, N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr,
    INT8: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weights are the left operand: tensor cores take 64 of their rows at a time, and as few as 16 of the others."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    k = split * (STEPS * BK) + tl.arange(0, BK)
    left = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    right = x + m[None, :] * K + k[:, None]
    valid = (m < rows)[None, :]
    acc = tl.zeros((BN, BM), tl.int32 if INT8 else tl.float32)
    enter(EARLY)
    for step in range(0, STEPS):
        if WHOLE:
            w = tl.load(left, eviction_policy="evict_first")
            a = tl.load(right, valid, other=0.0)
        else:
            inside = k + step * BK < K
            w = tl.load(left, (n < N)[:, None] & inside[None, :], other=0.0)
            a = tl.load(right, valid & inside[:, None], other=0.0)
        if INT8:  # noqa: SIM108
            acc = tl.dot(w, a, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(w, a, acc, input_precision="ieee")
        left += BK
        right += BK
    to = out + (split * rows + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(to, acc, valid & (n < N)[:, None])


@kernel()
def activated(x, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU, or GELU by tanh: x/2 · (1 + tanh y) is x · σ(2 y)."""
    # Below -80 the result is 0 in fp32; exp would overflow.
    y = tl.maximum(1.5957691216057308 * (x + 0.044715 * x * x * x), -80.0) if GELU else x
    return x / (1.0 + tl.exp(-y))


@kernel("rows")
def _gated(  # type: ignore[no-untyped-def]
    x, weight, scale, bias, inverse, shares, out, rows, N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, INT8: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GELU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    gate = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    up = gate + N * K
    right = x + m[None, :] * K + k[:, None]
    valid = (m < rows)[None, :]
    in_columns = n < N
    g = tl.zeros((BN, BM), tl.int32 if INT8 else tl.float32)
    u = tl.zeros((BN, BM), tl.int32 if INT8 else tl.float32)
    if scale is not None:  # constants: loaded while this program waits
        gate_scale = tl.load(scale + n, in_columns, other=0.0)
        up_scale = tl.load(scale + N + n, in_columns, other=0.0)
    if inverse is not None:
        out_step = tl.load(inverse + n, in_columns, other=0.0)
    enter(EARLY)
    for step in range(0, STEPS):
        if WHOLE:
            w = tl.load(gate, eviction_policy="evict_first")
            v = tl.load(up, eviction_policy="evict_first")
            a = tl.load(right, valid, other=0.0)
        else:
            inside = k + step * BK < K
            w = tl.load(gate, in_columns[:, None] & inside[None, :], other=0.0)
            v = tl.load(up, in_columns[:, None] & inside[None, :], other=0.0)
            a = tl.load(right, valid & inside[:, None], other=0.0)
        if INT8:
            g = tl.dot(w, a, g, out_dtype=tl.int32)
            u = tl.dot(v, a, u, out_dtype=tl.int32)
        else:
            g = tl.dot(w, a, g, input_precision="ieee")
            u = tl.dot(v, a, u, input_precision="ieee")
        gate += BK
        up += BK
        right += BK
    gs, us = g.to(tl.float32), u.to(tl.float32)
    if scale is not None:
        gs *= gate_scale[:, None]
        us *= up_scale[:, None]
    if bias is not None:
        gs += tl.load(bias + n, in_columns, other=0.0)[:, None]
        us += tl.load(bias + N + n, in_columns, other=0.0)[:, None]
    if shares is not None:
        share = shares + m.to(tl.int64)[None, :] * (2 * N) + n[:, None]
        gs += tl.load(share, valid & in_columns[:, None], other=0.0).to(tl.float32)
        us += tl.load(share + N, valid & in_columns[:, None], other=0.0).to(tl.float32)
    y = activated(gs, GELU) * us
    to = out + m.to(tl.int64)[None, :] * N + n[:, None]
    if inverse is not None:
        y *= out_step[:, None]
    tl.store(to, rounded(y, out.dtype.element_ty), valid & in_columns[:, None])


def _whole(tile: StreamTile, columns: int, depth: int) -> bool:
    return columns % tile.columns == 0 and depth % (tile.depth * tile.splits) == 0


def stream(
    x: Tensor, weight: Tensor, *, out: Tensor | None = None, tile: StreamTile | None = None, early: int = 0
) -> Tensor:
    """Sums over parts of the depth: x [T, K] · weight [N, K]ᵀ as [splits, T, N], int32 for int8, else fp32.

    T is at most `MOST_ROWS`. Both are int8, both E4M3, or both of one float type, contiguous. `out` [T, N] fp32
    receives the product of floats where it is not split. `tile` overrides the default. `early`: see `launching`.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    tile = tile or choose(rows, columns, depth, x.element_size())
    int8 = x.dtype == torch.int8
    if out is None or tile.splits > 1:
        partials = torch.empty(
            tile.splits, rows, columns, dtype=torch.int32 if int8 else torch.float32, device=x.device
        )
    else:
        partials = out[None]
    grid = (math.ceil(rows / tile.rows), math.ceil(columns / tile.columns), tile.splits)
    _stream[grid](
        x, weight, partials, rows, columns, depth, math.ceil(depth / tile.depth / tile.splits),
        _whole(tile, columns, depth), int8, tile.rows, tile.columns, tile.depth, early,
        num_warps=tile.warps, num_stages=tile.stages, **options(early),
    )  # fmt: skip
    return partials


def gated(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    gelu: bool = False,
    shares: Tensor | None = None,
    tile: StreamTile | None = None,
    early: int = 0,
) -> Tensor:
    """silu(gate) · up of x [T, K] and weight [2N, K] (the gate's rows first), [T, N] as `dtype`; or GELU, by tanh.

    scale and bias [2N] fp32. `shares` [T, 2N] are added to gate and up. With `inverse` [N], times that.
    """
    (rows, depth), columns = x.shape, weight.shape[0] // 2
    tile = tile or choose(rows, columns, depth, x.element_size(), gated=True)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    _gated[(math.ceil(rows / tile.rows), math.ceil(columns / tile.columns))](
        x, weight, scale, bias, inverse, shares, out, rows, columns, depth, math.ceil(depth / tile.depth),
        _whole(tile, columns, depth), x.dtype == torch.int8, tile.rows, tile.columns, tile.depth, gelu, early,
        num_warps=tile.warps, num_stages=tile.stages, **options(early),
    )  # fmt: skip
    return out


def stream_reference(x: Tensor, weight: Tensor) -> Tensor:
    """[1, T, N]."""
    product = x.double() @ weight.double().t()
    return product.to(torch.int32 if x.dtype == torch.int8 else torch.float32)[None]


def gated_reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    gelu: bool = False,
) -> Tensor:
    y = (x.double() @ weight.double().t()).float()
    y = y if scale is None else y * scale
    gate, up = (y if bias is None else y + bias).chunk(2, dim=1)
    y = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    return to_type(y if inverse is None else y * inverse, dtype)
