"""INT8 linear layers and convolutions as modules: weights by output channel, activations by a vector of static scales.

They store integers and scales, and multiply with a kernel of `core.kernels` or, without one, with the same
arithmetic in floats. What all 8-bit layers share is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 127  # symmetric: -127…127


def quantize(x: Tensor, inverse: Tensor) -> Tensor:
    """Round half to even to int8 levels: x [..., C] times `inverse` [C], as int8."""
    return (x.float() * inverse).round().clamp(-LEVELS, LEVELS).to(torch.int8)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weight and fp32 scale of each row of [N, ...], by its largest magnitude. A row of zeros gets scale 1."""
    rows = weight.float().flatten(1)
    scale = rows.abs().amax(dim=1) / LEVELS
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # the smallest floats underflow to zero when divided
    quantized = (rows / scale[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    return quantized.view(weight.shape), scale


class FixedDtypeModule(nn.Module):
    """A module whose buffers keep their dtypes when a model is cast: `to` only moves them to its device."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return converted if converted.dtype == tensor.dtype else tensor.to(converted.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class ScaledWeights(FixedDtypeModule):
    """8-bit weights with a scale for each output channel, and a vector that multiplies inputs.

    STATIC: the vector exists; otherwise inputs are scaled by what they are, and `inverse` is None. ROUNDS: inputs are
    rounded to levels of the weight's type. TOP: the largest level of inputs. RANGE: the levels of integer weights.
    OPTIONAL: stored parts that may be absent. SPARSE: weights are pruned by what inputs are (`core.quant.sparse`).
    """

    STATIC: ClassVar[bool] = True
    ROUNDS: ClassVar[bool] = True
    TOP: ClassVar[float] = LEVELS
    RANGE: ClassVar[tuple[int, int]] = (-LEVELS, LEVELS)
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    SPARSE: ClassVar[bool] = False

    weight: Tensor  # [N, ...], int8 or E4M3
    scale: Tensor  # fp32 [N]
    inverse: Tensor  # fp32 [K]
    bias: Tensor | None  # fp32 [N]

    def __init__(self, weight: Tensor, scale: Tensor, inverse: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("inverse", inverse)
        self.register_buffer("bias", bias)

    @staticmethod
    def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
        """The 8-bit weight and the fp32 scale of each row of [N, ...]."""
        return quantize_weight(weight)

    @property
    def levels(self) -> Tensor:
        """The levels of integer weights as rows, int8 [N · taps, K]."""
        return self.weight.reshape(-1, self.weight.shape[-1])

    @levels.setter
    def levels(self, levels: Tensor) -> None:
        self.weight = levels.view(self.weight.shape)

    @property
    def level_scale(self) -> Tensor:
        """The fp32 scale of `levels`: [N · taps, 1] or [N · taps, K]."""
        return self.scale.repeat_interleave(len(self.levels) // len(self.scale))[:, None]

    @property
    def level_range(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest of `levels`, broadcastable to them."""
        low, high = (torch.tensor(float(level), device=self.weight.device) for level in self.RANGE)
        return low, high

    def read(self, x: Tensor) -> Tensor:
        """What the product of weights reads of inputs x [..., K]."""
        return quantize(x, self.inverse)

    @classmethod
    def shapes(cls, layer: nn.Linear | nn.Conv2d) -> dict[str, tuple[int, ...]]:
        """The shapes of the parts that are stored of what replaces `layer`."""
        n, k, *kernel = layer.weight.shape
        shapes: dict[str, tuple[int, ...]] = {"weight": (n, *kernel, k), "scale": (n,)}
        shapes |= {"inverse": (k,)} if cls.STATIC else {}
        return shapes if layer.bias is None else shapes | {"bias": (n,)}


class ScaledLinear(ScaledWeights):
    """A quantized linear layer; weight [N, K]."""

    def __init__(self, weight: Tensor, scale: Tensor, inverse: Tensor | None, bias: Tensor | None) -> None:
        super().__init__(weight, scale, inverse, bias)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of(cls, layer: nn.Linear, inverse: Tensor | None) -> Self:
        """The layer with inputs scaled by `inverse` [K] to INT8's levels, stretched to its own."""
        return cls.scaled(layer, _stretched(inverse, cls.TOP))

    @classmethod
    def scaled(cls, layer: nn.Linear, inverse: Tensor | None) -> Self:
        """The layer with this `inverse` [K] as its own."""
        return cls._rounding(_folded(layer.weight.detach().float(), inverse), inverse, _bias(layer))

    @classmethod
    def _rounding(cls, weight: Tensor, inverse: Tensor | None, bias: Tensor | None) -> Self:
        """The layer of a weight [N, K] for inputs that are multiplied by `inverse` [K] before."""
        return cls(*cls._rounded(weight), inverse, bias)

    @classmethod
    def of_taps(cls, weight: Tensor, inverse: Tensor | None) -> Self:
        """The taps of a weight [N, taps, K], rounded together, as a layer of N · taps outputs, as `of` makes it."""
        inverse = _stretched(inverse, cls.TOP)
        rounded, scale = cls._rounded(_folded(weight, inverse))
        return cls(rounded.flatten(0, 1), scale.repeat_interleave(weight.shape[1]), inverse, None)

    @classmethod
    def restored(cls, layer: nn.Linear, tensors: Mapping[str, Tensor]) -> Self:
        """The stored layer with these tensors; without a weight, `layer` quantized by them."""
        if "weight" not in tensors:
            return cls.scaled(layer, tensors.get("inverse"))
        return cls(tensors["weight"], tensors["scale"], tensors.get("inverse"), tensors.get("bias"))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ScaledConv2d(ScaledWeights):
    """A quantized convolution; weight [N, kh, kw, C], channels last, as the kernels read it."""

    def __init__(
        self, weight: Tensor, scale: Tensor, inverse: Tensor | None, bias: Tensor | None, *, stride: int, padding: int
    ) -> None:
        super().__init__(weight, scale, inverse, bias)
        self.out_channels, self.in_channels = weight.shape[0], weight.shape[-1]
        self.kernel_size: tuple[int, ...] = tuple(weight.shape[1:3])
        self.stride, self.padding = stride, padding

    @classmethod
    def of(cls, layer: nn.Conv2d, inverse: Tensor | None) -> Self:
        """Build it like `ScaledLinear.of`; `inverse` is [C]. Raises ValueError for what `steps` rejects."""
        return cls.scaled(layer, _stretched(inverse, cls.TOP))

    @classmethod
    def scaled(cls, layer: nn.Conv2d, inverse: Tensor | None) -> Self:
        """Scale like `ScaledLinear.scaled`. Raises ValueError for what `steps` rejects."""
        stride, padding = steps(layer)
        folded = _folded(layer.weight.detach().float().permute(0, 2, 3, 1), inverse)
        weight, scale = cls._rounded(folded.contiguous())
        return cls(weight, scale, inverse, _bias(layer), stride=stride, padding=padding)

    @classmethod
    def restored(cls, layer: nn.Conv2d, tensors: Mapping[str, Tensor]) -> Self:
        """Restore like `ScaledLinear.restored`. Raises ValueError for what `steps` rejects."""
        if "weight" not in tensors:
            return cls.scaled(layer, tensors.get("inverse"))
        stride, padding = steps(layer)
        inverse, bias = tensors.get("inverse"), tensors.get("bias")
        return cls(tensors["weight"], tensors["scale"], inverse, bias, stride=stride, padding=padding)

    def extra_repr(self) -> str:
        kernel = self.kernel_size
        return f"{self.in_channels}, {self.out_channels}, {kernel=}, stride={self.stride}, padding={self.padding}"


class Int8Linear(ScaledLinear):
    """y = W x + b with x and W in int8: y[n] = scale[n] · Σ_k q(x[k] · inverse[k]) · weight[n, k] + bias[n].

    `inverse` [K] is one over the scale of each input channel; it includes smoothing (Xiao et al., 2023, section 4) and
    the scales of a concatenation's halves, and the weights were divided by it before they were quantized.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of x's type. Sums are exact to 1,040 inputs, then as exact as fp32."""
        y = F.linear(quantize(x, self.inverse).float(), self.levels.float()) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Int8Conv2d(ScaledConv2d):
    """A convolution with input and weights in int8, as `Int8Linear`; `inverse` has one value for each input channel."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, h, w] to [B, N, H, W] of x's type."""
        quantized = quantize(x.permute(0, 2, 3, 1), self.inverse).float().permute(0, 3, 1, 2)
        y = F.conv2d(quantized, self.weight.float().permute(0, 3, 1, 2), stride=self.stride, padding=self.padding)
        y = y * self.scale.view(-1, 1, 1)
        return (y if self.bias is None else y + self.bias.view(-1, 1, 1)).to(x.dtype)


def steps(layer: nn.Conv2d) -> tuple[int, int]:
    """Stride and padding of a convolution that can be quantized. Raises ValueError for one that cannot."""
    plain = layer.groups == 1 and {*layer.dilation} == {1} and layer.padding_mode == "zeros"
    if not plain or isinstance(layer.padding, str) or len({*layer.stride}) != 1 or len({*layer.padding}) != 1:
        raise ValueError(
            "only plain convolutions are quantized: no groups, no dilation, equal strides, equal padding with zeros"
        )
    return int(layer.stride[0]), int(layer.padding[0])


def _stretched(inverse: Tensor | None, top: float) -> Tensor | None:
    return None if inverse is None else inverse.float() * (top / LEVELS)


def _folded(weight: Tensor, inverse: Tensor | None) -> Tensor:
    """A weight [..., K] for inputs that are multiplied by `inverse` [K] before."""
    return weight if inverse is None else weight / inverse


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach().float()
