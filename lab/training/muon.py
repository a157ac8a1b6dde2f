"""The Muon optimizer: momentum whose matrices are orthogonalized before they are applied (Jordan et al. 2024).

Convolutions count as matrices [out, in * k * k].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Quintic Newton-Schulz coefficients of the reference implementation: steepest at zero, singular values end in 0.7..1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[N, R, C] to matrices with the same singular vectors and singular values near 1, all N at once."""
    transposed = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if transposed else matrices).float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if matrices.is_cuda or torch.cpu._is_avx512_bf16_supported():
        x = x.bfloat16()  # enough: the result need only be near orthogonal
    for _ in range(steps):
        square = x @ x.mT
        inner = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, inner, x, beta=_A)
    result: Tensor = (x.mT if transposed else x).to(matrices.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum for weights of two or more dimensions.

    The update is scaled to the root mean square that AdamW's has (0.2 * sqrt(max(R, C)), Liu et al. 2025), so
    that learning rates of both mean the same. Raises `ValueError` for a parameter of one dimension.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    raise ValueError(f"Muon: a parameter of shape {tuple(p.shape)} is no matrix")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Applies the gradients; parameters of equal shape are orthogonalised in one batch."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault((p.shape[0], p.numel() // p.shape[0]), []).append(p)
            for (rows, columns), parameters in by_shape.items():
                grads = [p.grad for p in parameters if p.grad is not None]
                for p in parameters:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                momenta = [self.state[p]["momentum"] for p in parameters]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
                directions = orthogonalise(torch.stack([update.reshape(rows, columns) for update in ahead]))
                step = -0.2 * max(rows, columns) ** 0.5 * group["lr"]
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(
                    parameters, [u.reshape(p.shape) for u, p in zip(directions, parameters, strict=True)], alpha=step
                )
