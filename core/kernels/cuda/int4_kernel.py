"""Triton products with weights of 4 bits on a GPU, for few rows and for many: weights are unpacked in registers.

The layouts are those of `core.quant`: a word holds a code of each quarter, or each half, of a block of 256 inputs, so
that a tile of words, shifted, is four operands, or two, without any exchange between threads. Three kinds of codes:

- integers for inputs in floating point (`core.quant.int4`): two codes become bf16 by three instructions, as the
  mantissa of a number in 128…143, from which 136 is taken. The sum of each group of 128 inputs is scaled in fp32.
- integers for inputs in INT8 (`core.quant.w4a8`): four codes become INT8 by three or four instructions, one of them a
  multiplication and addition of a word that carries nothing from byte to byte. Sums are exact, and scaled once.
- NVFP4 (`core.quant.fp4`): two codes are shifted into sign, exponent and mantissa of bf16, and scaled in it, exactly.

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

QUARTER = 64  # words of a block: codes of 4 · 64 inputs
_PROCESSORS = 132  # of an H200
_SHARED_BYTES = 227 << 10  # of a block on Hopper


class Int4Weight(NamedTuple):
    """A weight [N, K] as the kernels read it; `packed`, `packed_w4a8` and `packed_fp4` make it."""

    words: Tensor  # int16 [N, blocks · 64], or int8 [N, blocks · 128]
    groups: Tensor  # of each block: a scale of both halves, int32 [blocks, N]; both bytes of `W4A8Linear.group`, int16
    zero: Tensor | None = None  # int32 [blocks, N]: as scales; None: all are zero
    half: bool = False  # whether scales are fp16, not bf16
    scale: Tensor | None = None  # fp32 [N]: of the whole sum

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if isinstance(tensor, Tensor))

    @property
    def kind(self) -> str:
        return "w4a8" if self.words.dtype == torch.int8 else "int4" if self.scale is None else "fp4"

    @property
    def columns(self) -> int:
        return len(self.words)

    @property
    def blocks(self) -> int:
        return self.words.shape[1] * self.words.element_size() // (2 * QUARTER)


def packed(words: Tensor, scale: Tensor, zero: Tensor | None) -> Int4Weight:
    """The kernels' form of words int16 [N, blocks · 64], scale [N, groups] in 16 bits and zero int8 [N, groups]."""
    zeros = None if zero is None else _by_block(zero.to(scale.dtype))
    return Int4Weight(words, _by_block(scale), zeros, scale.dtype == torch.float16)


def packed_w4a8(words: Tensor, group: Tensor, scale: Tensor) -> Int4Weight:
    """The kernels' form of the parts of a `core.quant.w4a8.W4A8Linear`."""
    return Int4Weight(words, _by_block(group), scale=scale)


def packed_fp4(words: Tensor, scale: Tensor, total: Tensor) -> Int4Weight:
    """The kernels' form of the parts of a `core.quant.fp4.Fp4Linear`."""
    return Int4Weight(words, scale.view(torch.uint8), scale=total)


def _by_block(groups: Tensor) -> Tensor:
    """[N, groups] as [blocks, N], two neighbours in one number."""
    wide = torch.int16 if groups.element_size() == 1 else torch.int32
    return groups.contiguous().view(wide).t().contiguous()


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
    rows: int, columns: int, blocks: int, *, size: int = 2, gated: bool = False, processors: int = _PROCESSORS,
    shared_bytes: int = _SHARED_BYTES,
) -> Int4Tile:  # fmt: skip
    """The tile for `rows` × `columns` over a depth of `blocks`, for inputs of `size` bytes; of a gated product
    `columns` counts gate and up.

    Five of the smallest programs are on a multiprocessor at once, and the depth is split until about all places are
    taken, alike for all rows up to `FEW`. A stage is as long as a block, in which a row of inputs takes four times the
    bytes of a column of weights, in INT8 twice; Triton holds one stage less of these. The tiles are those of an H100.
    """
    tile = _tile(rows, columns, blocks, processors, size, gated=gated)
    words, inputs = 2 * QUARTER * tile.columns, 4 * QUARTER * size * tile.rows
    return replace(tile, stages=max(1, min(tile.stages, (shared_bytes + words) // (words + inputs))))


def _tile(rows: int, columns: int, blocks: int, processors: int, size: int, *, gated: bool) -> Int4Tile:
    if rows > FEW:
        return Int4Tile(128, 128, 1, 8, 3)
    tiles = math.ceil(columns / 64)
    fitting = [n for n in (1, 2, 4, 7, 8) if blocks % n == 0 and tiles * n <= 4 * processors]
    splits = 1 if gated else max(fitting, default=1)
    if rows <= 8:
        return Int4Tile(8, 128, splits, 4, 3)
    int8 = size == 1
    if rows <= 16:
        return Int4Tile(16, 64, splits, 2 if int8 else 4, 3)
    if rows <= 32:
        return Int4Tile(32, 128, splits, 4, 3)
    return Int4Tile(64, 128, splits, 8, 3) if int8 else Int4Tile(64, 64, splits, 4, 3)


@kernel()
def _quarter(word, INDEX: tl.constexpr, TYPE: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels -8…7 that these int16 hold of quarter INDEX, as TYPE; in bf16 two at a time where PACKED.

    0x4300 is 128 in bf16, 0x3F80 is 1, 0xC308 is -136, and 0xEA is (a & b) | c.
    """
    if not PACKED:
        return (((word.to(tl.int32) >> (4 * INDEX)) & 15) - 8).to(TYPE)
    else:
        return tl.inline_asm_elementwise(
            f"""{{.reg .b32 a, one, low; mov.b32 one, 0x3F803F80; mov.b32 low, 0xC308C308; shr.u32 a, $1, {4 * INDEX};
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, a, one, low;}}""",
            "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@kernel()
def _fp4_quarter(word, scale, INDEX: tl.constexpr, TYPE: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The E2M1 that these int16 hold of quarter INDEX times `scale` (`_fp4_scale`), as TYPE.

    Shifted to bits 6 to 8 of a bf16, exponent and mantissa are a number that is 2^-126 times as large, zero and the
    subnormal one half included. 0x7E80 and 0x7B80 are 2^126 and 2^120 in bf16.
    """
    UP: tl.constexpr = INDEX < 2
    BITS: tl.constexpr = 6 - 4 * INDEX if UP else 4 * INDEX - 6
    if PACKED:
        return tl.inline_asm_elementwise(
            f"""{{.reg .b32 a, b, low, up, more;
            mov.b32 low, 0x80008000; mov.b32 up, 0x7E807E80; mov.b32 more, 0x7B807B80;
            shl.b32 a, $1, {12 - 4 * INDEX}; {"shl" if UP else "shr"}.b32 b, $1, {BITS}; and.b32 b, b, 0x01C001C0;
            lop3.b32 a, a, low, b, 0xEA; fma.rn.bf16x2 a, a, up, low; fma.rn.bf16x2 b, $2, more, low;
            fma.rn.bf16x2 $0, a, b, low;}}""",
            "=r,r,r", [word, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        code = word.to(tl.int32) >> (4 * INDEX)
        value = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        return (value * ((scale.to(tl.int32) << 16).to(tl.float32, bitcast=True) * 1.329227995784916e36)).to(TYPE)


@kernel()
def _int8_half(word, step, start, INDEX: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The INT8 weights that these bytes hold of half INDEX: step · code + start - 128; four at a time where PACKED.

    step · code + start are 0…255, so that of a product of four bytes nothing is carried; `start` is in each byte then.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            f"""{{.reg .b32 a; shr.u32 a, $1, {4 * INDEX}; and.b32 a, a, 0x0F0F0F0F; mad.lo.u32 a, a, $2, $6;
            xor.b32 $0, a, 0x80808080;}}""",
            "=r,r,r,r,r,r,r,r,r,r", [word, step, start], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (((word.to(tl.int32) >> (4 * INDEX)) & 15) * step + start - 128).to(tl.int8)


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
def _fp4_scale(scale, INDEX: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of a bf16 for each input [BN, 64] of quarter INDEX, 2^-120 times its scale: E4M3's, shifted to exponent
    and mantissa. `scale` are pointers to a block's first.
    """
    four = tl.load(scale[:, None] + 4 * INDEX + tl.arange(0, 4)[None, :]).to(tl.int16) << 4
    return tl.reshape(tl.broadcast_to(four[:, :, None], (BN, 4, 16)), (BN, 64))


@kernel()
def _words(left, in_columns, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        return tl.load(left, eviction_policy="evict_first")
    else:
        return tl.load(left, in_columns[:, None], other=0)


@kernel()
def _inputs(right, at, valid, INDEX: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A quarter or half of a block's inputs [WIDTH, BM]; `at` [WIDTH] are the first one's."""
    if WHOLE:
        return tl.load(right + WIDTH * INDEX, valid, other=0)
    else:
        return tl.load(right + WIDTH * INDEX, valid & (at + WIDTH * INDEX < K)[:, None], other=0)


@kernel()
def _fp4_block(  # type: ignore[no-untyped-def]
    word, a, b, c, d, scale, acc, BN: tl.constexpr, PACKED: tl.constexpr
):
    """`acc` and the product of a block, whose inputs are `a` to `d` [64, BM]; `scale` are pointers to its scales."""
    TYPE: tl.constexpr = a.dtype
    left = _fp4_quarter(word, _fp4_scale(scale, 0, BN), 0, TYPE, PACKED)
    acc = tl.dot(left, a, acc, input_precision="ieee")
    left = _fp4_quarter(word, _fp4_scale(scale, 1, BN), 1, TYPE, PACKED)
    acc = tl.dot(left, b, acc, input_precision="ieee")
    left = _fp4_quarter(word, _fp4_scale(scale, 2, BN), 2, TYPE, PACKED)
    acc = tl.dot(left, c, acc, input_precision="ieee")
    left = _fp4_quarter(word, _fp4_scale(scale, 3, BN), 3, TYPE, PACKED)
    return tl.dot(left, d, acc, input_precision="ieee")


@kernel()
def _int8_block(word, a, b, pair, acc, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`acc` and the product of a block, whose inputs are `a` and `b` [128, BM]; `pair` are its groups' bytes."""
    SPREAD: tl.constexpr = 0x01010101 if PACKED else 1
    bits = pair.to(tl.int32) & 0xFFFF
    step, other = (bits & 15) + 1, ((bits >> 8) & 15) + 1
    start = (128 - ((bits >> 4) & 15) * step) * SPREAD
    other_start = (128 - (bits >> 12) * other) * SPREAD
    acc = tl.dot(_int8_half(word, step[:, None], start[:, None], 0, PACKED), a, acc, out_dtype=tl.int32)
    return tl.dot(_int8_half(word, other[:, None], other_start[:, None], 1, PACKED), b, acc, out_dtype=tl.int32)


@kernel()
def _finish(  # type: ignore[no-untyped-def]
    acc, scale, bias, residual, inverse, out, n, in_columns, at, valid, to, N: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """Write the sums [BN, BM] of weights' rows `n` to `out` at `to`, finished, for its columns `at`."""
    inside = valid & (at < N)[:, None]
    y = acc.to(tl.float32)
    if scale is not None:
        y *= tl.load(scale + n, in_columns, other=0.0)[:, None]
    if bias is not None:
        y += tl.load(bias + n, in_columns, other=0.0)[:, None]
    if GATED:
        g, u = tl.split(tl.permute(tl.reshape(y, (2, at.shape[0], y.shape[1])), (1, 2, 0)))
        y = activated(g, GELU) * u
        if inverse is not None:
            y *= tl.load(inverse + at, at < N, other=0.0)[:, None]
    if residual is not None:
        y += tl.load(residual + to, inside, other=0.0).to(tl.float32)
    tl.store(out + to, rounded(y, out.dtype.element_ty), inside)


@kernel("rows")
def _product(  # type: ignore[no-untyped-def]
    x, words, groups, zero, scale, bias, residual, inverse, out, rows, N: tl.constexpr, K: tl.constexpr,
    BLOCKS: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    KIND: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Weights are the left operand, as in `stream_kernel`. A gated tile has gate and up of half as many columns."""
    ROWS: tl.constexpr = 2 * N if GATED else N  # of the weight
    ACROSS: tl.constexpr = BN // 2 if GATED else BN
    INT8: tl.constexpr = KIND == "w4a8"
    WIDTH: tl.constexpr = 128 if INT8 else 64  # words of a block
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.arange(0, BN)
    column = tl.program_id(1) * ACROSS + row % ACROSS
    in_columns, n = column < N, column + row // ACROSS * N
    within = tl.where(in_columns, n, 0).to(tl.int64)  # of what is read whether or not it is used
    first, j = tl.program_id(2) * STEPS, tl.arange(0, WIDTH)
    left = words + n.to(tl.int64)[:, None] * (BLOCKS * WIDTH) + first * WIDTH + j[None, :]
    k = first * 256 + j
    right = x + m.to(tl.int64)[None, :] * K + k[:, None]
    valid = (m < rows)[None, :]
    acc = tl.zeros((BN, BM), tl.int32 if INT8 else tl.float32)
    units = first * ROWS + n
    if KIND == "fp4":
        fours = groups + within * (BLOCKS * 16) + first * 16
    else:
        # Scales are loaded a step ahead: Triton's pipeline holds operands of products only.
        next_pair = tl.load(groups + units, in_columns, other=0)
        next_zeros = next_pair if zero is None else tl.load(zero + units, in_columns, other=0)
    enter(EARLY)
    for step in range(0, STEPS):
        word = _words(left, in_columns, WHOLE)
        a, b = _inputs(right, k, valid, 0, WIDTH, K, WHOLE), _inputs(right, k, valid, 1, WIDTH, K, WHOLE)
        if KIND != "w4a8":
            c, d = _inputs(right, k, valid, 2, WIDTH, K, WHOLE), _inputs(right, k, valid, 3, WIDTH, K, WHOLE)
        if KIND == "fp4":
            acc = _fp4_block(word, a, b, c, d, fours, acc, BN, PACKED)
            fours += 16
        else:
            pair, zeros = next_pair, next_zeros
            units += tl.where(step + 1 < STEPS, ROWS, 0)
            next_pair = tl.load(groups + units, in_columns, other=0)
            next_zeros = next_pair if zero is None else tl.load(zero + units, in_columns, other=0)
            if INT8:
                acc = _int8_block(word, a, b, pair, acc, PACKED)
            else:
                acc += _group(word, a, b, pair, zeros, 0, zero is not None, HALF, PACKED)
                acc += _group(word, c, d, pair, zeros, 1, zero is not None, HALF, PACKED)
        left, right, k = left + WIDTH, right + 256, k + 256
    at = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    to = (tl.program_id(2) * rows + m).to(tl.int64)[None, :] * N + at[:, None]
    if INT8 and scale is None:  # exact sums, which the next kernel scales
        tl.store(out + to, acc, valid & (at < N)[:, None])
    else:
        _finish(acc, scale, bias, residual, inverse, out, n, in_columns, at, valid, to, N, GATED, GELU)


def _launch(
    x: Tensor, weight: Int4Weight, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    inverse: Tensor | None, out: Tensor, tile: Int4Tile, early: int, *, gated: bool, gelu: bool = False,
) -> None:  # fmt: skip
    """`out` is [splits, T, N]."""
    (rows, depth), blocks, columns = x.shape, weight.blocks, weight.columns
    columns, across = (columns // 2, tile.columns // 2) if gated else (columns, tile.columns)
    whole = columns % across == 0 and depth % (4 * QUARTER) == 0
    packs = x.is_cuda and x.dtype in (torch.bfloat16, torch.int8)
    _product[(math.ceil(rows / tile.rows), math.ceil(columns / across), tile.splits)](
        x, weight.words, weight.groups, weight.zero, scale, bias, residual, inverse, out, rows, columns, depth, blocks,
        blocks // tile.splits, whole, gated, gelu, weight.kind, weight.half, packs, tile.rows, tile.columns,
        early, num_warps=tile.warps, num_stages=tile.stages, **options(early),
    )  # fmt: skip


def _chosen(rows: int, x: Tensor, weight: Int4Weight, *, gated: bool = False) -> Int4Tile:
    shared_bytes = _shared_bytes(x.device.index) if x.is_cuda else _SHARED_BYTES
    return choose(rows, weight.columns, weight.blocks, size=x.element_size(), gated=gated, shared_bytes=shared_bytes)


@functools.cache
def _shared_bytes(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types lack what follows
    return int(properties.shared_memory_per_block_optin)


def stream(x: Tensor, weight: Int4Weight, *, tile: Int4Tile | None = None, early: int = 0) -> Tensor:
    """Sums over parts of the depth: x [T, K] · weight [N, K]ᵀ, not yet times `weight.scale`, [splits, T, N]; fp32, or
    of INT8 inputs int32.

    `early`: see `launching`.
    """
    tile = tile or _chosen(len(x), x, weight)
    dtype = torch.int32 if x.dtype == torch.int8 else torch.float32
    out = torch.empty(tile.splits, len(x), weight.columns, dtype=dtype, device=x.device)
    _launch(x, weight, None, None, None, None, out, tile, early, gated=False)
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
    out = torch.empty(len(x), weight.columns // 2, dtype=dtype, device=x.device)
    _launch(x, weight, weight.scale, bias, None, inverse, out, tile, early, gated=True, gelu=gelu)
    return out


def product(
    x: Tensor, weight: Int4Weight, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None, *,
    out: Tensor | None = None, tile: Int4Tile | None = None,
) -> Tensor:  # fmt: skip
    """x · Wᵀ + bias + residual of many rows [T, K], as `dtype` [T, N]. `out` may be `residual`. bias in fp32."""
    tile = tile or _chosen(FEW + 1, x, weight)
    if out is None:
        out = torch.empty(len(x), weight.columns, dtype=dtype, device=x.device)
    _launch(x, weight, weight.scale, bias, residual, None, out, tile, 0, gated=False)
    return out


def product_reference(
    x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The product with a weight [N, K] of plain numbers."""
    y = (x.double() @ weight.double().t()).float()
    y = y if bias is None else y + bias
    return (y if residual is None else y + residual.float()).to(dtype)


def gated_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, inverse: Tensor | None, dtype: torch.dtype, *, gelu: bool = False
) -> Tensor:  # fmt: skip
    gate, up = product_reference(x, weight, torch.float32, bias).chunk(2, dim=1)
    y = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    return to_type(y if inverse is None else y * inverse, dtype)
