"""8-bit linear layers: scales, bias, residual, GEGLU and SwiGLU are applied to the accumulators before any store.

On Hopper the kernel of `gemm_source.py` runs, elsewhere Triton's. Operands are int8, or E4M3 under the same names.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda import gemm, portable
from core.kernels.cuda.low_rank import BranchShares, add_rest, folded
from core.kernels.cuda.quantize import per_channel, to_levels
from core.kernels.cuda.tiles import Tile
from core.kernels.device import GEGLU, LINEAR, TRITON, KernelChoice, say

Activation = Literal["gelu", "silu"]  # of a gate


def _image(x: Tensor) -> Tensor:
    """[M, N] with any spacing of rows as one long row of pixels [1, 1, M, N]."""
    return x.as_strided((1, 1, *x.shape), (0, 0, *x.stride()))


def linear_int8(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
    shares: BranchShares | None = None,
) -> Tensor:
    """y[m,n] = row_scale[m] · scale[n] · Σ_k x_q[m,k] · weight_q[n,k] + bias[n] + residual[m,n], as `dtype` [M, N].

    x_q [M, K] and weight_q [N, K]: int8 or both E4M3, contiguous. scale [N], bias [N], row_scale [M]: fp32. residual
    [M, N] of the output's type; its rows, and those of `out`, may be apart (a slice of a wider tensor). `out` receives
    the result, and may be `residual` itself. `tile` overrides the table. `shares` of adapters are added. Raises
    `ValueError` for shapes that disagree.
    """
    rows, columns = x_q.shape[0], weight_q.shape[0]
    if x_q.shape[1] != weight_q.shape[1] or scale.numel() != columns:
        raise ValueError(f"x {tuple(x_q.shape)}, weight {tuple(weight_q.shape)}, scale {tuple(scale.shape)}")
    if residual is not None and (residual.shape != (rows, columns) or residual.dtype != dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, the output {dtype} {(rows, columns)}")
    if out is None:
        out = torch.empty((rows, columns), dtype=dtype, device=x_q.device)
    extras = gemm.EpilogueInputs(
        bias=bias, row_scale=row_scale, residual=None if residual is None else _image(residual),
        shares=folded(shares),
    )  # fmt: skip
    x, to = _image(x_q), _image(out)
    if (reason := gemm.unsupported_reason(x, weight_q, scale, to, extras)) is None:
        gemm.product(x, weight_q, scale, to, extras, kernel="linear", tile=tile)
    else:
        say(KernelChoice(LINEAR, TRITON, reason))
        portable.linear(x_q, weight_q, scale, bias, row_scale, residual, out)
    return add_rest(shares, out, able=reason is None)


def linear_int8_reference(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    y = (x_q.double() @ weight_q.double().t()).float()
    if row_scale is not None:
        y = y * row_scale[:, None]
    y = y * scale
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + residual.float()
    return y.to(dtype)


def linear_geglu_int8(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_inv_scale: Tensor,
    *,
    act: Activation = "gelu",
    added: Tensor | None = None,
    tile: Tile | None = None,
    shares: BranchShares | None = None,
) -> Tensor:
    """q(hidden · act(gate) · out_inv_scale), [hidden, gate] = x · Wᵀ + bias + added, in the operands' 8-bit type.

    x_q [M, K]; weight_q [2N, K]: hidden's rows, then the gate's, as diffusers keeps them. scale [2N], bias [2N]: fp32.
    added [M, 2N]: bf16 or fp32, contiguous; rows of zeros change no bit; or `shares` of adapters in its place.
    out_inv_scale: fp32, one number or [N]. gelu is the exact one to 6e-4, less than a tenth of a level; silu (SwiGLU:
    w3's rows, then w1's) to 3e-4 of the gate. Returns [M, N].
    """
    rows, columns = x_q.shape[0], weight_q.shape[0] // 2
    if x_q.shape[1] != weight_q.shape[1] or scale.numel() != 2 * columns:
        raise ValueError(f"x {tuple(x_q.shape)}, weight {tuple(weight_q.shape)}, scale {tuple(scale.shape)}")
    if shares is not None and not shares.folds:
        added, shares = shares.alone(2 * columns), None
    if added is not None and (added.shape != (rows, 2 * columns) or not added.is_contiguous()):
        raise ValueError(f"added is {tuple(added.shape)}, strides {added.stride()}, not {(rows, 2 * columns)}")
    step = per_channel(out_inv_scale, columns)
    out = torch.empty((rows, columns), dtype=x_q.dtype, device=x_q.device)
    residual = None if added is None else _image(added)
    extras = gemm.EpilogueInputs(bias=bias, residual=residual, inverse=out_inv_scale, silu=act == "silu", shares=shares)
    x, to = _image(x_q), _image(out)
    reason = gemm.unsupported_reason(x, weight_q, scale, to, extras)
    if added is not None and added.dtype != torch.bfloat16:
        reason = "what is added is not bf16"
    if reason is None:
        gemm.product(x, weight_q, scale, to, extras, kernel="geglu", tile=tile)
    else:
        say(KernelChoice(GEGLU, TRITON, reason))
        added = added if shares is None else shares.alone(2 * columns)
        portable.geglu(x_q, weight_q, scale, bias, added, out_inv_scale, step, out, silu=act == "silu")
    return out


def linear_geglu_int8_reference(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_inv_scale: Tensor,
    *,
    act: Activation = "gelu",
    added: Tensor | None = None,
) -> Tensor:
    y = linear_int8_reference(x_q, weight_q, scale, bias, dtype=torch.float32)
    y = y if added is None else y + added.float()
    hidden, gate = y.chunk(2, dim=1)
    return to_levels(hidden * (F.silu if act == "silu" else F.gelu)(gate) * out_inv_scale, x_q.dtype)
