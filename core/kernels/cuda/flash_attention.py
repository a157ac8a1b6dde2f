"""Attention in Triton with a length for each image, causality and fewer heads of keys than of queries, for any GPU.

Follows FlashAttention-2 (Dao, 2023): a program holds a tile of queries of one head and runs over the keys. Its blocks
of keys begin at key 0 whatever surrounds them, so that an image's bits depend neither on padding nor on other images.
The reference is `attention.attention_reference`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import kernel
from core.kernels.cuda.quantize import levels, per_channel

LEAST = 16  # width of a head at least: of the tensor cores' tiles

# Queries of a tile, keys of a block, warps, and blocks in flight, by the bytes of a head: they fit into the 99 KB of
# shared memory that Ada has, and into registers.
shapes = {128: (128, 64, 4, 3), 256: (128, 64, 8, 2), 512: (64, 32, 4, 2)}


@kernel()
def _blocks(  # type: ignore[no-untyped-def]
    x, keys, values, k_row, v_row, row, top, total, acc, start, end, count, scale, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and result after the keys from `start` to `end`; of WHOLE blocks none is masked."""
    channel = tl.arange(0, WIDTH)[None, :]
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        if WHOLE and WIDTH == D:
            k = tl.load(keys + token.to(tl.int64)[:, None] * k_row + channel)
            v = tl.load(values + token.to(tl.int64)[:, None] * v_row + channel)
        else:
            valid = (token < count)[:, None] & (channel < D)
            k = tl.load(keys + token.to(tl.int64)[:, None] * k_row + channel, valid, other=0.0)
            v = tl.load(values + token.to(tl.int64)[:, None] * v_row + channel, valid, other=0.0)
        s = tl.dot(x, tl.trans(k), input_precision="ieee")
        if not WHOLE:
            seen = (token < count)[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= row[:, None])
            s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s * scale - (above * scale)[:, None])
        fade = tl.exp2((top - above) * scale)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = above
    return top, total, acc


@kernel("queries", "keys")
def _flash(  # type: ignore[no-untyped-def]
    q, k, v, lengths, inverse, out, queries, keys, q_image, q_row, q_head, k_image, k_row, k_head, v_image, v_row,
    v_head, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr,
    INT8: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`scale` is for powers of two: that of the scores times log2(e)."""
    first = tl.program_id(0) * M
    image, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    row, channel = first + tl.arange(0, M), tl.arange(0, WIDTH)[None, :]
    count, limit = keys, queries
    if lengths is not None:
        count = tl.load(lengths + image)
        limit = count
    inside = (row < queries)[:, None] & (channel < D)
    start = q + image * q_image + head * q_head
    x = tl.load(start + row.to(tl.int64)[:, None] * q_row + channel, inside, other=0.0)
    k += image * k_image + head // G * k_head
    v += image * v_image + head // G * v_head
    top = tl.full([M], -1e30, tl.float32)  # finite: the difference of two infinities is no number
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    end = tl.where(first < limit, count, 0)  # a tile of padding reads nothing
    unmasked_end = end // BLOCK * BLOCK
    if CAUSAL:
        end = tl.minimum(end, first + M)
        unmasked_end = tl.minimum(unmasked_end, first // BLOCK * BLOCK)
    top, total, acc = _blocks(
        x, k, v, k_row, v_row, row, top, total, acc, 0, unmasked_end, count, scale, D, WIDTH, BLOCK, True, CAUSAL
    )
    top, total, acc = _blocks(
        x, k, v, k_row, v_row, row, top, total, acc, unmasked_end, end, count, scale, D, WIDTH, BLOCK, False, CAUSAL
    )
    y = tl.where((row < limit)[:, None], acc / tl.maximum(total, 1e-30)[:, None], 0.0)
    to = out + (image * queries + row)[:, None] * (H * D) + head * D + channel
    if inverse is not None:
        if STEP:
            y *= tl.load(inverse + head * D + channel, channel < D, other=0.0)
        else:
            y *= tl.load(inverse)
        tl.store(to, levels(y, INT8), inside)
    else:
        tl.store(to, y.to(out.dtype.element_ty), inside)


def flash(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, inverse: Tensor | None, out: Tensor, *, causal: bool
) -> None:
    """Compute `attention.attention` into `out` [B, Sq, H · d], contiguous."""
    images, queries, heads, d = q.shape
    width = max(LEAST, power(d))
    rows, block, warps, stages = shapes[max(128, min(512, width * q.element_size()))]
    step = 0 if inverse is None else per_channel(inverse, heads * d)
    _flash[(-(-queries // rows), images * heads)](
        q, k, v, lengths, inverse, out, queries, k.shape[1],
        *(x.stride(i) for x in (q, k, v) for i in (0, 1, 2)),
        math.log2(math.e) / math.sqrt(d), heads, heads // k.shape[2], d, step, causal, out.dtype == torch.int8, width,
        rows, block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
