"""Layers that run in bf16 or in 8 bits, whichever they are told: what this folder's fused UNet and VAE are made of.

Channels last throughout. A layer sees its inputs while `observing`, and `prepare` turns what it saw (the largest
magnitude) into a static scale. Knows kernels and shapes; knows no model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant.kernels.cuda.attention import attention_int8
from core.quant.kernels.cuda.conv import conv3x3_int8, upsample_conv3x3_int8, upsample_weight
from core.quant.kernels.cuda.group_norm import group_norm_int8, group_norm_int8_reference
from core.quant.kernels.cuda.layer_norm import layer_norm_int8
from core.quant.kernels.cuda.linear import linear_geglu_int8, linear_int8
from core.quant.kernels.cuda.quantize import quantize, to_levels, top


class Precision:
    """What a whole model computes in; its layers hold this one object. `kind`: None (the base type) or an 8-bit type.

    `own_attention`: the kernel of this project instead of torch's (8 bits always use it).
    """

    def __init__(self, base: torch.dtype) -> None:
        self.base = base
        self.kind: torch.dtype | None = None
        self.observing = False
        self.own_attention = False


class Layer:
    """Weights in the base type and, once prepared, in 8 bits: one scale per output channel, one of the input."""

    def __init__(self, precision: Precision, weight: Tensor, bias: Tensor | None) -> None:
        self.precision = precision
        self.weight = weight.to(precision.base)
        self.bias = None if bias is None else bias.to(precision.base)
        self.bias32 = None if bias is None else bias.float()
        self.top = torch.zeros(1, device=weight.device)
        self.ready: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = {}

    def observe(self, x: Tensor) -> None:
        if self.precision.observing:
            self.top = torch.maximum(self.top, x.abs().amax().float().view(1))

    def rows(self) -> Tensor:
        """The weight whose leading dimensions are output channels, the last one input channels."""
        return self.weight.float()

    def lead(self) -> int:
        """How many leading dimensions of `rows` have a scale of their own."""
        return 1

    def prepare(self, kind: torch.dtype) -> None:
        rows, limit = self.rows(), top(kind)
        step = rows.flatten(self.lead()).abs().amax(dim=-1) / limit
        whole = to_levels(rows / step.view(*step.shape, *[1] * (rows.dim() - self.lead())), kind)
        unit = self.top / limit
        self.ready[kind] = (whole.contiguous(), (step * unit).contiguous(), 1.0 / unit)

    @property
    def inverse(self) -> Tensor:
        assert self.precision.kind is not None
        return self.ready[self.precision.kind][2]


class Linear(Layer):
    """y = x · Wᵀ + b + residual over tokens [M, K]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self.precision.kind is None:
            self.observe(x)
            y = F.linear(x, self.weight, self.bias)
            y = y if residual is None else y.add_(residual)
            return y if out is None else out.copy_(y)
        weight, scale, _ = self.ready[self.precision.kind]
        return linear_int8(x, weight, scale, self.bias32, None, residual, self.precision.base, out=out)


class Gated(Layer):
    """hidden · gelu(gate), for `then`, which gets it quantized."""

    def __call__(self, x: Tensor, then: Layer) -> Tensor:
        if self.precision.kind is None:
            self.observe(x)
            hidden, gate = F.linear(x, self.weight, self.bias).chunk(2, dim=-1)
            return hidden * F.gelu(gate)
        weight, scale, _ = self.ready[self.precision.kind]
        return linear_geglu_int8(x, weight, scale, self.bias32, then.inverse)


class Conv(Layer):
    """A 3×3 convolution over NHWC. Its base-type weight keeps torch's order of dimensions, in channels-last memory."""

    def __init__(self, precision: Precision, layer: nn.Conv2d) -> None:
        super().__init__(precision, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.stride = layer.stride[0]

    def rows(self) -> Tensor:
        return self.weight.float().permute(0, 2, 3, 1)

    def __call__(
        self, x: Tensor, row_bias: Tensor | None = None, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if self.precision.kind is None:
            self.observe(x)
            y = F.conv2d(x.permute(0, 3, 1, 2), self.weight, self.bias, self.stride, 1).permute(0, 2, 3, 1)
            y = y if row_bias is None else y.add_(row_bias[:, None, None].to(y.dtype))
            y = y if residual is None else y.add_(residual)
            return y if out is None else out.copy_(y)
        weight, scale, _ = self.ready[self.precision.kind]
        base = self.precision.base
        return conv3x3_int8(x, weight, scale, self.bias32, row_bias, residual, self.stride, base, out=out)


class UpConv(Conv):
    """The same after a nearest-neighbour upsampling by two."""

    def rows(self) -> Tensor:
        return upsample_weight(self.weight.float().permute(0, 2, 3, 1))

    def lead(self) -> int:
        return 2

    def __call__(
        self, x: Tensor, row_bias: Tensor | None = None, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if self.precision.kind is None:
            up = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2.0, mode="nearest").permute(0, 2, 3, 1)
            return super().__call__(up, row_bias, residual, out)
        weight, scale, _ = self.ready[self.precision.kind]
        return upsample_conv3x3_int8(x, weight, scale, self.bias32, self.precision.base, out=out)


class Norm:
    """LayerNorm or GroupNorm (and SiLU) for the layer that comes next, in the type that this one wants."""

    def __init__(self, precision: Precision, norm: nn.Module, silu: bool = False) -> None:
        assert isinstance(norm, nn.LayerNorm | nn.GroupNorm)
        self.precision, self.eps, self.silu = precision, norm.eps, silu
        self.groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else 0
        assert norm.weight is not None and norm.bias is not None
        self.weight, self.bias = norm.weight.detach().to(precision.base), norm.bias.detach().to(precision.base)

    def __call__(self, x: Tensor, then: Layer | None) -> Tensor:
        """x [M, C] or [B, H, W, C]. `then` None: the base type, whatever the model computes in."""
        kind = None if then is None else self.precision.kind
        inverse = None if kind is None or then is None else then.inverse
        if self.groups:
            norm = group_norm_int8 if x.is_cuda else group_norm_int8_reference
            dtype = kind or self.precision.base
            return norm(x, self.groups, self.weight, self.bias, self.eps, inverse, self.silu, dtype)
        if kind is None or inverse is None:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return layer_norm_int8(x, self.weight, self.bias, self.eps, inverse, kind)


def attend(precision: Precision, q: Tensor, k: Tensor, v: Tensor, then: Layer) -> Tensor:
    """Attention over [B, S, H, 64] for the layer that comes next: [B·Sq, C]."""
    if precision.kind is not None:
        return attention_int8(q, k, v, then.inverse, precision.kind).flatten(0, 1)
    if precision.own_attention:
        return attention_int8(q, k, v, None, torch.bfloat16).flatten(0, 1)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return y.transpose(1, 2).flatten(2).flatten(0, 1)


def for_layer(precision: Precision, x: Tensor, then: Layer) -> Tensor:
    """x as the layer that comes next wants it."""
    return x if precision.kind is None else quantize(x, then.inverse, precision.kind)
