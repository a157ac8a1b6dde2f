"""Runs walks on each lowering: layers in floats and in 8 bits, inputs whose rounding to levels is not in doubt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering, Walk
from core.ops.reference import TorchLowering
from core.quant.linear import Int8Conv2d, Int8Linear
from tests.core.quant.stage import kernels, normal, seeded

ROWS = 4  # the most images of a call


def lowerings(*layers: nn.Module) -> dict[str, Lowering]:
    """Torch first: the others may lay weights out anew."""
    return {
        "torch": TorchLowering(torch.float32),
        "cpu": CpuLowering(kernels(), nn.ModuleList(layers)),
        "cuda": CudaLowering(torch.float32, ROWS),
    }


@torch.inference_mode()
def run(lowering: Lowering, walk: Walk, *given: Tensor, bound: int | None = None) -> tuple[Tensor, ...]:
    """What the walk returns, each result in memory of its own."""
    lowering.prepare(walk, *(tuple(x.shape) for x in given), bound=bound)
    return tuple(out.clone() for out in lowering.lower(walk, "walk", bound=bound)(*given))


def through(*layers: nn.Module, **options: Any) -> Walk:
    """A walk through linear layers side by side."""
    return lambda ops, x: ops.linear(x, *layers, **options)


def linear(seed: int, channels: int, n: int, *, bias: bool = True) -> nn.Linear:
    return _filled(nn.Linear(channels, n, bias=bias), seed)


def point(seed: int, channels: int, n: int) -> nn.Conv2d:
    return _filled(nn.Conv2d(channels, n, 1), seed)


def conv(seed: int, channels: int, n: int, *, stride: int = 1, padding: int = 1) -> nn.Conv2d:
    return _filled(nn.Conv2d(channels, n, 3, stride=stride, padding=padding), seed)


def norm(seed: int, channels: int, *, groups: int = 0) -> nn.GroupNorm | nn.LayerNorm:
    """Over groups of channels, or over all of a token's."""
    return _filled(nn.GroupNorm(groups, channels) if groups else nn.LayerNorm(channels), seed)


def _filled(layer: Any, seed: int) -> Any:
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = normal(seed + index, *parameter.shape)
    return layer.requires_grad_(False)


def inverse(seed: int, channels: int) -> Tensor:
    """One over the scale of each input channel."""
    return 10 + 20 * torch.rand(channels, generator=seeded(seed))


def eight(layer: Any, by: Tensor) -> Any:
    """The layer in INT8."""
    return Int8Linear.of(layer, by) if isinstance(layer, nn.Linear) else Int8Conv2d.of(layer, by)


def between(seed: int, by: Tensor, *shape: int) -> Tensor:
    """Inputs that are nearer to one level than to the next by far."""
    levels = torch.randint(-130, 131, shape, generator=seeded(seed))
    return (levels + 0.8 * (torch.rand(shape, generator=seeded(seed + 1)) - 0.5)) / by
