"""LayerNorm with 8-bit output: one read of the tokens, one write of a quarter or half their bytes.

On Hopper the kernel of `layer_norm_source.py` runs, elsewhere Triton's, which also does without weights (adaLN's).
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
    row_scale,
    inverse,
    out,
    rows,
    stride,
    per_image,
    scale_stride,
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
    if inverse is not None:
        factor = tl.load(inverse + channel, channel < C, other=0.0) if STEP else tl.load(inverse)
    else:
        factor = 1.0
    if row_scale is not None:
        factor *= tl.load(row_scale + row // per_image * scale_stride + channel, inside, other=0.0).to(tl.float32)
    if weight is not None:
        w = tl.load(weight + channel, channel < C, other=0.0).to(tl.float32) * factor
        b = tl.load(bias + channel, channel < C, other=0.0).to(tl.float32) * factor
        result = centred * tl.rsqrt(variance + eps) * w + b
    else:
        result = centred * tl.rsqrt(variance + eps) * factor
    to = out + row.to(tl.int64) * C + channel
    if inverse is not None:
        tl.store(to, levels(result, IS_INT8), inside)
    else:
        tl.store(to, result.to(out.dtype.element_ty), inside)


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


def unsupported_reason(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, inv_scale: Tensor | None, row_scale: Tensor | None = None
) -> str | None:
    """Return why the Hopper kernel does not support these rows, or None."""
    if (reason := driver.unsupported_reason(x.device)) is not None:
        return reason
    if weight is None or bias is None or inv_scale is None or row_scale is not None:
        return "no weights, a scale for each image, or no 8 bits"
    if any(t.dtype != torch.bfloat16 or t.data_ptr() % 16 or t.stride(-1) != 1 for t in (x, weight, bias)):
        return "not bf16 at multiples of 16 bytes"
    if x.shape[1] % 128 or x.shape[1] > 2048 or x.stride(0) % 8:
        return "channels are not a multiple of 128 up to 2048"
    return None


def layer_norm_int8(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inv_scale: Tensor | None,
    dtype: torch.dtype = torch.int8,
    *,
    row_scale: Tensor | None = None,
) -> Tensor:
    """x [M, C] (rows may be apart) → LayerNorm over C, times `inv_scale` (fp32: one number, or [C]) → [M, C] 8-bit.

    The mean and the variance are fp32 and two-pass, the values staying in registers. weight and bias: both or neither.
    `row_scale` [B, C], fp32 or x's type, multiplies each image's M / B rows. Without `inv_scale` the result has
    `dtype`, a float type. Raises `ValueError` for shapes that disagree.
    """
    rows, channels = x.shape
    images = 1 if row_scale is None else len(row_scale)
    if (weight is None) != (bias is None) or rows % images:
        raise ValueError(f"{rows} rows, {images} images; weight and bias go together")
    out = torch.empty((rows, channels), dtype=dtype, device=x.device)
    step = 0 if inv_scale is None else per_channel(inv_scale, channels)
    reason = unsupported_reason(x, weight, bias, inv_scale, row_scale)
    if rows and reason is None:
        assert weight is not None and bias is not None and inv_scale is not None  # for the type checker
        problem = LayerNormArguments(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=bias.data_ptr(),
            inverse=inv_scale.data_ptr(),
            out=out.data_ptr(),
            stride=x.stride(0) * 2,
            rows=rows,
            inverse_step=step,
            eps=eps,
        )
        blocks = min((rows + 3) // 4, 8 * driver.multiprocessors(x.device.index))
        _kernel(LayerNormVariant(channels, dtype == torch.float8_e4m3fn), x.device.index).launch(blocks, problem)
        return out
    if reason is not None:
        say(KernelChoice(LAYER_NORM, TRITON, reason))
    block = power(channels)
    together = max(1, 2048 // block)
    _layer_norm[((rows + together - 1) // together,)](
        x, weight, bias, row_scale, inv_scale, out, rows, x.stride(0), rows // images,
        0 if row_scale is None else row_scale.stride(0), eps,
        channels, step, dtype == torch.int8, together, block, num_warps=4,
    )  # fmt: skip
    return out


def layer_norm_int8_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inv_scale: Tensor | None,
    dtype: torch.dtype = torch.int8,
    *,
    row_scale: Tensor | None = None,
) -> Tensor:
    w, b = (None if t is None else t.float() for t in (weight, bias))
    y = F.layer_norm(x.float(), x.shape[-1:], w, b, eps)
    if row_scale is not None:
        y = y * row_scale.float().repeat_interleave(len(x) // len(row_scale), 0)
    return y.to(dtype) if inv_scale is None else to_levels(y * inv_scale, dtype)
