"""Low-rank branches, the operation that adds an adapter's share to a layer: scale · up(down(x)) (Hu et al., 2021).

Rows of one batch get different adapters, several, or none (Punica: Chen et al., 2023; S-LoRA: Sheng et al., 2023).
Torch computes it behind a layer (`branch`); on the CPU kernels it is a part of the layer's product, and a walk's
program is the same with it and without; `core.ops.cuda_branches` has the GPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.branches import BranchPart
from core.kernels.cpu.branches import BranchTable, PackedBranch, pack_branch
from core.kernels.cpu.program import Weights
from core.ops.packed import PackedLayer


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One layer's branch: `scale` · up(down(x)).

    Of a linear layer `down` is [rank, in] and `up` [out, rank]; of a convolution [rank, in, height, width] and [out,
    rank, 1, 1].
    """

    down: Tensor
    up: Tensor
    scale: float


def branch(layer: Any, x: Tensor, factor: LowRank, scale: float | Tensor) -> Tensor:
    """scale · up(down(x)) of a layer's input, on torch; `factor.scale` is the caller's to include.

    `scale` is a number, or broadcasts against down(x).
    """
    if factor.down.dim() < 4:
        return F.linear(F.linear(x, factor.down) * scale, factor.up)
    low = F.conv2d(x, factor.down, None, layer.stride, layer.padding, layer.dilation)
    return F.conv2d(low * scale, factor.up)


class PackedAdapter(Protocol):
    """One adapter's branches, packed for a lowering."""

    @property
    def size_bytes(self) -> int:
        """The memory that the adapter takes."""
        ...


class PackedBranches:
    """One adapter's branches, packed for the layers of a CPU lowering."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[PackedLayer], factors: Mapping[str, LowRank]) -> None:
        """`factors` are by the layers' names. Raises ValueError, naming the layer, for one that does not fit, or of a
        layer that is not among `layers`.
        """
        layer_names = {name for layer in layers for name in layer.names}
        if unknown := sorted(factors.keys() - layer_names):
            raise ValueError(f"layer {unknown[0]}: the kernels do not run it, and so no branch of it")
        self._packed: dict[Weights, PackedBranch] = {}
        for layer in layers:
            if any(name in factors for name in layer.names):
                self._packed[layer.weights] = _pack(library, layer, factors)

    def of(self, layer: PackedLayer) -> PackedBranch | None:
        """The adapter's branch of this layer, or None."""
        return self._packed.get(layer.weights)

    @property
    def size_bytes(self) -> int:
        return sum(packed.size_bytes for packed in self._packed.values())


class RowBranches:
    """The adapters of each row of a batch, in the order in which they are added, with their scales."""

    def __init__(self, rows: Sequence[Sequence[tuple[PackedBranches, float]]]) -> None:
        self.key = tuple(tuple((id(adapter), scale) for adapter, scale in row) for row in rows)
        self.adapters = list({id(adapter): adapter for row in rows for adapter, _ in row}.values())
        numbers = {id(adapter): number for number, adapter in enumerate(self.adapters)}
        self.table = BranchTable([[(numbers[id(adapter)], scale) for adapter, scale in row] for row in rows])

    def addresses(self, layer: PackedLayer) -> Any:
        """An array of the branches of each adapter in this layer, for a product's `branches`; None without any."""
        addresses = [adapter.of(layer) for adapter in self.adapters]
        if not any(addresses):
            return None
        return (ctypes.c_void_p * len(addresses))(
            *(None if address is None else address.address for address in addresses)
        )


def _pack(library: ctypes.CDLL, layer: PackedLayer, factors: Mapping[str, LowRank]) -> PackedBranch:
    parts, start = [], 0
    for name, width in zip(layer.names, layer.widths, strict=True):
        if name in factors:
            try:
                parts.append(_part(layer, start, width, factors[name]))
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"layer {name}: its branch does not fit: {error}") from error
        start += width
    return pack_branch(library, layer.weights, layer.inverse, parts)


def _part(layer: PackedLayer, start: int, width: int, factor: LowRank) -> BranchPart:
    weights = layer.weights
    part = as_part(start, width, weights.taps, factor)
    down = part.down[:, :, layer.first : layer.first + weights.channels]
    if down.shape[-1] != weights.channels:
        raise ValueError(f"it reads {down.shape[-1]} channels, not {weights.channels}")
    return part._replace(down=down.contiguous())


def as_part(start: int, width: int, taps: int, factor: LowRank) -> BranchPart:
    """An adapter's share in `width` columns from `start` on, of a layer with so many taps, in fp32 on the CPU.

    Raises ValueError or RuntimeError for matrices of other shapes.
    """
    rank, down = factor.down.shape[0], factor.down.detach().to("cpu", torch.float32)
    if down.dim() == 4:
        down = down.permute(0, 2, 3, 1)
    up = factor.up.detach().to("cpu", torch.float32).reshape(width, rank) * factor.scale
    return BranchPart(start, down.reshape(rank, taps, -1), up)
