"""Quantizes activations to 8 bits: by static scales, or by each token's largest magnitude.

int8 levels are -127…127, rounded half to even; E4M3 saturates at ±448.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.kernels.cuda.language import kernel, power, tl, width
from core.kernels.cuda.launching import enter, options

INT8_TOP, E4M3_TOP = 127.0, 448.0


def max_level(dtype: torch.dtype) -> float:
    """The largest magnitude of an 8-bit type. Raises `TypeError` for any type but int8 and E4M3."""
    if dtype == torch.int8:
        return INT8_TOP
    if dtype == torch.float8_e4m3fn:
        return E4M3_TOP
    raise TypeError(f"not an 8-bit activation type: {dtype}")


def to_levels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to int8 or E4M3, saturating: the last step of every reference here."""
    limit = max_level(dtype)
    return (x.round() if dtype == torch.int8 else x).clamp(-limit, limit).to(dtype)


def to_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to the levels of an 8-bit type, or to a float type: what `rounded` computes."""
    return x.to(dtype) if dtype.itemsize > 1 else to_levels(x, dtype)


def per_channel(inverse: Tensor, channels: int) -> int:
    """0 if `inverse` is one number for all channels, 1 if it is one per channel. Raises `ValueError` otherwise."""
    if inverse.numel() == 1:
        return 0
    if inverse.numel() == channels and inverse.stride(-1) == 1:
        return 1
    raise ValueError(f"inv_scale has {inverse.numel()} numbers for {channels} channels")


@kernel
def levels(x, IS_INT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to the nearest level of int8 (half to even) or E4M3, saturating; also called inside other kernels."""
    if IS_INT8:
        # The sum with 1.5 · 2^23 has no fraction bits: it is rounded half to even.
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@kernel
def rounded(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to TYPE: to the `levels` of an 8-bit type, or to a float type."""
    if TYPE == tl.int8:  # noqa: SIM300
        return levels(x, True)
    elif TYPE == tl.float8e4nv:  # noqa: SIM300
        return levels(x, False)
    else:
        return x.to(TYPE)


@kernel
def _quantize(  # type: ignore[no-untyped-def]
    x,
    inverse,
    out,
    rows,
    stride,
    C: tl.constexpr,
    STEP: tl.constexpr,
    IS_INT8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (channel < C)
    value = tl.load(x + row * stride + channel, inside, other=0.0).to(tl.float32)
    factor = tl.load(inverse + channel, channel < C, other=0.0) if STEP else tl.load(inverse)
    tl.store(out + row * C + channel, levels(value * factor, IS_INT8), inside)


@kernel
def _quantize_rows(  # type: ignore[no-untyped-def]
    x, out, scale, stride, C: tl.constexpr, TOP: tl.constexpr, IS_INT8: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < C
    enter(EARLY)
    value = tl.load(x + row * stride + channel, inside, other=0.0).to(tl.float32)
    strange = value != value
    value = tl.where(strange, 0.0, value)
    largest = tl.max(tl.abs(value), 0)
    # A row of zeros gets scale 1, as in weights.
    unit = tl.where(largest > 0, tl.div_rn(largest, TOP), 1.0)
    tl.store(out + row * C + channel, levels(tl.div_rn(value, unit), IS_INT8), inside)
    tl.store(scale + row, tl.where(tl.max(strange.to(tl.int32), 0) > 0, float("nan"), unit))


def quantize(x: Tensor, inv_scale: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """x [..., C] times `inv_scale` (fp32: one number, or [C]) as int8 or E4M3 [..., C], contiguous.

    Rows of C may be apart, as those of a slice of a wider tensor are.
    """
    channels = x.shape[-1]
    spaced = all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.dim() - 2))
    if x.stride(-1) != 1 or not spaced:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, stride = x.numel() // channels, x.stride(-2) if x.dim() > 1 else channels
    block = width(channels)
    together = max(1, 4096 // block)
    _quantize[((rows + together - 1) // together, (channels + block - 1) // block)](
        x, inv_scale, out, rows, stride,
        channels, per_channel(inv_scale, channels), dtype == torch.int8, together, block, num_warps=8,
    )  # fmt: skip
    return out


def quantize_reference(x: Tensor, inv_scale: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    return to_levels(x.float() * inv_scale, dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.int8, *, early: int = 0) -> tuple[Tensor, Tensor]:
    """x [M, K] as int8 or E4M3 [M, K], and the fp32 scale [M] of each row: its largest magnitude over the type's,
    and NaN of a row with NaN, as levels hold none.

    `early`: see `launching`.
    """
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power(channels)
    _quantize_rows[(rows,)](
        x,
        out,
        scale,
        x.stride(0),
        channels,
        max_level(dtype),
        dtype == torch.int8,
        block,
        early,
        num_warps=max(1, min(8, block // 512)),
        **options(early),
    )
    return out, scale


def quantize_rows_reference(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    largest = x.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / max_level(dtype), torch.ones_like(largest))
    return to_levels(x.float() / scale[:, None], dtype), scale
