"""RMSNorm in the next layer's type, with a scale for each image and a residual, as transformers with adaLN use it.

`residual_norm` is all that lies between two sublayers, a gated residual and the next norm, in one pass: the stream is
read once and written once. Values are bf16 in memory and fp32 in registers. References at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import kernel
from core.kernels.cuda.quantize import levels, per_channel, to_levels

ROWS = 4  # of one program: what belongs to the channels is read once for all of them
CHANNELS = 512  # of one warp


@kernel()
def _of_image(weight, scale, image, stride, channel, valid):  # type: ignore[no-untyped-def]
    """weight · scale[image], fp32."""
    factor = tl.load(weight + channel, valid, other=0.0).to(tl.float32)
    if scale is not None:
        factor *= tl.load(scale + image * stride + channel, valid, other=0.0).to(tl.float32)
    return factor


@kernel("rows")
def _rms_norm(  # type: ignore[no-untyped-def]
    y, weight, scale, residual, sum_out, next_weight, next_scale, inverse, out, rows, y_stride, residual_stride,
    kept_stride, out_stride, scale_stride, next_stride, eps, C: tl.constexpr, STEP: tl.constexpr, INT8: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rows` are those of one image; the next row is loaded before the current one is finished."""
    image = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    valid = channel < C
    factor = _of_image(weight, scale, image, scale_stride, channel, valid)
    if next_weight is not None:
        next_factor = _of_image(next_weight, next_scale, image, next_stride, channel, valid)
    if inverse is not None:
        level = tl.load(inverse + channel, valid, other=0.0) if STEP else tl.load(inverse)
        if next_weight is not None:
            next_factor *= level
        elif residual is None:
            factor *= level
    first = tl.program_id(0) * ROWS
    end = image * rows + tl.minimum(first + ROWS, rows)
    first += image * rows
    value = tl.load(y + first * y_stride + channel, valid, other=0.0)
    if residual is not None:
        rest = tl.load(residual + first * residual_stride + channel, valid, other=0.0)
    for row in range(first, end):
        ahead = valid & (row + 1 < end)
        following = tl.load(y + (row + 1) * y_stride + channel, ahead, other=0.0)
        if residual is not None:
            following_rest = tl.load(residual + (row + 1) * residual_stride + channel, ahead, other=0.0)
        x = value.to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 0) / C + eps) * factor
        if residual is not None:
            x += rest.to(tl.float32)
            rest = following_rest
        if next_weight is not None:
            rounded = x.to(sum_out.dtype.element_ty)
            tl.store(sum_out + row * kept_stride + channel, rounded, valid)
            x = rounded.to(tl.float32)  # the norm is of the rounded values that others will read
            x *= tl.rsqrt(tl.sum(x * x, 0) / C + eps) * next_factor
        if inverse is not None:
            if residual is not None and next_weight is None:
                x *= level
            tl.store(out + row * out_stride + channel, levels(x, INT8), valid)
        else:
            tl.store(out + row * out_stride + channel, x.to(out.dtype.element_ty), valid)
        value = following


def _images(rows: int, channels: int, *scales: Tensor | None) -> int:
    """The number of images of the rows. Raises `ValueError` if the scales disagree with the rows or each other."""
    present = [scale for scale in scales if scale is not None]
    images = len(present[0]) if present else 1
    if any(scale.shape != (images, channels) or scale.stride(1) != 1 for scale in present) or rows % images:
        shapes = ", ".join(str(tuple(scale.shape)) for scale in present)
        raise ValueError(f"{rows} rows of {channels} channels do not go with scales {shapes} of [images, channels]")
    return images


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """residual + rms(x) · weight · row_scale of x [M, C], as `dtype`, or times `inverse` in its levels: [M, C].

    weight [C]. `row_scale` [B, C], fp32 or x's type: one for each image's M / B rows. `residual` [M, C]. `inverse`:
    fp32, one number or [C], with int8 or E4M3. Rows of x, residual, out and row_scale may be apart. `out` receives the
    result; it may be `residual` or x itself. Raises `ValueError` for shapes that disagree.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    _launch(x, weight, eps, inverse, out, row_scale, residual, None, None, None)
    return out


def residual_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    gate: Tensor | None = None,
    next_scale: Tensor | None = None,
    sum_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x' = x + gate · rms(y) · weight, as x's type, and rms(x') · next_weight · next_scale as `rms_norm` writes it.

    x and y [M, C]; gate and next_scale [B, C], fp32 or x's type, for each image's M / B rows. The second norm is of the
    rounded x'. `sum_out` [M, C] receives x'; it may be x itself. Raises `ValueError` for shapes that disagree.
    """
    sum_out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if sum_out is None else sum_out
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(y, weight, eps, inverse, out, gate, x, sum_out, next_weight, next_scale)
    return sum_out, out


def _launch(
    y: Tensor,
    weight: Tensor,
    eps: float,
    inverse: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    residual: Tensor | None,
    sum_out: Tensor | None,
    next_weight: Tensor | None,
    next_scale: Tensor | None,
) -> None:
    rows, channels = y.shape
    for other in (y, residual, sum_out, out):
        if other is not None and (other.shape != y.shape or other.stride(1) != 1):
            raise ValueError(f"x is {tuple(y.shape)}, its residual or output {tuple(other.shape)}")
    images = _images(rows, channels, scale, next_scale)
    each, block = rows // images, power(channels)

    def stride(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.stride(0)

    _rms_norm[(-(-each // ROWS), images)](
        y, weight, scale, residual, sum_out, next_weight, next_scale, inverse, out, each, stride(y), stride(residual),
        stride(sum_out), stride(out), stride(scale), stride(next_scale), eps, channels,
        0 if inverse is None else per_channel(inverse, channels), out.dtype == torch.int8, ROWS, block,
        num_warps=max(1, min(16, block // CHANNELS)),
    )  # fmt: skip


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    if row_scale is not None:
        y = y * row_scale.float().repeat_interleave(len(x) // len(row_scale), 0)
    y = y if residual is None else residual.float() + y
    return y.to(dtype) if inverse is None else to_levels(y * inverse, dtype)


def residual_norm_reference(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    gate: Tensor | None = None,
    next_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    normed = rms_norm_reference(y, weight, eps, None, x.dtype, row_scale=gate, residual=x)
    return normed, rms_norm_reference(normed, next_weight, eps, inverse, dtype, row_scale=next_scale)
