"""Linear layers of many groups stacked by rows: each group's rows of weights multiply the inputs routed to that group.

To `core.quant` a stack is one linear layer [groups · N, K]: its input channels are smoothed for all groups together,
and each output channel of each group has a scale of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant.linear import ScaledLinear


class StackedLinear(nn.Linear):
    """The unquantized layers of groups in one; called with the inputs, so that hooks on it see them."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` [groups, N, K], which the layer shares."""
        super().__init__(weight.shape[2], weight.shape[0] * weight.shape[1], bias=False, device="meta")
        self.weight = nn.Parameter(weight.flatten(0, 1), requires_grad=weight.requires_grad)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:  # type: ignore[override]
        """x [R, K] to [R, N]: the first counts[0] rows by the first group's weights, and so on."""
        weights = self.weight.unflatten(0, (len(counts), -1))
        return torch.cat([F.linear(rows, weight) for rows, weight in zip(x.split([*counts]), weights, strict=True)])


def grouped(layer: Any, x: Tensor, counts: Sequence[int]) -> Tensor:
    """`StackedLinear.forward` of a stack, quantized or not."""
    if not isinstance(layer, ScaledLinear):
        product: Tensor = layer(x, counts)
        return product
    size = len(layer.weight) // len(counts)
    parts = [
        rows_of(layer, slice(group * size, (group + 1) * size))(rows)
        for group, rows in enumerate(x.split([*counts]))
        if len(rows)
    ]
    return torch.cat(parts) if parts else x.new_empty(0, size)


def rows_of(layer: Any, rows: slice | Tensor) -> Any:
    """These output channels of a linear layer as a layer; of a slice, a view."""
    part = copy.copy(layer)
    part._parameters = {
        name: None if tensor is None else nn.Parameter(tensor[rows], requires_grad=False)
        for name, tensor in layer._parameters.items()
    }
    part._buffers = {
        name: tensor if tensor is None or name == "inverse" else tensor[rows] for name, tensor in layer._buffers.items()
    }
    part.out_features = len(part.weight)
    return part
