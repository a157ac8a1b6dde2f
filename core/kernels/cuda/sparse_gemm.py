"""Launches the product of INT8 tokens with 2:4 sparse weights of `sparse_source.py`: tiles, tensor maps, arguments.

Without sparse tensor cores that it knows, on GPUs before Hopper, weights are expanded when they are loaded, and the
dense kernels run.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.cuda import driver
from core.kernels.cuda.quantize import per_channel
from core.kernels.cuda.sparse_source import DEPTH, ROWS, SparseVariant, source

_FIXED = 48  # tokens' worth of a stage's time that weights take
_START = 3  # stages' worth of a tile's start and end


class SparseArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `sparse_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "residual", "scale", "bias", "row_scale", "inverse")),
        *((name, ctypes.c_longlong) for name in ("out_stride", "residual_stride")),
        *(
            (name, ctypes.c_int)
            for name in ("columns", "tokens", "steps", "column_tiles", "token_tiles", "splits", "inverse_step")
        ),
    )


@dataclass(frozen=True, slots=True)
class SparseTile:
    """128 rows of weights by `tokens`, which `cluster` blocks share; the depth is cut into `splits` parts."""

    tokens: int
    cluster: int = 1
    splits: int = 1


@dataclass(frozen=True, eq=False)
class SparseWeight:
    """A 2:4 sparse weight as `core.quant.sparse` has it: values int8 [N, K/2], metadata uint8 [N, K/8]."""

    values: Tensor
    metadata: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def depth(self) -> int:
        return 2 * self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.metadata.nbytes


def unsupported_reason(columns: int, depth: int, device: torch.device) -> str | None:
    """Return why the kernel does not support a weight of this shape, or None."""
    if (reason := driver.unsupported_reason(device)) is not None:
        return reason
    if columns % 16 or depth % DEPTH:
        return f"columns must be a multiple of 16, and inputs of {DEPTH}"
    return None


@functools.cache
def choose(rows: int, columns: int, steps: int, processors: int, *, split: bool = False) -> SparseTile:
    """The tile of least time by a cost model; the depth is only cut with `split`. No tile changes any bit."""
    column_tiles = math.ceil(columns / ROWS)

    def cost(tile: SparseTile) -> float:
        waves = math.ceil(math.ceil(rows / tile.tokens) * column_tiles * tile.splits / processors)
        return waves * (tile.tokens + _FIXED) * (steps / tile.splits + _START)

    splits = [n for n in range(1, 17) if n == 1 or steps // n >= 4] if split else [1]
    tiles = [SparseTile(tokens, 1, n) for tokens in (16, 32, 64, 128, 256) for n in splits]
    best = min(tiles, key=cost)
    if best.tokens < 256:
        return best
    return SparseTile(256, 1 + (column_tiles % 2 == 0), best.splits)  # clusters of four take twice the time


@functools.cache
def _kernel(variant: SparseVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        return driver.Kernel(source(variant), variant.name, threads=384, shared_bytes=variant.shared_bytes)


def product(
    x: Tensor,
    weight: SparseWeight,
    scale: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    tile: SparseTile | None = None,
) -> Tensor:
    """The product of x int8 [T, K] as `linear.linear_int8` of the expanded weight, bit for bit: [T, N] as `dtype`.

    Raises ValueError for a result that is not of 16 bits.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"sparse products are bf16 or fp16, not {dtype}")
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device) if out is None else out
    arguments = SparseArguments(
        out=out.data_ptr(), residual=_pointer(residual), scale=scale.data_ptr(), bias=_pointer(bias),
        row_scale=_pointer(row_scale), out_stride=out.stride(0), columns=len(weight),
        residual_stride=0 if residual is None else residual.stride(0),
    )  # fmt: skip
    _launch(x, weight, arguments, tile, SparseVariant(0, half=dtype == torch.float16))
    return out


def sums(x: Tensor, weight: SparseWeight, *, tile: SparseTile | None = None, early: bool = False) -> Tensor:
    """Sums over parts of the depth of x int8 [T, K], few rows: int32 [splits, T, N], as `stream_kernel.stream`.

    `early`: by programmatic dependent launch: the weights must not be written by a kernel that may still run.
    """
    tile = tile or _choose(x, weight, split=True)
    out = torch.empty(tile.splits, len(x), len(weight), dtype=torch.int32, device=x.device)
    arguments = SparseArguments(out=out.data_ptr(), columns=len(weight))
    _launch(x, weight, arguments, tile, SparseVariant(0, sums=True), early=early)
    return out


def gated(
    x: Tensor,
    weight: SparseWeight,
    scale: Tensor,
    bias: Tensor | None,
    inverse: Tensor,
    *,
    silu: bool = False,
    gate_first: bool = False,
    tile: SparseTile | None = None,
    early: bool = False,
) -> Tensor:
    """Hidden times its activated gate, as `linear.linear_geglu_int8` of the expanded weight [2N, K]: int8 [T, N].

    `gate_first`: the gate's rows of weights come first, not hidden's. `early` is as for `sums`.
    """
    columns = len(weight) // 2
    out = torch.empty(len(x), columns, dtype=torch.int8, device=x.device)
    arguments = SparseArguments(
        out=out.data_ptr(), scale=scale.data_ptr(), bias=_pointer(bias), inverse=inverse.data_ptr(), columns=columns,
        out_stride=columns, inverse_step=per_channel(inverse, columns),
    )  # fmt: skip
    variant = SparseVariant(0, gated=True, silu=silu, gate_first=gate_first)
    _launch(x, weight, arguments, tile, variant, early=early)
    return out


def _choose(x: Tensor, weight: SparseWeight, *, split: bool = False) -> SparseTile:
    return choose(len(x), len(weight), weight.depth // DEPTH, driver.multiprocessors(x.device.index), split=split)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _launch(
    x: Tensor,
    weight: SparseWeight,
    arguments: SparseArguments,
    tile: SparseTile | None,
    variant: SparseVariant,
    *,
    early: bool = False,
) -> None:
    """Complete the arguments and the variant by the tile, and launch. Raises ValueError for shapes that disagree."""
    if x.shape[1] != weight.depth or x.dtype != torch.int8 or not x.is_contiguous():
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} does not fit a weight of {weight.depth} inputs")
    tile = tile or _choose(x, weight)
    rows, processors = len(weight), driver.multiprocessors(x.device.index)
    arguments.tokens, arguments.steps, arguments.splits = len(x), weight.depth // DEPTH, tile.splits
    arguments.column_tiles = math.ceil(rows / ROWS / tile.cluster)
    arguments.token_tiles = math.ceil(len(x) / tile.tokens)
    total = arguments.column_tiles * arguments.token_tiles * tile.splits
    clusters = processors // tile.cluster
    variant = SparseVariant(
        tile.tokens, tile.cluster, variant.sums, variant.gated, variant.silu, variant.gate_first, variant.half
    )
    maps = (
        _weight_map(weight.values, DEPTH // 2, 64, gated=variant.gated),
        _weight_map(weight.metadata, DEPTH // 8, 0, gated=variant.gated),
        driver.tensor_map(x, (x.shape[1], len(x)), (x.shape[1],), (DEPTH, tile.tokens // tile.cluster)),
    )
    _kernel(variant, x.device.index).launch(min(total, clusters) * tile.cluster, *maps, arguments, early=early)


def _weight_map(part: Tensor, width: int, swizzle: int, *, gated: bool) -> driver.TensorMap:
    """Fetch `width` bytes of a tile's rows in the order in which one thread has two that belong together.

    Of every 16 these are rows 2·i and 2·i + 1, eight rows of the tile apart; gated, rows i of hidden and of its gate.
    """
    rows, size = part.shape
    if gated:
        shape, strides = (size, 8, 2, rows // 16), (size, rows // 2 * size, 8 * size)
    else:
        shape, strides = (size, 8, 2, rows // 16), (2 * size, size, 16 * size)
    return driver.tensor_map(part, shape, strides, (width, 8, 2, ROWS // 16), swizzle=swizzle)
