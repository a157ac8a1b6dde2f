"""Triton products with weights of 4 bits on a GPU, for few rows and for many: weights are unpacked in registers.

The layout is that of `core.quant.int4`: an int16 holds a level of each quarter of a block of 256 inputs, so that a tile
of words, shifted, is four operands without any exchange between threads. Two levels become bf16 by three instructions:
four bits are the mantissa of a number in 128…143, from which 136 is taken. The sum of each group of 128 inputs is
scaled in fp32.

Few rows are bound by reading the weights (as in `stream_kernel`): the depth is split, and the next kernel sums the
parts. For many rows each program unpacks its weights again for its tile of rows. References at the end.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.language import tl
from core.kernels.cuda.launching import enter, kernel, options
from core.kernels.cuda.quantize import rounded, to_type
from core.kernels.cuda.stream_kernel import FEW, activated

QUARTER = 64  # words of a block: levels of 4 · 64 inputs
_PROCESSORS = 132  # of an H200
_SHARED_BYTES = 227 << 10  # of a block on Hopper


class Int4Weight(NamedTuple):
    """A weight [N, K] as the kernels read it; `packed` makes it."""

    words: Tensor  # int16 [N, blocks · 64]
    scale: Tensor  # int32 [blocks, N]: of both groups of a block, in fp16 or bf16
    zero: Tensor | None  # int32 [blocks, N]: likewise; None: all are zero
    half: bool  # whether scales are fp16, not bf16

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self[:3] if tensor is not None)


def packed(words: Tensor, scale: Tensor, zero: Tensor | None) -> Int4Weight:
    """The kernels' form of words int16 [N, blocks · 64], scale [N, groups] in 16 bits and zero int8 [N, groups]."""

    def pairs(groups: Tensor) -> Tensor:
        return groups.contiguous().view(torch.int32).t().contiguous()

    zeros = None if zero is None else pairs(zero.to(scale.dtype))
    return Int4Weight(words, pairs(scale), zeros, scale.dtype == torch.float16)


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """`columns` of the product by `rows`, the whole depth cut into `splits` parts."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


@functools.cache
def choose(
    rows: int, columns: int, blocks: int, *, gated: bool = False, processors: int = _PROCESSORS,
    shared_bytes: int = _SHARED_BYTES,
) -> Int4Tile:  # fmt: skip
    """The tile for `rows` × `columns` over a depth of `blocks`; of a gated product `columns` counts gate and up.

    Five of the smallest programs are on a multiprocessor at once, and the depth is split until about all places are
    taken, alike for all rows up to `FEW`. A stage is as long as a block, in which a row of inputs takes four times the
    bytes of a column of weights; Triton holds one stage less of these. The tiles are those of an H100
    (`benchmarks/weights.py`).
    """
    tile = _tile(rows, columns, blocks, processors, gated=gated)
    words, inputs = 2 * QUARTER * tile.columns, 8 * QUARTER * tile.rows
    return replace(tile, stages=max(1, min(tile.stages, (shared_bytes + words) // (words + inputs))))


def _tile(rows: int, columns: int, blocks: int, processors: int, *, gated: bool) -> Int4Tile:
    if rows > FEW:
        return Int4Tile(128, 128, 1, 8, 3)
    tiles = math.ceil(columns / 64)
    fitting = [n for n in (1, 2, 4, 7, 8) if blocks % n == 0 and tiles * n <= 4 * processors]
    splits = 1 if gated else max(fitting, default=1)
    if rows <= 16:
        return Int4Tile(16, 64, splits, 4, 3)
    return Int4Tile(32, 128, splits, 4, 3) if rows <= 32 else Int4Tile(64, 64, splits, 4, 3)


@kernel()
def _quarter(word, INDEX: tl.constexpr, TYPE: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels -8…7 that these int16 hold of quarter INDEX, as TYPE; in bf16 two at a time where PACKED.

    0x4300 is 128 in bf16, 0x4308 is 136, and 0xEA is (a & b) | c.
    """
    if not PACKED:
        return (((word.to(tl.int32) >> (4 * INDEX)) & 15) - 8).to(TYPE)
    elif INDEX == 0:
        return tl.inline_asm_elementwise(
            """{.reg .b32 a, one, low; mov.b32 one, 0x3F803F80; mov.b32 low, 0xC308C308;
            lop3.b32 a, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, a, one, low;}""",
            "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif INDEX == 1:
        return tl.inline_asm_elementwise(
            """{.reg .b32 a, one, low; mov.b32 one, 0x3F803F80; mov.b32 low, 0xC308C308; shr.u32 a, $1, 4;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, a, one, low;}""",
            "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif INDEX == 2:
        return tl.inline_asm_elementwise(
            """{.reg .b32 a, one, low; mov.b32 one, 0x3F803F80; mov.b32 low, 0xC308C308; shr.u32 a, $1, 8;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, a, one, low;}""",
            "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{.reg .b32 a, one, low; mov.b32 one, 0x3F803F80; mov.b32 low, 0xC308C308; shr.u32 a, $1, 12;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, a, one, low;}""",
            "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@kernel()
def _of_pair(pair, INDEX: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the two numbers in 16 bits that each int32 holds, in fp32."""
    bits = (pair >> (16 * INDEX)).to(tl.int16)
    if HALF:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.bfloat16, bitcast=True).to(tl.float32)


@kernel()
def _group(  # type: ignore[no-untyped-def]
    word, a, b, pair, zeros, INDEX: tl.constexpr, ASYMMETRIC: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr
):
    """The scaled product [BN, BM] of a block's first or second group, whose inputs are `a` and `b` [64, BM]."""
    TYPE: tl.constexpr = a.dtype
    y = tl.dot(_quarter(word, 2 * INDEX, TYPE, PACKED), a, input_precision="ieee")
    y = tl.dot(_quarter(word, 2 * INDEX + 1, TYPE, PACKED), b, y, input_precision="ieee")
    if ASYMMETRIC:  # each row of the product with ones is the sum of the inputs
        ones = tl.full((word.shape[0], a.shape[0]), 1.0, TYPE)
        sums = tl.dot(ones, b, tl.dot(ones, a, input_precision="ieee"), input_precision="ieee")
        y -= sums * _of_pair(zeros, INDEX, HALF)[:, None]
    return y * _of_pair(pair, INDEX, HALF)[:, None]


@kernel()
def _inputs(right, at, valid, INDEX: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A quarter of a block's inputs [64, BM]; `at` [64] are the first quarter's."""
    if WHOLE:
        return tl.load(right + 64 * INDEX, valid, other=0.0)
    else:
        return tl.load(right + 64 * INDEX, valid & (at + 64 * INDEX < K)[:, None], other=0.0)


@kernel("rows")
def _int4(  # type: ignore[no-untyped-def]
    x, words, scale, zero, bias, residual, inverse, out, rows, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr,
    STEPS: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, HALF: tl.constexpr,
    PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weights are the left operand, as in `stream_kernel`. A gated tile has gate and up of half as many columns."""
    ROWS: tl.constexpr = 2 * N if GATED else N  # of the weight
    ACROSS: tl.constexpr = BN // 2 if GATED else BN
    ASYMMETRIC: tl.constexpr = zero is not None
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.arange(0, BN)
    column = tl.program_id(1) * ACROSS + row % ACROSS
    in_columns, n = column < N, column + row // ACROSS * N
    first, j = tl.program_id(2) * STEPS, tl.arange(0, 64)
    left = words + n.to(tl.int64)[:, None] * (BLOCKS * 64) + first * 64 + j[None, :]
    k = first * 256 + j
    right = x + m.to(tl.int64)[None, :] * K + k[:, None]
    units = first * ROWS + n
    valid = (m < rows)[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    # Scales are loaded a step ahead: Triton's pipeline holds operands of products only.
    next_pair = tl.load(scale + units, in_columns, other=0)
    next_zeros = tl.load(zero + units, in_columns, other=0) if ASYMMETRIC else next_pair
    enter(EARLY)
    for step in range(0, STEPS):
        pair, zeros = next_pair, next_zeros
        units += tl.where(step + 1 < STEPS, ROWS, 0)
        next_pair = tl.load(scale + units, in_columns, other=0)
        next_zeros = tl.load(zero + units, in_columns, other=0) if ASYMMETRIC else next_pair
        if WHOLE:  # noqa: SIM108
            word = tl.load(left, eviction_policy="evict_first")
        else:
            word = tl.load(left, in_columns[:, None], other=0)
        a, b = _inputs(right, k, valid, 0, K, WHOLE), _inputs(right, k, valid, 1, K, WHOLE)
        c, d = _inputs(right, k, valid, 2, K, WHOLE), _inputs(right, k, valid, 3, K, WHOLE)
        acc += _group(word, a, b, pair, zeros, 0, ASYMMETRIC, HALF, PACKED)
        acc += _group(word, c, d, pair, zeros, 1, ASYMMETRIC, HALF, PACKED)
        left += 64
        right += 256
        k += 256
    if bias is not None:
        acc += tl.load(bias + n, in_columns, other=0.0)[:, None]
    at = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    if GATED:
        g, u = tl.split(tl.permute(tl.reshape(acc, (2, ACROSS, BM)), (1, 2, 0)))
        acc = activated(g, GELU) * u
        if inverse is not None:
            acc *= tl.load(inverse + at, at < N, other=0.0)[:, None]
    inside = valid & (at < N)[:, None]
    to = (tl.program_id(2) * rows + m).to(tl.int64)[None, :] * N + at[:, None]
    if residual is not None:
        acc += tl.load(residual + to, inside, other=0.0).to(tl.float32)
    tl.store(out + to, rounded(acc, out.dtype.element_ty), inside)


def _launch(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, residual: Tensor | None, inverse: Tensor | None, out: Tensor,
    tile: Int4Tile, early: int, *, gated: bool, gelu: bool = False,
) -> None:  # fmt: skip
    """`out` is [splits, T, N]."""
    (rows, depth), (blocks, columns) = x.shape, weight.scale.shape
    columns, across = (columns // 2, tile.columns // 2) if gated else (columns, tile.columns)
    whole = columns % across == 0 and depth % (4 * QUARTER) == 0
    _int4[(math.ceil(rows / tile.rows), math.ceil(columns / across), tile.splits)](
        x, weight.words, weight.scale, weight.zero, bias, residual, inverse, out, rows, columns, depth, blocks,
        blocks // tile.splits, whole, gated, gelu, weight.half, x.is_cuda and x.dtype == torch.bfloat16,
        tile.rows, tile.columns, early, num_warps=tile.warps, num_stages=tile.stages, **options(early),
    )  # fmt: skip


def _chosen(rows: int, x: Tensor, weight: Int4Weight, *, gated: bool = False) -> Int4Tile:
    blocks, columns = weight.scale.shape
    shared_bytes = _shared_bytes(x.device.index) if x.is_cuda else _SHARED_BYTES
    return choose(rows, columns, blocks, gated=gated, shared_bytes=shared_bytes)


@functools.cache
def _shared_bytes(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types lack what follows
    return int(properties.shared_memory_per_block_optin)


def stream(x: Tensor, weight: Int4Weight, *, tile: Int4Tile | None = None, early: int = 0) -> Tensor:
    """Sums over parts of the depth: x [T, K] · weight [N, K]ᵀ as fp32 [splits, T, N]. `early`: see `launching`."""
    tile = tile or _chosen(len(x), x, weight)
    out = torch.empty(tile.splits, len(x), weight.scale.shape[1], device=x.device)
    _launch(x, weight, None, None, None, out, tile, early, gated=False)
    return out


def gated(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, inverse: Tensor | None, dtype: torch.dtype, *,
    gelu: bool = False, tile: Int4Tile | None = None, early: int = 0,
) -> Tensor:  # fmt: skip
    """silu(gate) · up of x [T, K] and weight [2N, K] (the gate's rows first), times `inverse` [N], as `dtype` [T, N];
    or GELU, by tanh.

    bias [2N] and `inverse` in fp32, or absent.
    """
    tile = tile or _chosen(len(x), x, weight, gated=True)
    out = torch.empty(len(x), weight.scale.shape[1] // 2, dtype=dtype, device=x.device)
    _launch(x, weight, bias, None, inverse, out, tile, early, gated=True, gelu=gelu)
    return out


def product(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, residual: Tensor | None = None, *,
    out: Tensor | None = None, tile: Int4Tile | None = None,
) -> Tensor:  # fmt: skip
    """x · Wᵀ + bias + residual of many rows [T, K], as x's type [T, N]. `out` may be `residual`. bias in fp32."""
    tile = tile or _chosen(FEW + 1, x, weight)
    if out is None:
        out = torch.empty(len(x), weight.scale.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, residual, None, out, tile, 0, gated=False)
    return out


def product_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The product with a weight [N, K] of plain numbers, in x's type."""
    y = (x.double() @ weight.double().t()).float()
    y = y if bias is None else y + bias
    return (y if residual is None else y + residual.float()).to(x.dtype)


def gated_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, inverse: Tensor | None, dtype: torch.dtype, *, gelu: bool = False
) -> Tensor:  # fmt: skip
    gate, up = product_reference(x.float(), weight, bias).chunk(2, dim=1)
    y = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    return to_type(y if inverse is None else y * inverse, dtype)
