"""Triton products of a mixture of experts on a GPU: each row by the weights of its experts, which alone are read.

Four kernels: scores of the router and its choice; assignments of rows to experts sorted by expert; gate and up with
their activation; down, times the router's weight. The sort is on the device and all grids depend on the number of
rows only, so that a CUDA graph holds them. An assignment's result goes to a place of its own, and the next kernel sums
those of a row in their order (`fused_kernels`): so a row's bits do not depend on its companions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import enter, kernel, options
from core.kernels.cuda.quantize import rounded
from core.kernels.cuda.stream_kernel import activated

_ROWS = 16  # of a program of the router: always as many, so that a row's bits do not depend on their number
_CHUNK = 1024  # assignments that the sort reads at a time
_SHARED_BYTES = 232_448  # of Hopper


@dataclass(frozen=True, slots=True)
class GroupTile:
    """`rows` of one expert by `columns` of its product, of gate and of up alike, `depth` at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Assignments(NamedTuple):
    """Rows assigned to experts: number i is of row i // top.

    Blocks of `rows` places are of one expert each, `blocks` int32 [B] (-1: none); `order` int32 [B · rows] names the
    assignment in each place; one that is not below their number is padding.
    """

    order: Tensor
    blocks: Tensor
    rows: int


def choose(
    assignments: int, experts: int, depth: int, size: int, *, gated: bool, shared_bytes: int = _SHARED_BYTES
) -> GroupTile:
    """The tile for so many assignments, by how many an expert has of them, over `depth` elements of `size` bytes.

    Of few rows a program's weights are 64 rows of one line of shared memory, as in `stream_kernel.choose`.
    """
    mean = assignments / experts
    deep = min(max(128 // size, 32), max(32, power(depth)))
    if mean > 96:
        tile = GroupTile(128, 128, deep, 8, 4 if gated else 5)
    elif mean > 24:
        tile = GroupTile(64, 128, deep, 8, 4)
    else:
        tile = GroupTile(16, 64, deep, 4, 5 if gated else 8)
    stage = (tile.rows + tile.columns * (2 if gated else 1)) * deep * size
    return replace(tile, stages=max(1, min(tile.stages, shared_bytes // stage)))


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory of a program on this device."""
    if device.type != "cuda":
        return _SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types lack what follows
    return int(properties.shared_memory_per_block_optin)


@kernel("rows")
def _route(  # type: ignore[no-untyped-def]
    x, router, inverse, experts, weights, levels, rows, E: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, C: tl.constexpr, NORMALIZED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The first program of a block of rows chooses; the others write a part of the rows as `levels`."""
    enter(EARLY)
    m, part = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    valid, k = (m < rows)[:, None], tl.arange(0, BK)
    row = x + m.to(tl.int64)[:, None] * C
    if part > 0:
        if inverse is not None:
            column = (part - 1) * BK + k
            inside = valid & (column < C)[None]
            y = tl.load(row + column[None], inside, other=0.0).to(tl.float32)
            y *= tl.load(inverse + column, column < C, other=0.0)[None]
            tl.store(levels + m.to(tl.int64)[:, None] * C + column[None], rounded(y, levels.dtype.element_ty), inside)
    else:
        e, slot = tl.arange(0, WIDTH)[None], tl.arange(0, SLOTS)[None]
        acc = tl.zeros((BM, WIDTH), tl.float32)
        for start in range(0, C, BK):
            c = start + k
            a = tl.load(row + c[None], valid & (c < C)[None], other=0.0)
            w = tl.load(router + e * C + c[:, None], (e < E) & (c < C)[:, None], other=0.0)
            acc = tl.dot(a, w, acc, input_precision="ieee")
        acc = tl.where(tl.abs(acc) <= 1e30, acc, tl.where(acc > 0, 1e30, -1e30))  # NaN and infinity choose some too
        acc = tl.where(e < E, acc, float("-inf"))
        left = tl.exp(acc - tl.max(acc, 1)[:, None])
        total = tl.sum(left, 1)
        best, chosen = tl.zeros((BM, SLOTS), tl.float32), tl.zeros((BM, SLOTS), tl.int32)
        left = tl.where(e < E, left, -1.0)
        for j in tl.static_range(TOP):
            largest = tl.max(left, 1)
            first = tl.min(tl.where(left == largest[:, None], e, WIDTH), 1)  # of equals
            best, chosen = tl.where(slot == j, largest[:, None], best), tl.where(slot == j, first[:, None], chosen)
            left = tl.where(e == first[:, None], -1.0, left)
        if NORMALIZED:
            total = tl.sum(best, 1)
        to, taken = m[:, None] * TOP + slot, valid & (slot < TOP)
        tl.store(experts + to, chosen, taken)
        tl.store(weights + to, best / total[:, None], taken)


@kernel("count", "places")
def _sort(  # type: ignore[no-untyped-def]
    experts, order, blocks, count, places, E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program for each expert lists its assignments in order; the last one marks the blocks that nobody has."""
    enter(EARLY)
    own, index = tl.program_id(0), tl.arange(0, WIDTH)
    counts = tl.zeros([WIDTH], tl.int32)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(experts + at, at < count, other=E), WIDTH)
    padded = tl.where(index < E, (counts + BM - 1) // BM * BM, 0)
    first = tl.sum(tl.where(index < own, padded, 0), 0)
    end = tl.where(own < E, first + tl.sum(tl.where(index == own, padded, 0), 0), places)
    for start in range(first // BM, end // BM, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(blocks + block, tl.where(own < E, own, -1), block < end // BM)
    if own < E:
        for start in range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            mine = tl.load(experts + at, at < count, other=E) == own
            tl.store(order + first + tl.cumsum(mine.to(tl.int32), 0) - 1, at, mine)
            first += tl.sum(mine.to(tl.int32), 0)
        rest = first + tl.arange(0, BM)
        tl.store(order + rest, count, rest < end)


@kernel("count")
def _grouped(  # type: ignore[no-untyped-def]
    x, weight, scale, inverse, weights, order, blocks, out, count, TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WHOLE: tl.constexpr, INT8: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATED: gate and up of x's rows, to [assignments, N]; else of an assignment's own row, to [TOP, rows, N]."""
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_columns = n < N
    enter(EARLY)
    expert = tl.load(blocks + tl.program_id(0))
    if expert >= 0:
        slot = tl.load(order + tl.program_id(0) * BM + tl.arange(0, BM))
        valid = slot < count
        source = slot // TOP if GATED else slot
        first = expert * (2 * N if GATED else N) + n  # row of the stacked weights
        left = weight + first.to(tl.int64)[:, None] * K + k[None, :]
        right = x + tl.where(valid, source, 0).to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros((BN, BM), tl.int32 if INT8 else tl.float32)
        up = tl.zeros((BN, BM), tl.int32 if INT8 else tl.float32)
        for start in range(0, K, BK):
            if WHOLE:
                w = tl.load(left)
                a = tl.load(right, valid[None, :], other=0.0)
                v = tl.load(left + N * K) if GATED else w
            else:
                inside = start + k < K
                w = tl.load(left, in_columns[:, None] & inside[None, :], other=0.0)
                a = tl.load(right, valid[None, :] & inside[:, None], other=0.0)
                v = tl.load(left + N * K, in_columns[:, None] & inside[None, :], other=0.0) if GATED else w
            if INT8:
                acc = tl.dot(w, a, acc, out_dtype=tl.int32)
                if GATED:
                    up = tl.dot(v, a, up, out_dtype=tl.int32)
            else:
                acc = tl.dot(w, a, acc, input_precision="ieee")
                if GATED:
                    up = tl.dot(v, a, up, input_precision="ieee")
            left += BK
            right += BK
        y = acc.to(tl.float32)
        if scale is not None:
            y *= tl.load(scale + first, in_columns, other=0.0)[:, None]
        if GATED:
            u = up.to(tl.float32)
            if scale is not None:
                u *= tl.load(scale + first + N, in_columns, other=0.0)[:, None]
            y = activated(y, GELU) * u
            if inverse is not None:
                y *= tl.load(inverse + n, in_columns, other=0.0)[:, None]
            row = slot
        else:
            y *= tl.load(weights + slot, valid, other=0.0)[None, :]
            row = slot % TOP * (count // TOP) + slot // TOP
        to = out + row.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(to, rounded(y, out.dtype.element_ty), valid[None, :] & in_columns[:, None])


def route(
    x: Tensor, router: Tensor, top: int, *, normalized: bool, inverse: Tensor | None, dtype: torch.dtype, early: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts int32 [T, top] of x [T, C] by `router` [E, C], the likeliest first, and their weights fp32 [T, top].

    Third is x times `inverse` [C] as `dtype`, x itself without. `normalized`: the weights of a row have a sum of 1.
    """
    (rows, channels), count = x.shape, len(router)
    experts = torch.empty(rows, top, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, top, dtype=torch.float32, device=x.device)
    levels = None if inverse is None else torch.empty(rows, channels, dtype=dtype, device=x.device)
    width = max(16, power(count))
    depth = min(256 if width <= 32 else 128 if width <= 128 else 64, max(16, power(channels)))
    _route[(math.ceil(rows / _ROWS), 1 if levels is None else 1 + math.ceil(channels / depth))](
        x, router, inverse, experts, weights, levels, rows, count, width, top, power(top), channels, normalized, _ROWS,
        depth, early, num_warps=4, num_stages=4 if width <= 64 else 3, **options(early),
    )  # fmt: skip
    return experts, weights, x if levels is None else levels


def sort(experts: Tensor, count: int, rows: int, *, early: int = 0) -> Assignments:
    """Assignments to the experts int32 [T, top] of `count`, in blocks of `rows`."""
    assignments = experts.numel()
    blocks = (assignments + min(count, assignments) * (rows - 1)) // rows
    order = torch.empty(blocks * rows, dtype=torch.int32, device=experts.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    _sort[(count + 1,)](
        experts, order, owners, assignments, blocks * rows, count, power(count + 1), rows,
        min(_CHUNK, max(16, power(assignments))), early, num_warps=4, **options(early),
    )  # fmt: skip
    return Assignments(order, owners, rows)


def gated(
    x: Tensor, weight: Tensor, scale: Tensor | None, inverse: Tensor | None, dtype: torch.dtype,
    assignments: Assignments, top: int, count: int, tile: GroupTile, *, gelu: bool = False, early: int = 0,
) -> Tensor:  # fmt: skip
    """silu(gate) · up of each assignment, [T · top, N] as `dtype`, times `inverse` [N]; or GELU, by tanh.

    x [T, K] of the type of `weight` [E · 2N, K], which has of each of `count` experts the gate's rows first; `scale`
    fp32 [E · 2N].
    """
    out = torch.empty(len(x) * top, len(weight) // (2 * count), dtype=dtype, device=x.device)
    _launch(x, weight, scale, inverse, None, out, assignments, top, tile, early, gated=True, gelu=gelu)
    return out


def down(
    x: Tensor, weight: Tensor, scale: Tensor | None, weights: Tensor, dtype: torch.dtype, assignments: Assignments,
    count: int, tile: GroupTile, *, early: int = 0,
) -> Tensor:  # fmt: skip
    """The product of each assignment's row of x [T · top, K] times its of `weights` [T, top]: [top, T, N] as `dtype`.

    `weight` [E · N, K] of x's type, of `count` experts; `scale` fp32 [E · N].
    """
    rows, top = weights.shape
    out = torch.empty(top, rows, len(weight) // count, dtype=dtype, device=x.device)
    _launch(x, weight, scale, None, weights, out, assignments, top, tile, early, gated=False)
    return out


def _launch(
    x: Tensor, weight: Tensor, scale: Tensor | None, inverse: Tensor | None, weights: Tensor | None, out: Tensor,
    assignments: Assignments, top: int, tile: GroupTile, early: int, *, gated: bool, gelu: bool = False,
) -> None:  # fmt: skip
    order, blocks, rows = assignments
    columns, depth = out.shape[-1], x.shape[1]
    assert rows == tile.rows
    whole = columns % tile.columns == 0 and depth % tile.depth == 0
    _grouped[(len(blocks), math.ceil(columns / tile.columns))](
        x, weight, scale, inverse, weights, order, blocks, out, out.numel() // columns, top, columns, depth, whole,
        x.dtype == torch.int8, gated, gelu, tile.rows, tile.columns, tile.depth, early,
        num_warps=tile.warps, num_stages=tile.stages, **options(early),
    )  # fmt: skip
