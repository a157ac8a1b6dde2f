"""A mixture of experts: a router, and the experts' gated products, stacked by expert. Computed by torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.grouped import grouped


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The layers of a mixture, as modules with a `weight`."""

    router: Any  # [E, C]
    gate_up: Any  # [E · 2I, C]: of each expert the gate's rows, then up's
    down: Any  # [E · C, I]
    experts: int
    top: int  # how many of them each token takes
    normalized: bool  # whether the weights of those are scaled to a sum of 1


def route(x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The experts of each row of x [T, C], the likeliest first, int64 [T, top], and their weights, fp32."""
    probabilities = F.linear(x, mixture.router.weight).softmax(-1, dtype=torch.float32)
    weights, experts = probabilities.topk(mixture.top, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if mixture.normalized else weights


def mixed(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Any, down: Any, count: int, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """The weighted sum, in order, of what each row's experts [T, top] of `count` make of x [T, C]."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=count).tolist()
    gate, up = grouped(gate_up, x[order // experts.shape[1]], counts).chunk(2, dim=-1)
    products = grouped(down, act(gate) * up, counts)
    y = torch.empty_like(products)
    y[order] = products
    return (y.view(*experts.shape, -1) * weights[..., None]).sum(1).to(x.dtype)
