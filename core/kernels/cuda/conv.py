"""8-bit 3×3 convolutions over NHWC as implicit GEMM; also after a nearest-neighbour upsampling by two.

The upsampled image is never materialized: each parity of the output's rows and columns reads only 2×2 distinct pixels
of the input, so four convolutions of 2×2 taps with summed weights give the same result for 4/9 of the work. On Hopper
the kernel of `gemm_source.py` runs, elsewhere Triton's. Operands are int8, or E4M3 under the same names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda import gemm, portable
from core.kernels.cuda.language import evenly_spaced
from core.kernels.cuda.low_rank import BranchShares, add_rest, folded
from core.kernels.cuda.tiles import Tile
from core.kernels.device import CONV, TRITON, UPSAMPLE, KernelChoice, say


def conv3x3_int8(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    residual: Tensor | None = None,
    stride: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    *,
    relu: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
    shares: BranchShares | None = None,
) -> Tensor:
    """y = scale · (x_q ∗ weight_q) + bias + row_bias + residual, padding 1, as `dtype` [B, H', W', Cout]; `relu` of it.

    x_q [B, H, W, Cin] and weight_q [Cout, 3, 3, Cin]: int8 or both E4M3, contiguous. scale, bias [Cout]: fp32; row_bias
    [B, Cout]: fp32, one per image (a time embedding), rows may be strided. residual [B, H', W', Cout] of the output's
    type; its pixels, and those of `out`, may be strided (channels of a wider tensor). H' = ceil(H / stride), stride 1
    or 2. `tile` overrides the table. `shares` of adapters are added, and not together with `relu`. Raises `ValueError`
    for shapes that disagree.
    """
    if shares is not None and relu:
        raise ValueError("relu of a result that shares are added to is not the kernels' own")
    if stride not in (1, 2) or weight_q.shape[1:] != (3, 3, x_q.shape[3]) or scale.numel() != weight_q.shape[0]:
        raise ValueError(f"x {tuple(x_q.shape)}, weight {tuple(weight_q.shape)}, stride {stride}")
    images, height, width = x_q.shape[:3]
    shape = (images, (height + stride - 1) // stride, (width + stride - 1) // stride, weight_q.shape[0])
    arguments = (x_q, weight_q.flatten(1), scale, bias, row_bias, residual, dtype, out, shape, 3, stride, tile, relu)
    return _conv(*arguments, shares)


def upsample_conv3x3_int8(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
    shares: BranchShares | None = None,
) -> Tensor:
    """The 3×3 convolution of the image at twice its height and width (nearest neighbour): [B, 2H, 2W, Cout].

    weight_q [4, Cout, 2, 2, Cin]: `upsample_weight` of the 3×3 weight, quantized. scale [4, Cout], bias [Cout]: fp32.
    `shares` of adapters are added.
    """
    if weight_q.shape[0] != 4 or weight_q.shape[2:] != (2, 2, x_q.shape[3]) or scale.numel() != 4 * weight_q.shape[1]:
        raise ValueError(f"x {tuple(x_q.shape)}, weight {tuple(weight_q.shape)}, scale {tuple(scale.shape)}")
    images, height, width = x_q.shape[:3]
    shape = (images, 2 * height, 2 * width, weight_q.shape[1])
    weight = weight_q.flatten(0, 1).flatten(1)
    return _conv(x_q, weight, scale.flatten(), bias, None, None, dtype, out, shape, 2, 1, tile, False, shares)


def _conv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    row_bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
    shape: tuple[int, int, int, int],
    taps: int,
    stride: int,
    tile: Tile | None,
    relu: bool,
    shares: BranchShares | None,
) -> Tensor:
    if residual is not None and (residual.shape != shape or residual.dtype != dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, the output {dtype} {shape}")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=x.device)
    for tensor in (t for t in (out, residual) if t is not None):
        if tensor.shape != shape or not evenly_spaced(tensor):
            raise ValueError(f"pixels are not evenly spaced: shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    extras = gemm.EpilogueInputs(bias=bias, row_bias=row_bias, residual=residual, shares=folded(shares))
    if (reason := gemm.unsupported_reason(x, weight, scale, out, extras)) is None:
        name = "upsample" if taps == 2 else "conv"
        gemm.product(x, weight, scale, out, extras, kernel=name, taps=(taps, taps), stride=stride, tile=tile)
        if relu:  # which is no part of this kernel's epilogue
            out.relu_()
    else:
        say(KernelChoice(UPSAMPLE if taps == 2 else CONV, TRITON, reason))
        phases = 4 if taps == 2 else 1
        portable.conv(
            x, weight, scale, bias, row_bias, residual, out, taps=taps, stride=stride, phases=phases, relu=relu
        )
    return add_rest(shares, out, able=reason is None)


def upsample_weight(weight: Tensor) -> Tensor:
    """The weights [4, Cout, 2, 2, Cin] of the four convolutions, from a 3×3 weight [Cout, 3, 3, Cin]; then quantize.

    Output pixel (2i+a, 2j+b) of parity 2a+b sees input pixels i+a-1, i+a and j+b-1, j+b: taps that fall on one of
    them are summed.
    """
    first = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=weight.dtype, device=weight.device)
    second = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=weight.dtype, device=weight.device)
    sums = (first, second)
    return torch.stack([torch.einsum("ry,sx,oyxc->orsc", sums[a], sums[b], weight) for a in (0, 1) for b in (0, 1)])


def conv3x3_int8_reference(
    x_q: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    residual: Tensor | None = None,
    stride: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    *,
    relu: bool = False,
) -> Tensor:
    x, weight = x_q.double().movedim(-1, 1), weight_q.double().movedim(-1, 1)
    y = F.conv2d(x, weight, stride=stride, padding=1).movedim(1, -1).float() * scale
    if bias is not None:
        y = y + bias
    if row_bias is not None:
        y = y + row_bias[:, None, None, :]
    if residual is not None:
        y = y + residual.float()
    return (y.relu() if relu else y).to(dtype)


def upsample_conv3x3_int8_reference(
    x_q: Tensor, weight_q: Tensor, scale: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    images, height, width, _ = x_q.shape
    y = torch.empty((images, 2 * height, 2 * width, weight_q.shape[1]), dtype=torch.float32, device=x_q.device)
    for phase in range(4):
        a, b = divmod(phase, 2)
        x = F.pad(x_q.double().movedim(-1, 1), (1 - b, b, 1 - a, a))
        z = F.conv2d(x, weight_q[phase].double().movedim(-1, 1)).movedim(1, -1).float()
        y[:, a::2, b::2] = z * scale[phase]
    return (y if bias is None else y + bias).to(dtype)
