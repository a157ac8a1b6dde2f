"""LayerNorm with 8-bit output: one read of the tokens, one write of a quarter or half their bytes.

On Hopper the kernel of `layer_norm_source.py` runs, elsewhere Triton's.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda import driver
from core.kernels.cuda.language import kernel, power, tl
from core.kernels.cuda.layer_norm_source import LayerNormVariant, source
from core.kernels.cuda.quantize import levels, per_channel, to_levels
from core.kernels.device import LAYER_NORM, TRITON, KernelChoice, say


@kernel
def _layer_norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    inverse,
    out,
    rows,
    stride,
    eps,
    C: tl.constexpr,
    STEP: tl.constexpr,
    IS_INT8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (channel < C)
    value = tl.load(x + row.to(tl.int64) * stride + channel, inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1, keep_dims=True) / C
    centred = tl.where(channel < C, value - mean, 0.0)
    variance = tl.sum(centred * centred, 1, keep_dims=True) / C
    factor = tl.load(inverse + channel, channel < C, other=0.0) if STEP else tl.load(inverse)
    w = tl.load(weight + channel, channel < C, other=0.0).to(tl.float32) * factor
    b = tl.load(bias + channel, channel < C, other=0.0).to(tl.float32) * factor
    result = centred * tl.rsqrt(variance + eps) * w + b
    tl.store(out + row.to(tl.int64) * C + channel, levels(result, IS_INT8), inside)


class LayerNormArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `layer_norm_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "inverse", "out")),
        ("stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("inverse_step", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


@functools.cache
def _kernel(variant: LayerNormVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        return driver.Kernel(source(variant), variant.name, threads=128, shared_bytes=0)


def lacks(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Why the Hopper kernel does not support these rows, or None."""
    if (why := driver.lacks(x.device)) is not None:
        return why
    if any(t.dtype != torch.bfloat16 or t.data_ptr() % 16 or t.stride(-1) != 1 for t in (x, weight, bias)):
        return "not bf16 at multiples of 16 bytes"
    if x.shape[1] % 128 or x.shape[1] > 2048 or x.stride(0) % 8:
        return "channels are not a multiple of 128 up to 2048"
    return None


def layer_norm_int8(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, inv_scale: Tensor, dtype: torch.dtype = torch.int8
) -> Tensor:
    """x [M, C] (rows may be apart) → LayerNorm over C, times `inv_scale` (fp32: one number, or [C]) → [M, C] 8-bit.

    The mean and the variance are fp32 and two-pass, the values staying in registers.
    """
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=dtype, device=x.device)
    why = lacks(x, weight, bias)
    if rows and why is None:
        problem = LayerNormArguments(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=bias.data_ptr(),
            inverse=inv_scale.data_ptr(),
            out=out.data_ptr(),
            stride=x.stride(0) * 2,
            rows=rows,
            inverse_step=per_channel(inv_scale, channels),
            eps=eps,
        )
        blocks = min((rows + 3) // 4, 8 * driver.multiprocessors(x.device.index))
        _kernel(LayerNormVariant(channels, dtype == torch.float8_e4m3fn), x.device.index).launch(blocks, problem)
        return out
    if why is not None:
        say(KernelChoice(LAYER_NORM, TRITON, why))
    block = power(channels)
    together = max(1, 2048 // block)
    _layer_norm[((rows + together - 1) // together,)](
        x, weight, bias, inv_scale, out, rows, x.stride(0), eps,
        channels, per_channel(inv_scale, channels), dtype == torch.int8, together, block, num_warps=4,
    )  # fmt: skip
    return out


def layer_norm_int8_reference(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, inv_scale: Tensor, dtype: torch.dtype = torch.int8
) -> Tensor:
    return to_levels(F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps) * inv_scale, dtype)
