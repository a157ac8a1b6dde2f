"""FP8 (E4M3) linear layers and convolutions: weights and activations scaled into 8-bit floats.

Linear layers use `torch._scaled_mm` where a GPU supports it; convolutions use kernels of `core.kernels` or, as
here, floats.

Only GPUs of compute capability 8.9 and up multiply FP8; elsewhere the same numbers are computed in fp32, for checks and
not for speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.linear import ScaledConv2d, ScaledLinear

E4M3_MAX = 448.0


def to_e4m3(x: Tensor) -> Tensor:
    """Clamp to ±448 and round to E4M3: the cast alone turns larger values into NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def available(device: torch.device) -> bool:
    """Return whether this device multiplies FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 weight and fp32 scale of each row of [N, ...], by its largest magnitude. A row of zeros gets scale 1."""
    scale = weight.flatten(1).abs().amax(dim=1) / E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return to_e4m3(weight / scale.view(-1, *[1] * (weight.dim() - 1))), scale


class Fp8Linear(ScaledLinear):
    """y[n] = scale[n] · Σ_k e4m3(x[k] · inverse[k]) · weight[n, k] + bias[n]."""

    TOP = E4M3_MAX
    _rounded = staticmethod(round_weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of x's type."""
        rows = to_e4m3(x.float() * self.inverse).reshape(-1, self.in_features).contiguous()
        if available(x.device) and not (self.in_features % 16 or self.out_features % 16):
            ones = torch.ones((rows.shape[0], 1), device=x.device)
            out = torch._scaled_mm(
                rows, self.weight.t(), scale_a=ones, scale_b=self.scale[None], out_dtype=torch.bfloat16
            )
            y: Tensor = out.float()
        else:
            y = F.linear(rows.float(), self.weight.float()) * self.scale
        y = y.view(*x.shape[:-1], self.out_features)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Fp8Conv2d(ScaledConv2d):
    """A convolution with input and weights in E4M3, as `Fp8Linear`; `inverse` has one value for each input channel."""

    TOP = E4M3_MAX
    _rounded = staticmethod(round_weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, h, w] to [B, N, H, W] of x's type."""
        levels = to_e4m3(x.float() * self.inverse.view(-1, 1, 1)).float()
        y = F.conv2d(levels, self.weight.float().permute(0, 3, 1, 2), stride=self.stride, padding=self.padding)
        y = y * self.scale.view(-1, 1, 1)
        return (y if self.bias is None else y + self.bias.view(-1, 1, 1)).to(x.dtype)
