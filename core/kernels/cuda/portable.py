"""The 8-bit product and convolution in Triton, for GPUs other than Hopper and for shapes that its kernel does not
support.

Plain tiles with pointers, not tuned for any GPU.
"""

from __future__ import annotations

from torch import Tensor

from core.kernels.cuda.language import kernel, pixel_stride, tl
from core.kernels.cuda.quantize import levels


@kernel
def _linear(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    bias,
    row_scale,
    residual,
    out,
    M,
    N,
    out_stride,
    residual_stride,
    K: tl.constexpr,
    FP8: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tiles = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32 if FP8 else tl.int32)
    a = x + m.to(tl.int64)[:, None] * K + k[None, :]
    b = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    for at in range(0, K, BK):
        left = tl.load(a + at, (m < M)[:, None] & (k + at < K)[None, :], other=0.0)
        right = tl.load(b + at, (n < N)[None, :] & (k + at < K)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, out_dtype=acc.dtype)
    y = acc.to(tl.float32)
    if row_scale is not None:
        y *= tl.load(row_scale + m, m < M, other=0.0)[:, None]
    y *= tl.load(scale + n, n < N, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + n, n < N, other=0.0)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if residual is not None:
        y += tl.load(residual + m.to(tl.int64)[:, None] * residual_stride + n[None, :], inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], y.to(out.dtype.element_ty), inside)


@kernel
def _geglu(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    bias,
    added,
    inverse,
    out,
    M,
    N,
    K: tl.constexpr,
    STEP: tl.constexpr,
    FP8: tl.constexpr,
    SILU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tiles = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    hidden = tl.zeros((BM, BN), tl.float32 if FP8 else tl.int32)
    gate = tl.zeros((BM, BN), tl.float32 if FP8 else tl.int32)
    a = x + m.to(tl.int64)[:, None] * K + k[None, :]
    b = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    for at in range(0, K, BK):
        left = tl.load(a + at, (m < M)[:, None] & (k + at < K)[None, :], other=0.0)
        valid = (n < N)[None, :] & (k + at < K)[:, None]
        hidden = tl.dot(left, tl.load(b + at, valid, other=0.0), hidden, out_dtype=hidden.dtype)
        gate = tl.dot(left, tl.load(b + at + N.to(tl.int64) * K, valid, other=0.0), gate, out_dtype=gate.dtype)
    h = hidden.to(tl.float32) * tl.load(scale + n, n < N, other=0.0)[None, :]
    g = gate.to(tl.float32) * tl.load(scale + N + n, n < N, other=0.0)[None, :]
    if bias is not None:
        h += tl.load(bias + n, n < N, other=0.0)[None, :]
        g += tl.load(bias + N + n, n < N, other=0.0)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if added is not None:
        at = added + m.to(tl.int64)[:, None] * (2 * N) + n[None, :]
        h += tl.load(at, inside, other=0.0).to(tl.float32)
        g += tl.load(at + N, inside, other=0.0).to(tl.float32)
    y = h * (g / (1.0 + tl.exp(-g)) if SILU else 0.5 * g * (1.0 + tl.math.erf(g * 0.7071067811865476)))
    y *= tl.load(inverse + n * STEP, n < N, other=0.0)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], levels(y, not FP8), inside)


@kernel
def _conv(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    bias,
    row_bias,
    residual,
    out,
    images,
    height,
    width,
    out_height,
    out_width,
    N,
    out_stride,
    residual_stride,
    row_bias_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE: tl.constexpr,
    PHASES: tl.constexpr,
    RELU: tl.constexpr,
    FP8: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """TAPS × TAPS taps; `out_height` × `out_width` pixels for each of 1 phase or, upsampling, 4."""
    tiles = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    phase = tl.program_id(1)
    valid = m < images * out_height * out_width
    image, h, w = m // (out_height * out_width), m // out_width % out_height, m % out_width
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32 if FP8 else tl.int32)
    for tap in range(0, TAPS * TAPS):
        row = h * STRIDE + tap // TAPS - 1 + phase // 2
        column = w * STRIDE + tap % TAPS - 1 + phase % 2
        visible = valid & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        a = x + ((image.to(tl.int64) * height + row) * width + column)[:, None] * C + k[None, :]
        b = weight + ((phase * N + n.to(tl.int64)) * (TAPS * TAPS) + tap)[None, :] * C + k[:, None]
        for at in range(0, C, BK):
            left = tl.load(a + at, visible[:, None] & (k + at < C)[None, :], other=0.0)
            right = tl.load(b + at, (n < N)[None, :] & (k + at < C)[:, None], other=0.0)
            acc = tl.dot(left, right, acc, out_dtype=acc.dtype)
    inside = valid[:, None] & (n < N)[None, :]
    y = acc.to(tl.float32) * tl.load(scale + phase * N + n, n < N, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + n, n < N, other=0.0)[None, :]
    if row_bias is not None:
        y += tl.load(row_bias + image[:, None] * row_bias_stride + n[None, :], inside, other=0.0)
    up: tl.constexpr = 2 if PHASES == 4 else 1
    pixel = (image.to(tl.int64) * (out_height * up) + h * up + phase // 2) * (out_width * up) + w * up + phase % 2
    if residual is not None:
        y += tl.load(residual + pixel[:, None] * residual_stride + n[None, :], inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0.0, 0.0, y)  # NaN stays NaN
    tl.store(out + pixel[:, None] * out_stride + n[None, :], y.to(out.dtype.element_ty), inside)


def _rows(count: int) -> int:
    return 128 if count >= 128 else 64


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Compute `linear.linear_int8` into `out` [M, N]."""
    (rows, depth), columns = x.shape, weight.shape[0]
    bm, bn = _rows(rows), 128
    stride = 0 if residual is None else residual.stride(0)
    _linear[((rows + bm - 1) // bm * ((columns + bn - 1) // bn),)](
        x, weight, scale, bias, row_scale, residual, out, rows, columns, out.stride(0), stride,
        depth, x.dtype.is_floating_point, bm, bn, 64, num_warps=8, num_stages=3,
    )  # fmt: skip


def geglu(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
    inverse: Tensor,
    step: int,
    out: Tensor,
    *,
    silu: bool = False,
) -> None:
    """Compute `linear.linear_geglu_int8` into `out` [M, N]."""
    (rows, depth), columns = x.shape, weight.shape[0] // 2
    bm, bn = _rows(rows), 64
    _geglu[((rows + bm - 1) // bm * ((columns + bn - 1) // bn),)](
        x, weight, scale, bias, added, inverse, out, rows, columns,
        depth, step, x.dtype.is_floating_point, silu, bm, bn, 64, num_warps=8, num_stages=3,
    )  # fmt: skip


def conv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    row_bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    taps: int,
    stride: int,
    phases: int,
    relu: bool = False,
) -> None:
    """Compute `conv.conv3x3_int8` (taps 3, phases 1) or `conv.upsample_conv3x3_int8` (taps 2, phases 4) into `out`."""
    images, height, width, channels = x.shape
    up = 2 if phases == 4 else 1
    out_height, out_width, columns = out.shape[1] // up, out.shape[2] // up, out.shape[3]
    rows = images * out_height * out_width
    bm, bn = _rows(rows), 128
    _conv[((rows + bm - 1) // bm * ((columns + bn - 1) // bn), phases)](
        x, weight, scale, bias, row_bias, residual, out, images, height, width, out_height, out_width, columns,
        pixel_stride(out), 0 if residual is None else pixel_stride(residual),
        0 if row_bias is None else row_bias.stride(0),
        channels, taps, stride, phases, relu, x.dtype.is_floating_point, bm, bn, 64, num_warps=8, num_stages=3,
    )  # fmt: skip
