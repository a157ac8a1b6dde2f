"""Attention of decoding rows over pages on a GPU: one Triton kernel, query heads of one key head packed into a tile.

A long sequence is cut into as many parts as there are programs for it, whose results a second kernel puts together. The
grid depends on the number of rows alone, so that it may be captured in a CUDA graph. Knows rows and pages; knows
nothing of models. The plain twin is `decode_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.quant.kernels.cuda import language
from core.quant.kernels.cuda.language import kernel, power, tl
from llm.pages import PAGE

_BLOCK = 64  # keys at a time
_LEAST = 16  # rows of a tile that tensor cores take


def lacks(keys: Tensor) -> str | None:
    """Why the kernel is not for this cache, or None."""
    if (why := language.lacks()) is not None:
        return why
    d = keys.shape[-2]
    return f"heads of width {d} are no power of two" if d != power(d) or d < _LEAST else None


@kernel
def _parts(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, table, positions, sequences, out, largest, sums, scale, table_stride,
    heads, part, KV: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(positions + row) + 1
    pages = table + tl.load(sequences + row) * table_stride
    group, channel = tl.arange(0, M), tl.arange(0, D)
    own = row * heads + head * G + group  # [M]: query heads that read this key head
    x = tl.load(q + own[:, None] * D + channel[None], mask=group[:, None] < G, other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    made = tl.zeros([M, D], tl.float32)
    start = split * part
    for first in range(start, tl.minimum(start + part, count), BLOCK):
        token = first + tl.arange(0, BLOCK)
        seen = token < tl.minimum(start + part, count)
        page = tl.load(pages + token // SIZE, mask=seen, other=0).to(tl.int64) * KV + head
        place = token % SIZE
        k = tl.load(
            keys + page[None] * (D * SIZE) + channel[:, None] * SIZE + place[None], mask=seen[None], other=0.0
        )  # [D, BLOCK]
        v = tl.load(
            values + (page[:, None] * SIZE + place[:, None]) * D + channel[None], mask=seen[:, None], other=0.0
        )  # [BLOCK, D]
        s = tl.dot(x, k.to(x.dtype), input_precision="ieee") * scale
        if INT8:
            s *= tl.load(key_scales + page * SIZE + place, mask=seen, other=0.0)[None]
        s = tl.where(seen[None], s, float("-inf"))
        above = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - above[:, None])
        fade = tl.exp(top - above)
        total = total * fade + tl.sum(p, 1)
        if INT8:
            p *= tl.load(value_scales + page * SIZE + place, mask=seen, other=0.0)[None]
        made = made * fade[:, None] + tl.dot(p.to(x.dtype), v.to(x.dtype), input_precision="ieee")
        top = above
    at = own * SPLITS + split
    tl.store(out + at[:, None] * D + channel[None], made, mask=group[:, None] < G)
    tl.store(largest + at, top, mask=group < G)
    tl.store(sums + at, total, mask=group < G)


@kernel
def _together(  # type: ignore[no-untyped-def]
    parts, largest, sums, out, D: tl.constexpr, SPLITS: tl.constexpr, ALL: tl.constexpr
):
    own = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, ALL), tl.arange(0, D)
    there = split < SPLITS
    top = tl.load(largest + own * SPLITS + split, mask=there, other=float("-inf"))
    share = tl.exp(top - tl.max(top, 0))  # of an empty part nothing
    total = tl.sum(tl.load(sums + own * SPLITS + split, mask=there, other=0.0) * share, 0)
    x = tl.load(parts + (own * SPLITS + split)[:, None] * D + channel[None], mask=there[:, None], other=0.0)
    tl.store(out + own * D + channel, (tl.sum(x * share[:, None], 0) / total).to(out.dtype.element_ty))


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
    splits: int = 8,
) -> Tensor:
    """q [T, heads, d] on one layer's pages, each row on its sequence up to its own position, to [T, heads, d].

    keys [pages, kv_heads, d, 16], values [pages, kv_heads, 16, d]: floats, or int8 with scales [pages, kv_heads, 16].
    table int32 [S, pages of one]; positions and sequences int32 [T].
    """
    rows, heads, d = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    part = -(-table.shape[1] * PAGE // splits)
    part = -(-part // _BLOCK) * _BLOCK
    splits = -(-table.shape[1] * PAGE // part)
    made = torch.empty(rows, heads, splits, d, device=q.device, dtype=torch.float32)
    largest = torch.empty(rows, heads, splits, device=q.device, dtype=torch.float32)
    sums = torch.empty_like(largest)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    int8 = key_scales is not None
    _parts[(rows, kv_heads, splits)](
        q.contiguous(), keys, values, key_scales if int8 else keys, value_scales if int8 else values, table, positions,
        sequences, made, largest, sums, scale, table.stride(0), heads, part,
        KV=kv_heads, G=group, M=max(_LEAST, power(group)), D=d, SPLITS=splits, BLOCK=_BLOCK, SIZE=PAGE, INT8=int8,
    )  # fmt: skip
    _together[(rows * heads,)](made, largest, sums, out, D=d, SPLITS=splits, ALL=power(splits))
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
) -> Tensor:
    """The same, row by row in fp32."""
    if key_scales is not None and value_scales is not None:
        keys, values = keys.float() * key_scales[:, :, None], values.float() * value_scales[..., None]
    group = q.shape[1] // keys.shape[1]
    made = []
    for x, position, sequence in zip(q.float(), positions.tolist(), sequences.tolist(), strict=True):
        at = table[sequence, : position // PAGE + 1].long()
        k = keys[at].float().permute(1, 0, 3, 2).flatten(1, 2)[:, : position + 1].repeat_interleave(group, 0)
        v = values[at].float().transpose(0, 1).flatten(1, 2)[:, : position + 1].repeat_interleave(group, 0)
        scores = torch.einsum("hd,htd->ht", x, k) * scale
        made.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    return torch.stack(made).to(q.dtype)
