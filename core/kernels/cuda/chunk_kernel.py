"""Triton prefill attention over pages on a GPU: a tile is some neighbouring rows of one sequence, and all query heads
of one key head.

The chunk's own keys and values are already in pages, like all earlier ones. The reference is
`decode_kernel.decode_reference`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from core.kernels.cuda import chunk_hopper
from core.kernels.cuda.decode_kernel import blocks
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
    lowest = tl.load(positions + first, rows > 0, other=-1)
    count = tl.load(positions + first + rows - 1, rows > 0, other=-1) + 1  # positions count up
    top = tl.full([M], -1e30, tl.float32)  # finite: padding rows see nothing
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    begin = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK * BLOCK if WINDOW else 0
    unmasked_end = begin if WINDOW else (lowest + 1) // BLOCK * BLOCK
    top, total, acc = blocks(
        x, scale, keys, values, key_scales, value_scales, pages, head, position, top, total, acc, begin,
        unmasked_end, count, KV, D, BLOCK, SIZE, WINDOW, CAP, True,
    )  # fmt: skip
    top, total, acc = blocks(
        x, scale, keys, values, key_scales, value_scales, pages, head, position, top, total, acc, unmasked_end,
        count, count, KV, D, BLOCK, SIZE, WINDOW, CAP, False,
    )  # fmt: skip
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
    scale *= 1.4426950408889634
    if chunk_hopper.unsupported_reason(q, keys, out) is None:
        assert key_scales is not None and value_scales is not None
        if len(cut):
            chunk_hopper.chunks(
                q.contiguous(), keys, values, key_scales, value_scales, table, positions, cut, scale, out,
                tokens_per_tile(group), inverse=inverse, window=window, cap=cap,
            )  # fmt: skip
        return out
    if len(cut):
        _chunks[(len(cut), kv_heads)](
            q, keys, values, key_scales, value_scales, table, positions, cut, inverse, out, scale, table.stride(0),
            heads, kv_heads, group, power(group), tokens_per_tile(group) * power(group), d, _BLOCK, PAGE, window, cap,
            num_warps=8 if d * power(group) >= 256 else 4, num_stages=3,
        )  # fmt: skip
    return out
