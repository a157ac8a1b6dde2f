"""Launches the int8 products of few rows of `stream_source.py`: the choice of a variant, and tensor maps.

Requires Hopper; `unsupported_reason` says what else. Elsewhere `stream_kernel` computes the same sums.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch
from torch import Tensor

from core.kernels.cuda import driver
from core.kernels.cuda.stream_kernel import MOST_ROWS, stream_reference
from core.kernels.cuda.stream_source import StreamVariant, source

_DEPTH = 128  # of a stage
_FEWEST_STEPS = 4  # of a block
_APART = 64  # tokens whose parts of sums are left to the next kernel, at most
_OUT = {torch.int8: "s8", torch.bfloat16: "bf16"}


class StreamArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `stream_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "scale", "bias", "inverse")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "steps")),
    )


def unsupported_reason(x: Tensor, weight: Tensor, *, gated: bool = False) -> str | None:
    """Return why this kernel does not compute x [T, K] · weight [N, K]ᵀ, or None."""
    if (reason := driver.unsupported_reason(x.device)) is not None:
        return reason
    columns, depth = weight.shape
    if x.dtype != torch.int8 or weight.dtype != torch.int8:
        return "operands are not int8"
    if columns % (128 if gated else 64) or depth % _DEPTH:
        return "columns must be a multiple of 64 and the depth of 128"
    if not 0 < len(x) <= MOST_ROWS:
        return f"rows must be 1 to {MOST_ROWS}"
    if not x.is_contiguous() or not weight.is_contiguous() or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "operands must be contiguous, their addresses multiples of 16"
    return None


@functools.cache
def choose(rows: int, columns: int, depth: int, processors: int, *, gated: bool = False) -> StreamVariant:
    """The variant for x [rows, depth] and weights [columns, depth].

    One block with a deep ring per multiprocessor, and no second wave: within 5% of the fastest variant on an H100 for
    the shapes of Llama-3.1-8B. A gated product, and one as wide as a vocabulary, has more tiles than multiprocessors,
    so that two share one where the ring still has three stages. For few tokens the depth is split among two blocks per
    multiprocessor, and they are no clusters: 7% of one user's step on an H200, 0.5% of one of 64 rows.
    """
    tokens = max(8, 1 << (rows - 1).bit_length())
    many = gated or columns > 128 * processors
    blocks = 2 if many and columns % 128 == 0 else 1
    apart = tokens <= _APART and not many
    resident = 2 if apart or (many and tokens <= 128) else 1
    tiles, steps, room = columns // (64 * blocks), depth // _DEPTH, processors * (2 if apart else 1)
    fitting = [n for n in (1, 2, 4, 8) if steps % n == 0 and steps // n >= _FEWEST_STEPS and tiles * n <= room]
    return StreamVariant(tokens, blocks, max(fitting, default=1), resident, apart=apart)


@functools.cache
def _kernel(variant: StreamVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        return driver.Kernel(source(variant), variant.name, threads=variant.threads, shared_bytes=variant.shared_bytes)


def stream(x: Tensor, weight: Tensor, *, variant: StreamVariant | None = None, early: bool = False) -> Tensor:
    """Sums over parts of the depth of x [T, K] · weight [N, K]ᵀ, int32 [parts, T, N], of int8 operands for which there
    is no `unsupported_reason`.

    `early`: by programmatic dependent launch: the weights must not be written by a kernel that may still run.
    """
    variant = variant or choose(len(x), *weight.shape, driver.multiprocessors(x.device.index))
    parts = variant.splits if variant.apart else 1
    out = torch.empty(parts, len(x), len(weight), dtype=torch.int32, device=x.device)
    arguments = StreamArguments(out=out.data_ptr(), columns=len(weight))
    _launch(variant, x, weight, arguments, len(weight) // (64 * variant.blocks), early)
    return out


def scaled(
    x: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    variant: StreamVariant | None = None,
    early: bool = False,
) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ times the fp32 scales of rows [T], then of columns [N], plus bias [N]: fp32, `out` [T,
    N], contiguous.
    """
    variant = variant or choose(len(x), *weight.shape, driver.multiprocessors(x.device.index))
    arguments = StreamArguments(
        out=out.data_ptr(), scale=scale.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        inverse=row_scale.data_ptr(), columns=len(weight),
    )  # fmt: skip
    variant = replace(variant, dtype="f32", apart=False)  # what is scaled is the whole sum
    _launch(variant, x, weight, arguments, len(weight) // (64 * variant.blocks), early)
    return out


def scaled_reference(
    x: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:  # fmt: skip
    y = stream_reference(x, weight)[0].float() * row_scale[:, None] * scale
    return y if bias is None else y + bias


def gated(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    gelu: bool = False,
    variant: StreamVariant | None = None,
    early: bool = False,
) -> Tensor:
    """silu(gate) · up of x [T, K] and weight [2N, K], [T, N] as `dtype`, like `stream_kernel.gated`."""
    columns = len(weight) // 2
    out = torch.empty(len(x), columns, dtype=dtype, device=x.device)
    variant = variant or choose(len(x), *weight.shape, driver.multiprocessors(x.device.index), gated=True)
    variant = StreamVariant(variant.tokens, variant.blocks, variant.splits, variant.resident, True, gelu, _OUT[dtype])
    arguments = StreamArguments(
        out=out.data_ptr(), scale=scale.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        inverse=None if inverse is None else inverse.data_ptr(), columns=columns,
    )  # fmt: skip
    _launch(variant, x, weight, arguments, columns // (32 * variant.blocks), early)
    return out


def _launch(
    variant: StreamVariant, x: Tensor, weight: Tensor, arguments: StreamArguments, tiles: int, early: bool
) -> None:
    rows, depth = x.shape
    arguments.rows, arguments.steps = rows, depth // _DEPTH // variant.splits
    box = 64 if not variant.gated else 32 * variant.blocks
    maps = [
        driver.tensor_map(operand, (depth, len(operand)), (depth,), (_DEPTH, height))
        for operand, height in ((weight, box if variant.gated else 64 * variant.blocks), (x, variant.tokens))
    ]
    _kernel(variant, x.device.index).launch(tiles * variant.splits, *maps, arguments, early=early)
