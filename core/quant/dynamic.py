"""INT8 layers with dynamic scales: each row of the input is scaled by its own largest magnitude when the layer runs.

Weights are int8 by output channel, as in `core.quant.linear`. A row is a token of a linear layer, or a pixel of a
convolution's input (ZeroQuant's token-wise quantization: Yao et al., 2022, section 4.1). No calibration is needed.

Sums of levels are exact, so that a row's bits depend on nothing but the row. A kernel of `core.kernels.cpu` computes
them or, as here, floats that hold them; in a convolution each tap's are scaled before they are added up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.linear import LEVELS, ScaledConv2d, ScaledLinear, quantize

SMALLEST = 1e-30  # replaces the magnitude of a row of zeros, whose reciprocal would be infinite
_EXACT = 2**24 // LEVELS**2  # so many products of levels have a sum that fp32 holds exactly


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 levels of x [..., K], and the fp32 scale of each row [..., 1]. The scale of a row with NaN is NaN."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
    return quantize(x, LEVELS / largest), largest / LEVELS


def product(levels: Tensor, weight: Tensor) -> Tensor:
    """levels [..., K] times weight [N, K], both int8, in fp32 [..., N]: exact to 1,040 inputs, then sums of such."""
    parts = zip(levels.split(_EXACT, dim=-1), weight.split(_EXACT, dim=-1), strict=True)
    (first, *partials) = (F.linear(a.float(), b.float()) for a, b in parts)
    for other in partials:
        first += other
    return first


class Int8DynamicLinear(ScaledLinear):
    """y[n] = scale[n] · s · Σ_k round(x[k] / s) · weight[n, k] + bias[n], with s = max_k |x[k]| / 127."""

    STATIC = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of x's type."""
        levels, scale = quantize_rows(x)
        y = product(levels, self.weight) * scale * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Int8DynamicConv2d(ScaledConv2d):
    """A convolution with input and weights in int8, as `Int8DynamicLinear`; each pixel of the input has its own s."""

    STATIC = False

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, h, w] to [B, N, H, W] of x's type; each tap of the kernel is a product over the pixels under it."""
        around = (0, 0, *[self.padding] * 4)
        levels, scale = (F.pad(part, around) for part in quantize_rows(x.permute(0, 2, 3, 1)))
        _, kernel_height, kernel_width, _ = self.weight.shape
        height, width = (
            side - kernel + 1 for side, kernel in zip(levels.shape[1:3], (kernel_height, kernel_width), strict=True)
        )  # of the result, before strides
        y = torch.zeros((), device=x.device)
        for row in range(kernel_height):
            for column in range(kernel_width):
                under = (slice(None), slice(row, row + height, self.stride), slice(column, column + width, self.stride))
                y = y + product(levels[under], self.weight[:, row, column]) * scale[under]
        y = y * self.scale
        y = y if self.bias is None else y + self.bias
        return y.permute(0, 3, 1, 2).to(x.dtype)
