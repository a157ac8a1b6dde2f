"""Launches prefill attention of `chunk_source.py`, over pages of 8-bit keys and values on Hopper.

`unsupported_reason` says what else it requires; elsewhere `chunk_kernel` converts what it reads, or computes in E4M3.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from core.kernels.cuda import decode_hopper, driver
from core.kernels.cuda.chunk_source import ROWS, ChunkVariant, source


class ChunkArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `chunk_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "table", "positions")),
        *((name, ctypes.c_void_p) for name in ("tiles", "q", "inverse", "out")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, ctypes.c_int) for name in ("window", "table_stride", "kv_heads", "blocks")),
    )


def unsupported_reason(q: Tensor, keys: Tensor, out: Tensor) -> str | None:
    """Return why this kernel does not attend to these keys, or None."""
    if q.shape[2] > 128:
        return f"heads of width {q.shape[2]}"
    return decode_hopper.unsupported_reason(q, keys, out)


@functools.cache
def _kernel(variant: ChunkVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        return driver.Kernel(source(variant), variant.name, threads=variant.threads, shared_bytes=variant.shared_bytes)


def chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    table: Tensor,
    positions: Tensor,
    cut: Tensor,
    scale: float,
    out: Tensor,
    tokens: int,
    *,
    inverse: Tensor | None,
    window: int,
    cap: float,
) -> None:
    """Attend like `chunk_kernel.chunks`, whose tiles have `tokens` tokens each."""
    _, heads, d = q.shape
    kv_heads = keys.shape[1]
    variant = ChunkVariant(
        d, heads // kv_heads, ROWS // tokens, keys.dtype == torch.int8, q.dtype == torch.float16,
        decode_hopper.OUTPUTS[out.dtype],
    )  # fmt: skip
    arrays = (keys, values, key_scales, value_scales, table, positions, cut, q, inverse, out)
    arguments = ChunkArguments(
        *(None if array is None else array.data_ptr() for array in arrays), scale=scale, cap=cap,
        window=window, table_stride=table.stride(0), kv_heads=kv_heads, blocks=len(cut) * kv_heads,
    )  # fmt: skip
    _kernel(variant, q.device.index).launch(len(cut) * kv_heads, arguments)
