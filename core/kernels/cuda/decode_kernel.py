"""Triton decode attention over pages on a GPU: one kernel, with the query heads of one key head packed into a tile.

A long sequence is split into parts, by its own length only, which a second kernel combines: so a row's bits depend
neither on other rows nor on the maximum sequence length. The grid depends only on the number of rows and on `reach`, so
that it can be captured in a CUDA graph. The reference is `decode_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.kernels.cuda import decode_hopper, language
from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import enter, kernel, options
from core.kernels.cuda.quantize import rounded, to_type
from core.kernels.kv_cache import PAGE, KVCache

PART = 256  # tokens of a part, at least
PARTS = 16  # parts of a sequence, at most
_UNIT = 128  # a part's tokens are a multiple of it, and a block has no more
_LEAST = 16  # minimum tile rows of the tensor cores

# Keys at a time, warps, and blocks in flight, by bytes per number: the fastest of those tried on an H200
# (`lab/bench/kernels.py`).
shapes = {1: (32, 2, 2), 2: (32, 2, 2), 4: (64, 4, 2)}


def unsupported_reason(cache: KVCache) -> str | None:
    """Return why the kernel does not support this cache, or None."""
    if (reason := language.unsupported_reason()) is not None:
        return reason
    if not cache.turned:
        return "its pages lie as a CPU reads them"
    d = cache.head_dim
    return f"heads of width {d} are no power of two" if d != power(d) or d < _LEAST else None


def part_count(tokens: int) -> int:
    """The number of parts that a sequence of so many tokens is split into."""
    part = max(PART, -(-tokens // (PARTS * _UNIT)) * _UNIT)
    return max(1, -(-tokens // part))


@kernel()
def _part(count, PART: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens per part of a sequence of `count`."""
    return tl.maximum(PART, (count + PARTS * UNIT - 1) // (PARTS * UNIT) * UNIT)


@kernel()
def _row(index, positions, place):  # type: ignore[no-untyped-def]
    """The row in this place, whether there is one, and how many tokens it attends to, of padding rows none."""
    row = place
    if index is not None:
        row = tl.load(index + place)
    stored = row >= 0
    row = tl.maximum(row, 0)
    return row, stored, tl.where(stored, tl.load(positions + row) + 1, 0)


@kernel()
def _store_whole(  # type: ignore[no-untyped-def]
    out, inverse, acc, total, rows, heads, channel, real, D: tl.constexpr
):
    """The result of a sequence that is one part: `acc` by the sum of weights, `real` heads only."""
    y = acc / tl.maximum(total, 1e-30)[:, None]
    to = rows[:, None] * D + channel[None]
    if inverse is not None:
        y *= tl.load(inverse + heads[:, None] * D + channel[None], real[:, None], other=0.0)
    tl.store(out + to, rounded(y, out.dtype.element_ty), real[:, None])


@kernel()
def _limit(s, visible, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Visible scores, which are times log2(e); with CAP a score x is CAP · tanh(x / CAP)."""
    if CAP != 0:
        s = CAP * 1.4426950408889634 * (1 - 2 / (tl.exp2(s * (2 / CAP)) + 1))
    return tl.where(visible, s, float("-inf"))


@kernel()
def blocks(  # type: ignore[no-untyped-def]
    x, scale, keys, values, key_scales, value_scales, pages, head, position, top, total, acc, start, end, count,
    KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and result of rows x [M, D] at `position` after the keys from `start` to `end`, of
    `count`; of WHOLE blocks none is masked. `scale` is that of scores for powers of two.
    """
    channel = tl.arange(0, D)
    for first in range(start, end, BLOCK):
        seen = first + tl.arange(0, BLOCK)
        # By whole pages, so that loads stay wide: values beyond the sequence's end in its last page are finite.
        valid = (seen >= 0) if WHOLE else seen // SIZE * SIZE < count
        page = tl.load(pages + seen // SIZE, mask=valid, other=0).to(tl.int64) * KV + head
        within = seen % SIZE
        k = tl.load(keys + (page * SIZE + within)[:, None] * D + channel[None], mask=valid[:, None], other=0.0)
        # [D, BLOCK]; a page stores a channel's tokens contiguously
        at = page[None] * (D * SIZE) + channel[:, None] * SIZE + within[None]
        v = tl.load(values + tl.max_contiguous(tl.multiple_of(at, (1, SIZE)), (1, SIZE)), mask=valid[None], other=0.0)
        s = tl.dot(x, tl.trans(k.to(x.dtype)), input_precision="ieee") * scale
        if key_scales is not None:
            s *= tl.load(key_scales + page * SIZE + within, mask=valid, other=0.0)[None]
        if CAP != 0 or not WHOLE:
            visible = seen[None] <= position[:, None]
            if WINDOW:
                visible &= seen[None] > position[:, None] - WINDOW
            s = _limit(s, visible, CAP)
        above = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - above[:, None])
        fade = tl.exp2(top - above)
        total = total * fade + tl.sum(p, 1)
        if value_scales is not None:
            p *= tl.load(value_scales + page * SIZE + within, mask=valid, other=0.0)[None]
        acc = acc * fade[:, None] + tl.dot(p.to(x.dtype), tl.trans(v.to(x.dtype)), input_precision="ieee")
        top = above
    return top, total, acc


@kernel("table_stride")
def _parts(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, table, positions, sequences, index, inverse, out, made_parts, largest,
    sums, scale, table_stride, H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    REACH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`scale` is for powers of two: that of the scores times log2(e)."""
    enter(EARLY)
    place, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, stored, count = _row(index, positions, place)
    part = _part(count, PART, PARTS, UNIT)
    start = split * part
    if (start < count) | (split == 0):
        pages = table + tl.load(sequences + row) * table_stride
        group, channel = tl.arange(0, M), tl.arange(0, D)
        heads = head * G + group  # [M]: query heads that share this key head
        x = tl.load(q + (row * H + heads)[:, None] * D + channel[None], mask=(group < G)[:, None], other=0.0)
        end = tl.minimum(start + part, count)
        begin = tl.maximum(count - WINDOW, 0) if WINDOW else 0  # each block has a token from here on
        top, total, acc = blocks(
            x, scale, keys, values, key_scales, value_scales, pages, head, tl.zeros([M], tl.int32) + count - 1,
            tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32),
            tl.maximum(start, begin // BLOCK * BLOCK), end, count, KV, D, BLOCK, SIZE, WINDOW, CAP, False,
        )  # fmt: skip
        real = (group < G) & stored
        if REACH == 1:
            _store_whole(out, inverse, acc, total, row * H + heads, heads, channel, real, D)
        else:
            at = (place * H + heads) * REACH + split
            tl.store(made_parts + at[:, None] * D + channel[None], acc, real[:, None])
            tl.store(largest + at, top, real)
            tl.store(sums + at, total, real)


@kernel()
def _together(  # type: ignore[no-untyped-def]
    made_parts, largest, sums, positions, index, inverse, out, H: tl.constexpr, D: tl.constexpr, REACH: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Combine all possible parts, in one order whatever the grid's reach."""
    enter(EARLY)
    place, head = tl.program_id(0), tl.program_id(1)
    row, stored, count = _row(index, positions, place)
    part = _part(count, PART, PARTS, UNIT)
    split, channel = tl.arange(0, PARTS), tl.arange(0, D)
    valid = (split * part < count) | (split == 0)
    at = (place * H + head) * REACH + split
    top = tl.load(largest + at, mask=valid, other=float("-inf"))
    maximum = tl.maximum(tl.max(top, 0), -1e30)
    share = tl.exp2(top - maximum)
    total = tl.maximum(tl.sum(tl.load(sums + at, mask=valid, other=0.0) * share, 0), 1e-30)
    x = tl.load(made_parts + at[:, None] * D + channel[None], mask=valid[:, None], other=0.0)
    y = tl.sum(x * share[:, None], 0) / total
    to, real = out + (row * H + head) * D + channel, (channel < D) & stored
    if inverse is not None:
        y *= tl.load(inverse + head * D + channel)
    tl.store(to, rounded(y, out.dtype.element_ty), real)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    table: Tensor,
    positions: Tensor,
    sequences: Tensor,
    scale: float,
    *,
    parts: int | None = None,
    index: Tensor | None = None,
    inverse: Tensor | None = None,
    out: Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    early: int = 0,
) -> Tensor:
    """q [T, heads, d] on one layer's pages, each row on its sequence up to its own position, to [T, heads, d].

    keys [pages, kv_heads, 16, d], values [pages, kv_heads, d, 16]: floats, or int8 or E4M3 with scales [pages,
    kv_heads, 16]. table int32 [S, pages of one]; positions and sequences int32 [T]. A row at position -1 reads nothing
    and gets zeros. `parts` is at least the `reach` of the longest sequence; default: that of the table's width. Only
    rows `index`, if given, of which -1 is none. `inverse` [heads · d] multiplies the result, which `out` receives in
    its type. `window`: only the last so many tokens; `cap`: a score s is cap · tanh(s / cap); 0: none.
    """
    rows, heads, d = q.shape
    rows = rows if index is None else len(index)
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    parts = parts or part_count(table.shape[1] * PAGE)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    partials = largest = sums = None
    if parts > 1:
        partials = torch.empty(rows, heads, parts, d, device=q.device, dtype=torch.float32)
        largest = torch.empty(rows, heads, parts, device=q.device, dtype=torch.float32)
        sums = torch.empty_like(largest)
    q, scale, part = q.contiguous(), scale * 1.4426950408889634, PART
    if decode_hopper.unsupported_reason(q, keys, out) is None:
        assert key_scales is not None and value_scales is not None
        to = None if partials is None or largest is None or sums is None else (partials, largest, sums)
        part = decode_hopper.PART
        decode_hopper.parts(
            q, keys, values, key_scales, value_scales, table, positions, sequences, index, inverse, out, to, scale,
            reach=parts, window=window, cap=cap, early=bool(early),
        )  # fmt: skip
    else:
        block, warps, stages = shapes[keys.element_size()]
        _parts[(rows, kv_heads, parts)](
            q, keys, values, key_scales, value_scales, table, positions, sequences, index, inverse, out, partials,
            largest, sums, scale, table.stride(0), heads, kv_heads, group, max(_LEAST, power(group)), d, parts,
            PART, PARTS, _UNIT, block, PAGE, window, cap, early, num_warps=warps, num_stages=stages, **options(early),
        )  # fmt: skip
    if parts > 1:
        _together[(rows, heads)](
            partials, largest, sums, positions, index, inverse, out, heads, d, parts, part, PARTS, _UNIT, early,
            num_warps=max(1, d // 128), **options(early),
        )  # fmt: skip
    return out


def decode_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    table: Tensor,
    positions: Tensor,
    sequences: Tensor,
    scale: float,
    *,
    inverse: Tensor | None = None,
    dtype: torch.dtype | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """The reference of `decode`: row by row in fp64, as `dtype` or q's."""
    keys, values = keys.double(), values.double()
    if key_scales is not None and value_scales is not None:
        keys, values = keys * key_scales[..., None], values * value_scales[:, :, None]
    group = q.shape[1] // keys.shape[1]
    outputs = []
    for x, position, sequence in zip(q.double(), positions.tolist(), sequences.tolist(), strict=True):
        at = table[sequence, : position // PAGE + 1].long()
        k = keys[at].transpose(0, 1).flatten(1, 2)[:, : position + 1].repeat_interleave(group, 0)
        v = values[at].permute(1, 0, 3, 2).flatten(1, 2)[:, : position + 1].repeat_interleave(group, 0)
        scores = torch.einsum("hd,htd->ht", x, k) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores[:, : max(0, position + 1 - window) if window else 0] = -torch.inf
        outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    y = torch.stack(outputs)
    y = y if inverse is None else y * inverse.view(y.shape[1:])
    return to_type(y, dtype or (q.dtype if inverse is None else torch.int8))
