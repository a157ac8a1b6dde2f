"""GroupNorm with optional SiLU over NHWC, with 8-bit output.

Three launches: sums of each channel over a chunk of pixels; from them two coefficients per channel and image; and one
pass that applies these. So the image is read twice and written once, and no group has to fit into shared memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.language import kernel, pixel_stride, power, tl, width
from core.kernels.cuda.quantize import levels, per_channel, to_levels


@kernel
def _sums(  # type: ignore[no-untyped-def]
    x,
    sums,
    pixels,
    stride,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum and sum of squares of each channel over STEPS · ROWS pixels of one image → sums [B, CHUNKS, 2, C]."""
    part, image = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    start = x + image.to(tl.int64) * pixels * stride
    for step in range(STEPS):
        row = (part * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None] & (channel < C)[None, :]
        value = tl.load(start + row.to(tl.int64)[:, None] * stride + channel[None, :], inside, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    to = sums + ((image * CHUNKS + part) * 2) * C + channel
    tl.store(to, tl.sum(total, 0), channel < C)
    tl.store(to + C, tl.sum(squares, 0), channel < C)


@kernel
def _coefficients(  # type: ignore[no-untyped-def]
    sums,
    weight,
    bias,
    coefficients,
    pixels,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group of one image: y = x · a + b with a, b of each of its WIDTH channels → coefficients [B, 2, C]."""
    group, image = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    channel = group * WIDTH + within
    part = tl.arange(0, PARTS)
    inside = (part < CHUNKS)[:, None] & (within < WIDTH)[None, :]
    at = sums + ((image * CHUNKS + part[:, None]) * 2) * C + channel[None, :]
    count = WIDTH * (pixels * 1.0)  # Triton passes a size of one as a Python number
    mean = tl.sum(tl.load(at, inside, other=0.0)) / count
    variance = tl.sum(tl.load(at + C, inside, other=0.0)) / count - mean * mean
    inverse = 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
    a = tl.load(weight + channel, within < WIDTH, other=0.0).to(tl.float32) * inverse
    b = tl.load(bias + channel, within < WIDTH, other=0.0).to(tl.float32) - mean * a
    tl.store(coefficients + (image * 2) * C + channel, a, within < WIDTH)
    tl.store(coefficients + (image * 2 + 1) * C + channel, b, within < WIDTH)


@kernel
def _apply(  # type: ignore[no-untyped-def]
    x,
    coefficients,
    inverse,
    out,
    pixels,
    stride,
    C: tl.constexpr,
    STEP: tl.constexpr,
    SILU: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = q(silu(x · a + b) · inverse). KIND: 1 int8, 2 E4M3, 0 as `out` is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(2)
    valid = channel < C
    a = tl.load(coefficients + (image * 2) * C + channel, valid, other=0.0)[None, :]
    b = tl.load(coefficients + (image * 2 + 1) * C + channel, valid, other=0.0)[None, :]
    inside = (row < pixels)[:, None] & valid[None, :]
    at = image.to(tl.int64) * pixels + row.to(tl.int64)
    value = tl.load(x + at[:, None] * stride + channel[None, :], inside, other=0.0).to(tl.float32)
    value = value * a + b
    if SILU:
        value = value / (1.0 + tl.exp(-value))
    to = out + at[:, None] * C + channel[None, :]
    if KIND == 0:
        tl.store(to, value.to(out.dtype.element_ty), inside)
    else:
        factor = tl.load(inverse + channel, valid, other=0.0)[None, :] if STEP else tl.load(inverse)
        tl.store(to, levels(value * factor, KIND == 1), inside)


def group_norm_int8(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    inv_scale: Tensor | None,
    silu: bool,
    dtype: torch.dtype = torch.int8,
) -> Tensor:
    """x [B, H, W, C] (pixels may be apart) → GroupNorm, SiLU if wanted, times `inv_scale` → [B, H, W, C] 8-bit.

    `inv_scale`: fp32, one number or [C] (a concatenation's halves may have a scale each); None with a floating `dtype`,
    which then is the output's and nothing is quantized. Sums are fp32. Raises `ValueError` if `groups` do not divide C.
    """
    images, image_height, image_width, channels = x.shape
    if channels % groups:
        raise ValueError(f"{groups} groups do not divide {channels} channels")
    pixels, stride = image_height * image_width, pixel_stride(x)
    kind = 0 if dtype.is_floating_point and dtype.itemsize > 1 else 1 if dtype == torch.int8 else 2
    block = width(channels)
    across = (channels + block - 1) // block
    rows = max(1, 4096 // block)
    chunks = max(1, min(power(pixels // (4 * rows)), power(2048 // (images * across))))
    steps = (pixels + chunks * rows - 1) // (chunks * rows)
    sums = torch.empty((images, chunks, 2, channels), dtype=torch.float32, device=x.device)
    coefficients = torch.empty((images, 2, channels), dtype=torch.float32, device=x.device)
    out = torch.empty((images, image_height, image_width, channels), dtype=dtype, device=x.device)
    _sums[(chunks, across, images)](x, sums, pixels, stride, channels, chunks, steps, rows, block, num_warps=8)
    per = channels // groups
    _coefficients[(groups, images)](
        sums, weight, bias, coefficients, pixels, eps, channels, per, chunks, power(chunks), power(per), num_warps=4
    )
    step = 0 if inv_scale is None else per_channel(inv_scale, channels)
    _apply[((pixels + rows - 1) // rows, across, images)](
        x, coefficients, inv_scale, out, pixels, stride, channels, step, silu, kind, rows, block, num_warps=8
    )
    return out


def group_norm_int8_reference(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    inv_scale: Tensor | None,
    silu: bool,
    dtype: torch.dtype = torch.int8,
) -> Tensor:
    y = F.group_norm(x.float().movedim(-1, 1), groups, weight.float(), bias.float(), eps).movedim(1, -1)
    y = F.silu(y) if silu else y
    return y.to(dtype) if inv_scale is None else to_levels(y * inv_scale, dtype)
