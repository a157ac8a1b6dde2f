"""Norm and rotation of the heads of queries and keys within a fused projection: one read and one write of each.

Values are bf16 in memory and fp32 in registers, rounded once. The reference is `rotate_heads_reference`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda.language import power, tl
from core.kernels.cuda.launching import kernel

_HEADS = 16  # of one program, at most


@kernel()
def _pairs(  # type: ignore[no-untyped-def]
    x, real, ROWS: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr
):
    """The first and the second of each pair at x [ROWS, D], in fp32: [ROWS, PAIRS] each."""
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)[None, :]
        row = tl.load(x + channel, real & (channel < D), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(row, (ROWS, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        a = tl.load(x + pair, real & (pair < D // 2), other=0.0).to(tl.float32)
        b = tl.load(x + D // 2 + pair, real & (pair < D // 2), other=0.0).to(tl.float32)
        return a, b


@kernel("rows")
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, norms, angles, positions, out, stride, out_stride, angles_stride, eps, H: tl.constexpr,
    KV: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program for some heads of a row; of a pair the first is `a`, the second `b`."""
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    channel = tl.arange(0, 2 * PAIRS)[None, :]
    real = head < H + KV
    at = row
    if positions is not None:
        at = tl.load(positions + row).to(tl.int64)
    turn = angles + at * angles_stride + pair
    cosine, sine = tl.load(turn, pair < HALF, other=0.0), tl.load(turn + HALF, pair < HALF, other=0.0)
    a, b = _pairs(x + row * stride + head * D, real, HEADS, D, INTERLEAVED, PAIRS)
    if norms is not None:
        unit = tl.rsqrt((tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / D + eps)
        # One load of [HEADS, D] like that of x, so that the weights arrive where they are used.
        w_a, w_b = _pairs(norms + tl.where(head < H, 0, D), real, HEADS, D, INTERLEAVED, PAIRS)
        a *= unit * w_a
        b *= unit * w_b
    turned_a, turned_b = a * cosine - b * sine, b * cosine + a * sine
    to = out + row * out_stride + head * D
    if INTERLEAVED:
        rotated = tl.reshape(tl.join(turned_a, turned_b), (HEADS, 2 * PAIRS))
        tl.store(to + channel, rotated.to(out.dtype.element_ty), real & (channel < D))
    else:
        tl.store(to + pair, turned_a.to(out.dtype.element_ty), real & (pair < HALF))
        tl.store(to + HALF + pair, turned_b.to(out.dtype.element_ty), real & (pair < HALF))


def rotate_heads(
    x: Tensor,
    angles: Tensor,
    heads: int,
    kv_heads: int,
    *,
    norms: Tensor | None = None,
    eps: float = 0.0,
    positions: Tensor | None = None,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Queries and keys of x [M, (heads + kv_heads) · d or more], normed per head and rotated: into x, or `out`.

    x: a fused projection, queries first, then keys; what follows (values) stays as it is, and is not copied to `out`
    [M, (heads + kv_heads) · d or more]. Rows of both may be apart. angles fp32 [rows, d], d / 2 cosines, then d / 2
    sines: a row for each of x's, or for each position where `positions` [M] says which. norms [2, d]: the RMSNorm
    weights of queries and of keys, with `eps`. Pairs are neighbours if `interleaved` (Z-Image, FLUX), else half a head
    apart (Llama, Qwen). Raises `ValueError` for shapes that disagree.
    """
    out = x if out is None else out
    d = angles.shape[1]
    columns = (heads + kv_heads) * d
    narrow = min(x.shape[1], out.shape[1]) < columns or len(out) != len(x)
    if narrow or d % 2 or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"{heads} + {kv_heads} heads of {d} in {tuple(x.shape)}, to {tuple(out.shape)}")
    if norms is not None and (norms.shape != (2, d) or not norms.is_contiguous()):
        raise ValueError(f"norms {tuple(norms.shape)} are not the weights of queries and keys [2, {d}]")
    if len(angles if positions is None else positions) != len(x) and len(x):
        raise ValueError(f"{len(x)} rows, angles {tuple(angles.shape)}")
    together = min(_HEADS, power(heads + kv_heads))
    _rotate_heads[(len(x), -(-(heads + kv_heads) // together))](
        x, norms, angles, positions, out, x.stride(0), out.stride(0), angles.stride(0), eps,
        heads, kv_heads, d, interleaved, together, power(d // 2), num_warps=max(1, min(4, together * power(d) // 512)),
    )  # fmt: skip
    return out


def rotate_heads_reference(
    x: Tensor,
    angles: Tensor,
    heads: int,
    kv_heads: int,
    *,
    norms: Tensor | None = None,
    eps: float = 0.0,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """[M, (heads + kv_heads) · d] as x's type."""
    d = angles.shape[1]
    y = x[:, : (heads + kv_heads) * d].float().unflatten(1, (-1, d))
    if norms is not None:
        q, k = y.split([heads, kv_heads], dim=1)
        y = torch.cat([F.rms_norm(part, (d,), norms[i].float(), eps) for i, part in enumerate((q, k))], dim=1)
    cosine, sine = (angles if positions is None else angles[positions.long()])[:, None].chunk(2, dim=-1)
    a, b = y.unflatten(2, (-1, 2)).unbind(-1) if interleaved else y.chunk(2, dim=-1)
    turned = torch.stack([a * cosine - b * sine, b * cosine + a * sine], dim=-1 if interleaved else -2)
    return turned.flatten(1).to(x.dtype)
