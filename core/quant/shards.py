"""Slices of linear layers for tensor parallelism, quantized or not: a slice of a quantized layer has the levels and the
scales of the whole, so that slicing after quantization changes no number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant.dynamic import Int8DynamicLinear
from core.quant.fp8 import Fp8Linear
from core.quant.int4 import BLOCK, GROUP, Int4Linear, pack
from core.quant.linear import Int8Linear, ScaledLinear

_DENSE = (Int8Linear, Fp8Linear, Int8DynamicLinear)  # whose weights are [N, K], with a scale for each of N


def output_slice(layer: nn.Module, start: int, stop: int, *, size: int = 0) -> nn.Module:
    """A layer of the outputs from `start` to `stop`, followed by zeros up to `size` of them.

    Raises ValueError for an unsupported layer.
    """
    padding = max(0, size - (stop - start))

    def rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        part = tensor.detach()[start:stop]
        return F.pad(part, (*[0, 0] * (part.dim() - 1), 0, padding)) if padding else part.clone()

    if type(layer) is nn.Linear:
        return _linear(rows(layer.weight), rows(layer.bias))
    if type(layer) is Int4Linear:
        return Int4Linear(
            _present(rows(layer.weight)), _present(rows(layer.scale)), layer.inverse, rows(layer.bias),
            in_features=layer.in_features, zero=rows(layer.zero),
        )  # fmt: skip
    if type(layer) in _DENSE:
        assert isinstance(layer, ScaledLinear)
        weight, scale = _present(rows(_bytes(layer.weight))).view(layer.weight.dtype), _present(rows(layer.scale))
        return type(layer)(weight, scale, layer.inverse, rows(layer.bias))
    raise ValueError(f"layers of {type(layer).__name__} are not split")


def input_slice(layer: nn.Module, start: int, stop: int, *, bias: bool) -> nn.Module:
    """A layer that reads the inputs from `start` to `stop`: the sum of all slices' results is the layer's.

    One of them has the `bias`. Raises ValueError for an unsupported layer, or a slice that cuts a group of 4-bit
    weights.
    """
    kept: Any = layer.bias if bias else None
    if type(layer) is nn.Linear:
        return _linear(layer.weight.detach()[:, start:stop].clone(), None if kept is None else kept.detach().clone())
    if not isinstance(layer, ScaledLinear):
        raise ValueError(f"layers of {type(layer).__name__} are not split")
    inverse = None if layer.inverse is None else layer.inverse[start:stop].clone()
    if type(layer) is Int4Linear:
        words, scale, zero = _groups(layer, start, stop)
        return Int4Linear(words, scale, inverse, kept, in_features=stop - start, zero=zero)
    if type(layer) not in _DENSE:
        raise ValueError(f"layers of {type(layer).__name__} are not split")
    if not layer.STATIC:
        raise ValueError(f"{type(layer).__name__} has the scales of whole rows of inputs, which no rank of several has")
    weight = _bytes(layer.weight)[:, start:stop].clone().view(layer.weight.dtype)
    return type(layer)(weight, layer.scale, inverse, kept)


def _groups(layer: Int4Linear, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words, scales and zeros of the inputs from `start` to `stop`: the slice's groups begin where groups begin, or it
    lies in one.
    """
    if start % GROUP and start // GROUP != (stop - 1) // GROUP:
        raise ValueError(f"a split at input {start} cuts a group of {GROUP} 4-bit weights")
    first, last = start // GROUP, -(-stop // GROUP)

    def groups(tensor: Tensor) -> Tensor:
        part = tensor[:, first:last]
        return F.pad(part, (0, part.shape[1] % (BLOCK // GROUP))).contiguous()

    zero = None if layer.zero is None else groups(layer.zero)
    return pack(layer.levels[:, start:stop]), groups(layer.scale), zero


def _linear(weight: Tensor | None, bias: Tensor | None) -> nn.Linear:
    assert weight is not None
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _bytes(weight: Tensor) -> Tensor:
    """E4M3 as bytes: torch does not slice and pad it everywhere."""
    return weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
