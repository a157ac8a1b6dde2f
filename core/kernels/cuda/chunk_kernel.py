"""Triton prefill attention over pages on a GPU: a tile is some neighbouring rows of one sequence, and all query heads
of one key head.

The chunk's own keys and values are already in pages, like all earlier ones. The reference is
`decode_kernel.decode_reference`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from core.kernels.cuda.decode_kernel import exp2, limit
from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import kernel
from core.kernels.cuda.quantize import rounded
from core.kernels.kv_cache import PAGE

_BLOCK = 64  # keys at a time
_ROWS = 128  # of a tile: tokens times query heads
# Of products in E4M3, up to heads of this width: keys at a time, warps, blocks in flight, and programs that share a
# tile. Each has half of its rows, since more do not fit into registers.
_IN_8_BITS, _WIDE = (128, 4, 2, 2), 128


def tokens_per_tile(group: int) -> int:
    """The number of tokens a tile holds, of `group` query heads each."""
    return max(16, _ROWS // power(group))


def tiles(runs: Iterable[Sequence[int]], group: int) -> list[tuple[int, int, int]]:
    """Cut runs (first row, rows, sequence) into tiles of the same form."""
    size = tokens_per_tile(group)
    return [
        (first + start, min(size, count - start), sequence)
        for first, count, sequence in runs
        for start in range(0, count, size)
    ]


@kernel()
def _blocks(  # type: ignore[no-untyped-def]
    x, unit, keys, values, key_scales, value_scales, pages, head, position, top, total, acc, largest, start, end,
    count, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and result after the keys from `start` to `end`; of WHOLE blocks none is masked.

    `unit` is the scale of scores for powers of two; with FP8 of each row [M], and `largest` the running maximum of the
    values' scales, which the result is to be multiplied by.
    """
    channel = tl.arange(0, D)
    for first in range(start, end, BLOCK):
        seen = first + tl.arange(0, BLOCK)
        valid = (seen >= 0) if WHOLE else seen // SIZE * SIZE < count
        page = tl.load(pages + seen // SIZE, mask=valid, other=0).to(tl.int64) * KV + head
        within = seen % SIZE
        k = tl.load(keys + (page * SIZE + within)[:, None] * D + channel[None], mask=valid[:, None], other=0.0)
        # [D, BLOCK]; a page stores a channel's tokens contiguously
        at = page[None] * (D * SIZE) + channel[:, None] * SIZE + within[None]
        v = tl.load(values + tl.max_contiguous(tl.multiple_of(at, (1, SIZE)), (1, SIZE)), mask=valid[None], other=0.0)
        s = tl.dot(x, tl.trans(k.to(x.dtype)), input_precision="ieee")
        if key_scales is not None:
            s *= tl.load(key_scales + page * SIZE + within, mask=valid, other=0.0)[None]
        s *= unit
        if CAP != 0 or not WHOLE:
            visible = seen[None] <= position[:, None]
            if WINDOW:
                visible &= seen[None] > position[:, None] - WINDOW
            s = limit(s, visible, CAP)
        if FP8:
            # Not of what others left behind the end: the largest scale is that of all weights.
            value_scale = tl.load(value_scales + page * SIZE + within, mask=seen < count, other=0.0)
            grown = tl.maximum(largest, tl.max(value_scale, 0))
            above = tl.maximum(top, tl.max(s, 1))
            p = exp2(s - above[:, None], FAST)
            fade = exp2(top - above, FAST)
            total = total * fade + tl.sum(p, 1)
            p *= (value_scale * (448.0 / grown))[None]
            acc = tl.dot(p.to(tl.float8e4nv), tl.trans(v), acc * (fade * (largest / grown))[:, None])
            largest = grown
        else:
            above = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - above[:, None])
            fade = tl.exp2(top - above)
            total = total * fade + tl.sum(p, 1)
            if value_scales is not None:
                p *= tl.load(value_scales + page * SIZE + within, mask=valid, other=0.0)[None]
            acc = acc * fade[:, None] + tl.dot(p.to(x.dtype), tl.trans(v.to(x.dtype)), input_precision="ieee")
        top = above
    return top, total, acc, largest


@kernel("table_stride")
def _chunks(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, table, positions, tiles, inverse, out, scale, table_stride,
    H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr,
    FAST: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """FP8: of keys and values in E4M3, which are multiplied as they are, by queries and weights in E4M3.

    A query's row has a scale of its own, and weights that of the largest value so far. PARTS programs share a tile.
    """
    tile, head = tl.program_id(0) // PARTS, tl.program_id(1)
    skipped = tl.program_id(0) % PARTS * (M // GROUP)  # tokens of the tile that are others'
    first, rows = tl.load(tiles + tile * 3) + skipped, tl.maximum(tl.load(tiles + tile * 3 + 1) - skipped, 0)
    pages = table + tl.load(tiles + tile * 3 + 2) * table_stride
    r, channel = tl.arange(0, M), tl.arange(0, D)
    token, group = r // GROUP, r % GROUP
    real = (token < rows) & (group < G)
    position = tl.load(positions + first + token, token < rows, other=-1)
    heads = head * G + group
    offsets = ((first + token) * H + heads).to(tl.int64)[:, None] * D + channel[None]
    x = tl.load(q + offsets, real[:, None], other=0.0)
    lowest = tl.load(positions + first, rows > 0, other=-1)
    count = tl.load(positions + first + rows - 1, rows > 0, other=-1) + 1  # positions count up
    unit = scale
    if FP8:
        most = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-30)[:, None]
        x, unit = (x.to(tl.float32) * (448.0 / most)).to(tl.float8e4nv), most * (scale / 448.0)
    top = tl.full([M], -1e30, tl.float32)  # finite: padding rows see nothing
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    begin = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK * BLOCK if WINDOW else 0
    unmasked_end = begin if WINDOW else (lowest + 1) // BLOCK * BLOCK
    largest = tl.max(tl.zeros([1], tl.float32), 0) + 1e-30
    top, total, acc, largest = _blocks(
        x, unit, keys, values, key_scales, value_scales, pages, head, position, top, total, acc, largest, begin,
        unmasked_end, count, KV, D, BLOCK, SIZE, WINDOW, CAP, FP8, FAST, True,
    )  # fmt: skip
    top, total, acc, largest = _blocks(
        x, unit, keys, values, key_scales, value_scales, pages, head, position, top, total, acc, largest, unmasked_end,
        count, count, KV, D, BLOCK, SIZE, WINDOW, CAP, FP8, FAST, False,
    )  # fmt: skip
    if FP8:
        acc *= largest / 448.0
    y = acc / tl.maximum(total, 1e-30)[:, None]
    if inverse is not None:
        y *= tl.load(inverse + heads[:, None] * D + channel[None], real[:, None], other=0.0)
    tl.store(out + offsets, rounded(y, out.dtype.element_ty), real[:, None])


def chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    table: Tensor,
    positions: Tensor,
    cut: Tensor,
    scale: float,
    out: Tensor,
    *,
    inverse: Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Run `decode_kernel.decode` for the rows in `cut` (int32 [tiles, 3], by `tiles`), into their rows of `out`.

    A tile of no rows does nothing.
    """
    _, heads, d = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    in_8_bits = keys.dtype == torch.float8_e4m3fn and 32 <= d <= _WIDE
    block, warps, stages, parts = _IN_8_BITS if in_8_bits else (_BLOCK, 8 if d * power(group) >= 256 else 4, 3, 1)
    rows = tokens_per_tile(group) * power(group) // parts
    if len(cut):
        _chunks[(len(cut) * parts, kv_heads)](
            q, keys, values, key_scales, value_scales, table, positions, cut, inverse, out,
            scale * 1.4426950408889634, table.stride(0), heads, kv_heads, group, power(group),
            rows, d, block, PAGE, window, cap, in_8_bits, q.is_cuda, parts, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out
