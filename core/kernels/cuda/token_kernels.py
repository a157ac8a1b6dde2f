"""Triton kernels at the ends of a decoder's step: the tokens that it reads, and those that it returns, the most likely
ones or drawn.

Each takes the place of four to seven of torch's, each of which takes a microsecond or two of a step of decoding, or of
several passes over the logits of many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import enter, kernel, options

_BLOCK = 4096  # of a vocabulary
_ROWS = 256


@kernel("rows")
def _known(  # type: ignore[no-untyped-def]
    tokens, sequences, unknown, out, rows, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    enter(EARLY)
    token = tl.load(tokens + at, inside, other=0)
    place = (-1 - token) * stride + tl.load(sequences + at, inside, other=0)
    before = tl.load(unknown + place, inside & (token < 0), other=0)
    tl.store(out + at, tl.where(token < 0, tl.maximum(before, 0), token), inside)


@kernel("count")
def _largest(logits, values, tokens, V, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    enter(EARLY)
    x = tl.load(logits + row * V + at, at < V, other=float("-inf"))
    strange = (at < V) & ~(tl.abs(x) < float("inf"))  # comparisons with NaN are false
    value, place = tl.max(x, 0, return_indices=True)
    value = tl.where(tl.max(strange.to(tl.int32), 0) > 0, float("nan"), value)
    tl.store(values + row * count + block, value)
    tl.store(tokens + row * count + block, block * BLOCK + place)


@kernel("count")
def _likeliest(  # type: ignore[no-untyped-def]
    values, tokens, owners, latest, out, count, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    enter(EARLY)
    owner = tl.load(owners + row)
    x = tl.load(values + row * count + at, at < count, other=float("-inf"))
    strange = tl.max((x != x).to(tl.int32), 0) > 0
    _, place = tl.max(tl.where(x != x, float("-inf"), x), 0, return_indices=True)
    token = tl.where(strange, -1, tl.load(tokens + row * count + place))
    tl.store(out + row, token.to(tl.int64))
    tl.store(latest + owner, token)


@kernel("count")
def _masses(  # type: ignore[no-untyped-def]
    logits, rows, temperatures, tops, masses, V, count, BLOCK: tl.constexpr
):
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(rows + n).to(tl.int64) * V + at, at < V, other=float("-inf"))
    x /= tl.load(temperatures + n).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), -3.0e38)  # finite where all tokens are excluded
    tl.store(tops + n * count + block, top)
    tl.store(masses + n * count + block, tl.sum(tl.exp(x - top).to(tl.float64), 0))


@kernel("count")
def _draw(  # type: ignore[no-untyped-def]
    logits, rows, temperatures, u, tops, masses, out, V, count, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COUNT)
    top = tl.load(tops + n * count + c, c < count, other=float("-inf"))
    share = tl.exp(top - tl.max(top, 0)).to(tl.float64)
    sums = tl.cumsum(tl.load(masses + n * count + c, c < count, other=0.0) * share, 0)
    goal = tl.load(u + n) * tl.max(sums, 0)
    block = tl.sum((sums <= goal).to(tl.int32), 0)
    before = tl.max(tl.where(c < block, sums, 0.0), 0)
    left = (goal - before) / tl.sum(tl.where(c == block, share, 0.0), 0)
    i = tl.arange(0, BLOCK)
    at = block * BLOCK + i
    x = tl.load(logits + tl.load(rows + n).to(tl.int64) * V + at, at < V, other=float("-inf"))
    x /= tl.load(temperatures + n).to(tl.float32)
    mass = tl.exp(x - tl.max(tl.where(c == block, top, float("-inf")), 0))
    place = tl.sum((tl.cumsum(mass.to(tl.float64), 0) <= left).to(tl.int32), 0)
    place = tl.minimum(place, tl.max(tl.where(mass > 0, i, 0), 0))  # sums of a block may end below its share
    tl.store(out + n, tl.minimum(block * BLOCK + place, V - 1).to(tl.int64))


def known(tokens: Tensor, sequences: Tensor, unknown: Tensor, out: Tensor, *, early: int = 0) -> Tensor:
    """Tokens int32 [T] into `out`, which is returned: in place of a token of -1 - j the sequence's of `unknown` [j, S],
    or 0 where that is negative too.
    """
    block = min(_ROWS, power(len(tokens)))
    _known[(-(-len(tokens) // block),)](
        tokens, sequences, unknown, out, len(tokens), unknown.stride(0), block, early, num_warps=1, **options(early)
    )
    return out


def likeliest(logits: Tensor, owners: Tensor, latest: Tensor, out: Tensor, *, early: int = 0) -> Tensor:
    """The most likely token of each row of logits [L, V] fp32, of equals the first, -1 where they are not all finite.

    They go to `out` int64 [L], which is returned, and into `latest` int32, at `owners` int32 [L].
    """
    rows, vocabulary = logits.shape
    block = min(_BLOCK, power(vocabulary))
    count = -(-vocabulary // block)
    values = torch.empty(rows, count, device=logits.device)
    tokens = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    if rows:
        _largest[(rows, count)](logits, values, tokens, vocabulary, count, block, early, num_warps=4, **options(early))
        _likeliest[(rows,)](
            values, tokens, owners, latest, out, count, power(count), early, num_warps=1, **options(early)
        )
    return out


def draw(logits: Tensor, rows: Tensor, temperatures: Tensor, u: Tensor) -> Tensor:
    """A token of each of these rows [n] of logits [L, V] fp32, by the inverse of its distribution's sums: int64 [n].

    `rows`, `temperatures` and `u` in [0, 1) of each are fp64 [n].
    """
    vocabulary = logits.shape[1]
    block = min(_BLOCK, power(vocabulary))
    count = -(-vocabulary // block)
    tops = torch.empty(len(rows), count, device=logits.device)
    masses = torch.empty(len(rows), count, dtype=torch.float64, device=logits.device)
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    _masses[(len(rows), count)](logits, rows, temperatures, tops, masses, vocabulary, count, block, num_warps=4)
    _draw[(len(rows),)](
        logits, rows, temperatures, u, tops, masses, out, vocabulary, count, block, power(count), num_warps=8
    )
    return out
