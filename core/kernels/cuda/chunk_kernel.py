"""Triton prefill attention over pages on a GPU: a tile is some neighbouring rows of one sequence, and all query heads
of one key head.

The chunk's own keys and values are already in pages, like all earlier ones. The reference is
`decode_kernel.decode_reference`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from core.kernels.cuda.decode_kernel import limit
from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import kernel
from core.kernels.cuda.quantize import rounded
from core.kernels.kv_cache import PAGE

_BLOCK = 64  # keys at a time
_ROWS = 128  # of a tile: tokens times query heads


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


@kernel("table_stride")
def _chunks(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, table, positions, tiles, inverse, out, scale, table_stride,
    H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first, rows = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1)
    pages = table + tl.load(tiles + tile * 3 + 2) * table_stride
    r, channel = tl.arange(0, M), tl.arange(0, D)
    token, group = r // GROUP, r % GROUP
    real = (token < rows) & (group < G)
    position = tl.load(positions + first + token, token < rows, other=-1)
    heads = head * G + group
    offsets = ((first + token) * H + heads).to(tl.int64)[:, None] * D + channel[None]
    x = tl.load(q + offsets, real[:, None], other=0.0)
    count = tl.load(positions + first + rows - 1, rows > 0, other=-1) + 1  # positions count up
    top = tl.full([M], -1e30, tl.float32)  # finite: padding rows see nothing
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    begin = tl.maximum(tl.load(positions + first) + 1 - WINDOW, 0) // BLOCK * BLOCK if WINDOW else 0
    for start in range(begin, count, BLOCK):
        seen = start + tl.arange(0, BLOCK)
        valid = seen // SIZE * SIZE < count
        page = tl.load(pages + seen // SIZE, mask=valid, other=0).to(tl.int64) * KV + head
        within = seen % SIZE
        k = tl.load(keys + (page * SIZE + within)[:, None] * D + channel[None], mask=valid[:, None], other=0.0)
        # [D, BLOCK]; a page stores a channel's tokens contiguously
        at = page[None] * (D * SIZE) + channel[:, None] * SIZE + within[None]
        v = tl.load(values + tl.max_contiguous(tl.multiple_of(at, (1, SIZE)), (1, SIZE)), mask=valid[None], other=0.0)
        s = tl.dot(x, tl.trans(k.to(x.dtype)), input_precision="ieee") * scale  # [M, BLOCK]
        if key_scales is not None:
            s *= tl.load(key_scales + page * SIZE + within, mask=valid, other=0.0)[None]
        visible = seen[None] <= position[:, None]
        if WINDOW:
            visible &= seen[None] > position[:, None] - WINDOW
        s = limit(s, visible, CAP)
        above = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - above[:, None])
        fade = tl.exp2(top - above)
        total = total * fade + tl.sum(p, 1)
        if value_scales is not None:
            p *= tl.load(value_scales + page * SIZE + within, mask=valid, other=0.0)[None]
        acc = acc * fade[:, None] + tl.dot(p.to(x.dtype), tl.trans(v.to(x.dtype)), input_precision="ieee")
        top = above
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
    if len(cut):
        _chunks[(len(cut), kv_heads)](
            q, keys, values, key_scales, value_scales, table, positions, cut, inverse, out,
            scale * 1.4426950408889634, table.stride(0), heads, kv_heads, group, power(group),
            tokens_per_tile(group) * power(group), d, _BLOCK, PAGE, window, cap,
            num_warps=8 if d * power(group) >= 256 else 4, num_stages=3,
        )  # fmt: skip
    return out
