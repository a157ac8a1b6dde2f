"""INT8 linear layers with 2:4 sparsity: of four neighbouring weights of a row, at most two are not zero.

Stored compressed: the two values of each group, and metadata of two bits a value, its place in the group. That is 5/8
of the bytes of INT8, and what sparse tensor cores read (`core.kernels.cuda.sparse_gemm`). What is pruned is chosen by
magnitude, by magnitude and inputs (Wanda: Sun et al., 2023), or with the other weights making up for it (SparseGPT:
Frantar and Alistarh, 2023; `core.quant.gptq`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant.linear import Int8Linear, ScaledLinear

GROUP, KEPT = 4, 2
_BYTE = 2 * GROUP  # inputs whose metadata is one byte
_LAST = 0b0100  # metadata of a group that is none: places 0 and 1


def mask(scores: Tensor) -> Tensor:
    """Boolean [N, K]: the two of each group of four with the largest scores [N, K], the first among equal ones.

    Raises ValueError for a depth that has no whole groups.
    """
    groups = _grouped(scores)
    kept = groups.argsort(dim=-1, descending=True, stable=True)[..., :KEPT]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, kept, True).view(scores.shape)


def _grouped(weight: Tensor) -> Tensor:
    """A weight [N, K] as [N, K/4, 4]."""
    if weight.shape[1] % GROUP:
        raise ValueError(f"{weight.shape[1]} inputs are no whole groups of {GROUP}")
    groups: Tensor = weight.unflatten(1, (-1, GROUP))
    return groups


def scores(weight: Tensor, rows: Tensor | None) -> Tensor:
    """The scores [N, K] of a weight's elements: magnitudes, times the norms of inputs `rows` [n, K] if given."""
    if rows is None:
        return weight.detach().float().abs()
    norms = rows.to(weight.device).float().square().sum(0).sqrt()
    return weight.detach().float().abs() * norms


def compress(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Values int8 [N, K/2] and metadata uint8 [N, ⌈K/8⌉] of levels int8 [N, K], of which two of four are not zero.

    Four bits of metadata are a group: the places of its first value, and of its second, which is a later one.
    Raises ValueError for a depth that has no whole groups, and for levels that are not 2:4 sparse.
    """
    groups = _grouped(levels)
    used = groups != 0
    if bool((used.sum(-1) > KEPT).any()):
        raise ValueError("more than two of four weights are not zero")
    places = used.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :KEPT].sort(dim=-1).values
    four = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    two = F.pad(four, (0, four.shape[1] % 2), value=_LAST).unflatten(1, (-1, 2))
    return groups.gather(-1, places).flatten(1), two[..., 0] | two[..., 1] << 4


def expand(values: Tensor, metadata: Tensor) -> Tensor:
    """Levels int8 [N, K] of values [N, K/2] and metadata [N, K/8]."""
    kept = values.unflatten(1, (-1, KEPT))
    groups = torch.zeros(*kept.shape[:-1], GROUP, dtype=values.dtype, device=values.device)
    return groups.scatter_(-1, _places(metadata)[:, : kept.shape[1]], kept).flatten(1)


def _places(metadata: Tensor) -> Tensor:
    """Places int64 [N, K/4, 2] of values in their groups."""
    four = torch.stack([metadata & 15, metadata >> 4], dim=-1).flatten(1).long()
    return torch.stack([four & 3, four >> 2], dim=-1)


class SparseInt8Linear(Int8Linear):
    """An `Int8Linear` whose weight is 2:4 sparse: `weight` has its values, int8 [N, K/2]."""

    SPARSE = True

    metadata: Tensor  # uint8 [N, K/8]

    def __init__(
        self, weight: Tensor, scale: Tensor, inverse: Tensor | None, bias: Tensor | None, *, metadata: Tensor
    ) -> None:
        super().__init__(weight, scale, inverse, bias)
        self.register_buffer("metadata", metadata)
        self.in_features = 2 * weight.shape[1]

    @classmethod
    def of(cls, layer: nn.Linear, inverse: Tensor | None, rows: Tensor | None = None) -> Self:
        """The layer with inputs scaled by `inverse` [K], pruned by `scores` with inputs like `rows` [n, K]."""
        weight = layer.weight.detach().float()
        pruned = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        pruned.weight = nn.Parameter(weight * mask(scores(weight, rows)), requires_grad=False)
        dense = Int8Linear.of(pruned, inverse)
        values, metadata = compress(dense.weight)
        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls(values, dense.scale, dense.inverse, bias, metadata=metadata)

    @classmethod
    def of_taps(cls, weight: Tensor, inverse: Tensor | None) -> ScaledLinear:  # type: ignore[override]
        """Dense taps: scales of inputs are searched before it is known what is pruned."""
        return Int8Linear.of_taps(weight, inverse)

    @classmethod
    def shapes(cls, layer: nn.Linear | nn.Conv2d) -> dict[str, tuple[int, ...]]:
        n, k = layer.weight.shape[:2]
        return super().shapes(layer) | {"weight": (n, k // 2), "metadata": (n, -(-k // _BYTE))}

    @classmethod
    def restored(cls, layer: nn.Linear, tensors: Mapping[str, Tensor]) -> Self:
        """The stored layer with these tensors. Raises ValueError without a weight, and as `check`."""
        if "weight" not in tensors:
            raise ValueError("a sparse layer is stored with its weights")
        restored = cls(*(tensors.get(part) for part in _PARTS), metadata=tensors["metadata"])  # type: ignore[arg-type]
        restored.check()
        return restored

    def check(self) -> None:
        """Reject metadata that no layer has, unless it is on meta. Raises ValueError."""
        metadata = self.metadata
        if metadata.dtype != torch.uint8 or not (metadata.is_meta or bool((_places(metadata).diff(dim=-1) > 0).all())):
            raise ValueError("metadata does not name two places of each group, in their order")

    @property
    def levels(self) -> Tensor:
        return expand(self.weight, self.metadata)

    @levels.setter
    def levels(self, levels: Tensor) -> None:
        self.weight, self.metadata = compress(levels)


_PARTS = ("weight", "scale", "inverse", "bias")


def expanded(layer: nn.Module) -> nn.Module:
    """The INT8 layer that computes bit for bit what a sparse one does; any other layer itself."""
    if not isinstance(layer, SparseInt8Linear):
        return layer
    return Int8Linear(layer.levels, layer.scale, layer.inverse, layer.bias)
