"""Fused Triton kernels between a decoder's products on a GPU: norm; rotary positions and cache write; gate.

Each sums the parts that a product left (`stream_kernel`), finishes it (scales, bias, residual) and writes the next
product's input in that one's type. References at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import enter, kernel, options
from core.kernels.cuda.quantize import levels, rounded, to_type
from core.kernels.cuda.stream_kernel import activated
from core.kernels.kv_cache import PAGE, KVCache


@dataclass(frozen=True, eq=False)
class SplitSums:
    """A product's unsummed result: [splits, T, N], to be summed, times `scale` [N], plus `bias` [N] (fp32, or
    absent).
    """

    parts: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None

    def whole(self) -> Tensor:
        """[T, N] in fp32: the sum that the kernels here compute inline."""
        y = self.parts.sum(0, dtype=torch.float32 if self.parts.is_floating_point() else None).float()
        y = y if self.scale is None else y * self.scale
        return y if self.bias is None else y + self.bias


@kernel()
def summed(parts, scale, bias, row, rows, at, inside, N: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns `at` of a row of `SplitSums`, in fp32."""
    total = tl.load(parts + row * N + at, inside, other=0)
    if parts.dtype.element_ty == tl.bfloat16:
        total = total.to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (row + split * rows) * N + at, inside, other=0)
    y = total.to(tl.float32)
    if scale is not None:
        y *= tl.load(scale + at, inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + at, inside, other=0.0)
    return y


@kernel("rows")
def _add_norm(  # type: ignore[no-untyped-def]
    x, index, parts, scale, bias, sum_out, weight, inverse, out, rows, eps, N: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < N
    # All reads come before any write: no load may be moved over a store.
    factor = tl.load(weight + c, inside, other=0.0).to(tl.float32)
    if inverse is not None:
        factor *= tl.load(inverse + c, inside, other=0.0)
    enter(EARLY)
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
    y = tl.load(x + source * N + c, inside, other=0.0).to(tl.float32)
    if parts is not None:
        y += summed(parts, scale, bias, row, rows, c, inside, N, SPLITS)
    if sum_out is not None:
        kept = y.to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * N + c, kept, inside)
        y = kept.to(tl.float32)  # the norm is of the rounded values that others will read
    y *= tl.rsqrt(tl.sum(y * y, 0) / N + eps) * factor
    tl.store(out + row * N + c, rounded(y, out.dtype.element_ty), inside)


@kernel()
def _unit(lo, hi, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale of one head's numbers, by its largest magnitude; a head of zeros gets 1."""
    largest = tl.maximum(tl.max(tl.abs(lo), 0), tl.max(tl.abs(hi), 0))
    return tl.where(largest > 0, tl.div_rn(largest, TOP), 1.0)


@kernel()
def _kept(values, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is not finite becomes a large number, as in `KVCache.write`."""
    return tl.where(tl.abs(values) <= LARGEST, values, LARGEST)


@kernel()
def _head_norm(lo, hi, weight, eps, AXIS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMSNorm along AXIS of heads whose halves are `lo` and `hi`; `weight` points to those of the first half."""
    squares = tl.sum(lo * lo, AXIS, keep_dims=True) + tl.sum(hi * hi, AXIS, keep_dims=True)
    unit = tl.rsqrt(squares / (2 * HALF) + eps)
    return lo * (unit * tl.load(weight).to(tl.float32)), hi * (unit * tl.load(weight + HALF).to(tl.float32))


@kernel("rows", "table_stride")
def _rotate(  # type: ignore[no-untyped-def]
    parts, scale, bias, q_norm, k_norm, angles, positions, sequences, table, q, keys, values, key_scales, value_scales,
    rows, table_stride, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, SIZE: tl.constexpr, INT8: tl.constexpr, TOP: tl.constexpr, EARLY: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """One program per row and key head: rotates and writes its query heads, writes key and value into their page."""
    enter(EARLY)
    HALF: tl.constexpr = D // 2
    N: tl.constexpr = (H + 2 * KV) * D
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    valid = position >= 0  # padding rows belong to no sequence
    at = tl.maximum(position, 0)
    c = tl.arange(0, HALF)
    # All reads come before any write: no load may be moved over a store.
    page = tl.load(table + tl.load(sequences + row) * table_stride + at // SIZE).to(tl.int64) * KV + head
    cosine, sine = tl.load(angles + at * D + c), tl.load(angles + at * D + HALF + c)
    g = tl.arange(0, GROUP)
    mask = (g < G)[:, None]
    column = (head * G + g)[:, None] * D + c[None]
    every = c < HALF
    q_lo = summed(parts, scale, bias, row, rows, column, mask, N, SPLITS)
    q_hi = summed(parts, scale, bias, row, rows, column + HALF, mask, N, SPLITS)
    first = summed(parts, scale, bias, row, rows, (H + head) * D + c, every, N, SPLITS)
    second = summed(parts, scale, bias, row, rows, (H + head) * D + HALF + c, every, N, SPLITS)
    v_lo = _kept(summed(parts, scale, bias, row, rows, (H + KV + head) * D + c, every, N, SPLITS), LARGEST)
    v_hi = _kept(summed(parts, scale, bias, row, rows, (H + KV + head) * D + HALF + c, every, N, SPLITS), LARGEST)

    if q_norm is not None:
        q_lo, q_hi = _head_norm(q_lo, q_hi, q_norm + c[None], eps, 1, HALF)
    if k_norm is not None:
        first, second = _head_norm(first, second, k_norm + c, eps, 0, HALF)

    to = q + row * (H * D) + column
    tl.store(to, (q_lo * cosine[None] - q_hi * sine[None]).to(q.dtype.element_ty), mask)
    tl.store(to + HALF, (q_hi * cosine[None] + q_lo * sine[None]).to(q.dtype.element_ty), mask)
    k_lo, k_hi = first * cosine - second * sine, second * cosine + first * sine
    place = at % SIZE
    written = every & valid
    to_key = keys + (page * SIZE + place) * D + c
    to_value = values + page * (D * SIZE) + c * SIZE + place
    if key_scales is not None:
        unit = _unit(k_lo, k_hi, TOP)
        tl.store(to_key, levels(tl.div_rn(k_lo, unit), INT8), written)
        tl.store(to_key + HALF, levels(tl.div_rn(k_hi, unit), INT8), written)
        tl.store(key_scales + page * SIZE + place, unit, valid)
    else:
        tl.store(to_key, k_lo.to(keys.dtype.element_ty), written)
        tl.store(to_key + HALF, k_hi.to(keys.dtype.element_ty), written)
    if value_scales is not None:
        unit = _unit(v_lo, v_hi, TOP)
        tl.store(to_value, levels(tl.div_rn(v_lo, unit), INT8), written)
        tl.store(to_value + HALF * SIZE, levels(tl.div_rn(v_hi, unit), INT8), written)
        tl.store(value_scales + page * SIZE + place, unit, valid)
    else:
        tl.store(to_value, v_lo.to(values.dtype.element_ty), written)
        tl.store(to_value + HALF * SIZE, v_hi.to(values.dtype.element_ty), written)


@kernel("rows")
def _gate(  # type: ignore[no-untyped-def]
    x, inverse, out, rows, N: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < N
    g = tl.load(x + row * (2 * N) + c, inside, other=0.0).to(tl.float32)
    u = tl.load(x + row * (2 * N) + N + c, inside, other=0.0).to(tl.float32)
    y = activated(g, GELU) * u
    if inverse is not None:
        y *= tl.load(inverse + c, inside, other=0.0)
    tl.store(out + row * N + c, rounded(y, out.dtype.element_ty), inside)


def add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    sums: SplitSums | None = None,
    index: Tensor | None = None,
    sum_out: Tensor | None = None,
    early: int = 0,
) -> Tensor:
    """RMSNorm of x [T, C] (its rows `index` [T], where given) plus `sums`, times `inverse` [C], as `dtype`.

    `sum_out` [T, C] receives the norm's input; it may be x itself, without `index`.
    """
    rows, channels = (len(x) if index is None else len(index)), x.shape[1]
    out = torch.empty(rows, channels, dtype=dtype, device=x.device)
    block = power(channels)
    parts, scale, bias = (None, None, None) if sums is None else (sums.parts, sums.scale, sums.bias)
    _add_norm[(rows,)](
        x, index, parts, scale, bias, sum_out, weight, inverse, out, rows, eps,
        channels, 1 if sums is None else len(sums.parts), block, early,
        num_warps=max(1, min(16, block // 256)), **options(early),
    )  # fmt: skip
    return out


def rotate(
    sums: SplitSums,
    angles: Tensor,
    positions: Tensor,
    sequences: Tensor,
    cache: KVCache,
    layer: int,
    heads: int,
    dtype: torch.dtype,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    early: int = 0,
) -> Tensor:
    """Rotated queries [T, heads, d] as `dtype` from a product's `sums`; keys and values go into the cache.

    `angles` [positions, d] fp32: cosines of the first half, then sines. Rows at position -1 write nothing there.
    `q_norm` and `k_norm` [d]: weights of the RMSNorm, with `eps`, of each head before its rotation (Qwen3).
    """
    splits, rows, _ = sums.parts.shape
    kv_heads, d = cache.kv_heads, cache.head_dim
    group = heads // kv_heads
    q = torch.empty(rows, heads, d, dtype=dtype, device=angles.device)
    keys, values, key_scales, value_scales = cache.layer(layer)
    int8 = keys.dtype == torch.int8
    _rotate[(rows, kv_heads)](
        sums.parts, sums.scale, sums.bias, q_norm, k_norm, angles, positions, sequences, cache.table, q, keys, values,
        key_scales, value_scales, rows, cache.table.stride(0), eps, heads, kv_heads, d, group, power(group), splits,
        PAGE, int8, cache.top, early, cache.largest, num_warps=1 if d <= 128 and group <= 4 else 4, **options(early),
    )  # fmt: skip
    return q


def gate(x: Tensor, inverse: Tensor | None, dtype: torch.dtype, *, gelu: bool = False) -> Tensor:
    """silu(first half) · second half of x [T, 2N], times `inverse` [N], as `dtype` [T, N]; or GELU, by tanh."""
    rows, channels = len(x), x.shape[1] // 2
    out = torch.empty(rows, channels, dtype=dtype, device=x.device)
    block = min(1024, power(channels))
    _gate[(rows, -(-channels // block))](x, inverse, out, rows, channels, gelu, block, num_warps=4)
    return out


def add_norm_reference(
    x: Tensor, weight: Tensor, eps: float, inverse: Tensor | None, dtype: torch.dtype, sums: SplitSums | None = None
) -> tuple[Tensor, Tensor]:
    """The norm's input, as x's type, and its norm."""
    y = x.float() if sums is None else x.float() + sums.whole()
    kept = y.to(x.dtype)
    y = F.rms_norm(kept.float(), (x.shape[1],), weight.float(), eps)
    return kept, to_type(y if inverse is None else y * inverse, dtype)


def rotate_reference(
    y: Tensor,
    angles: Tensor,
    positions: Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """Queries, keys and values [T, heads, d] of y [T, (heads + 2 · kv_heads) · d], the first two rotated."""
    d = angles.shape[1]
    q, k, v = y.float().unflatten(1, (-1, d)).split([heads, kv_heads, kv_heads], dim=1)
    q = q if q_norm is None else F.rms_norm(q, (d,), q_norm.float(), eps)
    k = k if k_norm is None else F.rms_norm(k, (d,), k_norm.float(), eps)
    cosine, sine = angles[positions.long()][:, None].chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        lo, hi = x.chunk(2, dim=-1)
        return torch.cat([lo * cosine - hi * sine, hi * cosine + lo * sine], dim=-1)

    return turned(q), turned(k), v


def gate_reference(x: Tensor, inverse: Tensor | None, dtype: torch.dtype, *, gelu: bool = False) -> Tensor:
    g, u = x.float().chunk(2, dim=1)
    y = (F.gelu(g, approximate="tanh") if gelu else F.silu(g)) * u
    return to_type(y if inverse is None else y * inverse, dtype)
