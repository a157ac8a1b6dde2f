"""The experts of transformers' mixtures as stacks of linear layers, which `core.quant` quantizes like any other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from core.ops.mixture import Mixture, mixed
from core.quant.grouped import StackedLinear


class Experts(nn.Module):
    """Takes the place of `MixtralExperts` and `Qwen3MoeExperts`, whose weights it shares."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.count, self.act = int(experts.num_experts), experts.act_fn
        self.gate_up, self.down = StackedLinear(experts.gate_up_proj), StackedLinear(experts.down_proj)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, C] to [T, C], by the experts int [T, k] of each row and their weights [T, k]."""
        return mixed(x, chosen, weights, self.gate_up, self.down, self.count, self.act)


def adopt(network: Any, kinds: tuple[str, ...]) -> None:
    """Put `Experts` in the place of transformers' in a model of one of these types."""
    if network.config.model_type not in kinds:
        return
    for layer in network.base_model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = Experts(layer.mlp.experts)


def mixture(mlp: Any) -> Mixture | None:
    """The mixture of a layer's feed-forward block; None for one that is dense."""
    if not hasattr(mlp, "experts"):
        return None
    experts: Experts = mlp.experts
    normalized = bool(getattr(mlp.gate, "norm_topk_prob", True))  # Mixtral's always are
    return Mixture(mlp.gate, experts.gate_up, experts.down, experts.count, int(mlp.gate.top_k), normalized)
