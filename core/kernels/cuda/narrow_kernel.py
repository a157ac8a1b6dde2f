"""A Triton kernel that restricts distributions to their top k and top p, without sorting them.

The value of the last token that is kept is found digit by digit in the bits of fp32 numbers, whose order is that of the
numbers: 15 passes over a row, in place of a sort. The reference is the sort in `llm.sampling.sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import kernel

_BLOCK = 4096


@kernel()
def _cut(p, goal, V, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest bits for which the numbers of at least as much (if COUNT, how many they are) sum up to `goal`."""
    bits = tl.full([], 0, tl.int32)
    for digit in range(15):  # of two bits; numbers up to 1 have 30
        step = tl.full([], 1, tl.int32) << (28 - 2 * digit)
        first = tl.zeros([BLOCK], tl.float64)
        second = tl.zeros([BLOCK], tl.float64)
        third = tl.zeros([BLOCK], tl.float64)
        for start in tl.range(0, V, BLOCK, num_stages=3):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(p + at, at < V, other=-1.0)
            key = x.to(tl.int32, bitcast=True)
            amount = x.to(tl.float64) * 0 + 1 if COUNT else x.to(tl.float64)
            first += tl.where(key >= bits + step, amount, 0.0)
            second += tl.where(key >= bits + 2 * step, amount, 0.0)
            third += tl.where(key >= bits + 3 * step, amount, 0.0)
        enough = (tl.sum(first) >= goal).to(tl.int32) + (tl.sum(second) >= goal).to(tl.int32)
        bits += step * (enough + (tl.sum(third) >= goal).to(tl.int32))
    return bits


@kernel()
def _above(p, bits, V, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the numbers above these bits, or how many they are."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(p + at, at < V, other=-1.0)
        amount = x.to(tl.float64) * 0 + 1 if COUNT else x.to(tl.float64)
        total += tl.where(x.to(tl.int32, bitcast=True) > bits, amount, 0.0)
    return tl.sum(total)


@kernel()
def _narrow(p, top_k, top_p, out, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    p, out = p + row * V, out + row * V
    k, share = tl.load(top_k + row), tl.load(top_p + row)
    bits = tl.full([], 0, tl.int32)  # of the last value that is kept
    ties = tl.full([], V, tl.float64)  # of tokens that have this value, those that are kept
    if k > 0:
        bits = _cut(p, k.to(tl.float64), V, True, BLOCK)
        ties = k.to(tl.float64) - _above(p, bits, V, True, BLOCK)
    if share < 1:
        least = bits.to(tl.float32, bitcast=True).to(tl.float64)
        goal = share * (_above(p, bits, V, False, BLOCK) + tl.where(least > 0, ties * least, 0.0))
        lowest = bits
        bits = tl.maximum(_cut(p, goal, V, False, BLOCK), lowest)
        value = bits.to(tl.float32, bitcast=True).to(tl.float64)
        needed = tl.ceil((goal - _above(p, bits, V, False, BLOCK)) / tl.where(value > 0, value, 1.0))
        ties = tl.where(bits > lowest, needed, tl.minimum(needed, ties))
    before = tl.full([], 0, tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(p + at, at < V, other=-1.0)
        key = x.to(tl.int32, bitcast=True)
        equal = (key == bits).to(tl.int32)
        kept = (key > bits) | ((equal > 0) & (before + tl.cumsum(equal, 0) <= ties))
        tl.store(out + at, tl.where(kept, x, 0.0), at < V)
        before += tl.sum(equal)


def narrow(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """p [n, V] fp32, between 0 and 1, zero but for each row's `top_k` [n] int64 largest (0: all), and of these but for
    the fewest that reach the share `top_p` [n] fp64 of their sum. Of equal ones the first are kept.
    """
    p = p.contiguous()
    out = torch.empty_like(p)
    if len(p):
        _narrow[(len(p),)](p, top_k, top_p, out, p.shape[1], min(_BLOCK, power(p.shape[1])), num_warps=16)
    return out
