"""Launches decode attention of `decode_source.py`, over pages of 8-bit keys and values on Hopper.

`unsupported_reason` says what else it requires; elsewhere `decode_kernel` converts what it reads.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from core.kernels.cuda import driver
from core.kernels.cuda.decode_source import DecodeVariant, source

PART = 512  # tokens of a part, at least
PARTS, UNIT = 16, 128  # parts of a sequence, at most; a part's tokens are a multiple of UNIT
OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}
_MOST_QUERY_HEADS = 8  # of a key head
shape = (4, 2)  # warps that consume, and blocks per multiprocessor


class DecodeArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `decode_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "table", "positions")),
        *((name, ctypes.c_void_p) for name in ("sequences", "index", "q", "inverse", "out")),
        *((name, ctypes.c_void_p) for name in ("partials", "largest", "sums")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, ctypes.c_int) for name in ("window", "table_stride", "kv_heads", "rows", "reach")),
    )


def unsupported_reason(q: Tensor, keys: Tensor, out: Tensor) -> str | None:
    """Return why this kernel does not attend to these keys, or None."""
    if (reason := driver.unsupported_reason(q.device)) is not None:
        return reason
    if keys.element_size() > 1:
        return "keys have more than 8 bits"
    if q.dtype not in (torch.bfloat16, torch.float16) or out.dtype not in OUTPUTS:
        return f"queries in {q.dtype}, a result in {out.dtype}"
    if q.shape[2] not in (64, 128, 256):
        return f"heads of width {q.shape[2]}"
    return "too many query heads of a key head" if q.shape[1] > _MOST_QUERY_HEADS * keys.shape[1] else None


@functools.cache
def _kernel(variant: DecodeVariant, device: int) -> driver.Kernel:
    text = source(variant, PARTS, UNIT)
    with torch.cuda.device(device):
        return driver.Kernel(text, variant.name, threads=variant.threads, shared_bytes=variant.shared_bytes)


def parts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    table: Tensor,
    positions: Tensor,
    sequences: Tensor,
    index: Tensor | None,
    inverse: Tensor | None,
    out: Tensor,
    partials: tuple[Tensor, Tensor, Tensor] | None,
    scale: float,
    *,
    reach: int,
    window: int,
    cap: float,
    early: bool,
) -> None:
    """Attend like `decode_kernel.decode`: to `out` where `reach` is 1, else to `partials` [rows, heads, reach, d or
    none]: sums, maxima and sums of weights.
    """
    _, heads, d = q.shape
    rows, kv_heads = len(q if index is None else index), keys.shape[1]
    warps, resident = shape
    variant = DecodeVariant(
        d, heads // kv_heads, keys.dtype == torch.int8, q.dtype == torch.float16, OUTPUTS[out.dtype], PART,
        warps if d <= 128 else 4, resident if d <= 128 else 1,
    )  # fmt: skip
    arrays = (
        keys, values, key_scales, value_scales, table, positions, sequences, index, q, inverse, out,
        *(partials or (None, None, None)),
    )  # fmt: skip
    arguments = DecodeArguments(
        *(None if array is None else array.data_ptr() for array in arrays), scale=scale, cap=cap,
        window=window, table_stride=table.stride(0), kv_heads=kv_heads, rows=rows, reach=reach,
    )  # fmt: skip
    blocks = min(rows * kv_heads * reach, variant.resident * driver.multiprocessors(q.device.index))
    _kernel(variant, q.device.index).launch(blocks, arguments, early=early)
