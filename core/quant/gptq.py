"""GPTQ: rounds weights so that later columns make up for the errors of earlier ones, on inputs seen in calibration.

Frantar et al., 2023, with their order by activations. Scales stay as they are, so that only weights differ. Sparse
weights are pruned too, column by column (SparseGPT: Frantar and Alistarh, 2023), then in the order that they have.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core.quant.linear import LEVELS, ScaledWeights
from core.quant.sparse import GROUP, mask

_DAMPING = 0.01  # of the mean of the Hessian's diagonal, as published
_BLOCK = 128  # columns that are rounded before all later ones are updated
_FITTED = 4 / 5  # of the rows; the others tell whether anything was gained


def compensate_(quantized: nn.Module, layer: nn.Module, rows: Tensor) -> bool:
    """Round the integer weight of `quantized`, made of `layer`, anew, for inputs like `rows` [n, K]. In place.

    Returns whether that lowers the error of the output on a fifth of the rows, which were not used; else nothing
    changes. A convolution is rounded as if neighbouring pixels were independent.
    """
    assert isinstance(quantized, ScaledWeights) and isinstance(layer, (nn.Linear, nn.Conv2d))
    nearest, scale = quantized.levels, quantized.level_scale
    weight = layer.weight.detach().float()
    weight = (weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1)).reshape(nearest.shape)
    weight = weight if quantized.inverse is None else weight / quantized.inverse
    x = quantized.read(rows.to(weight.device).float()).double()
    fitted = round(len(x) * _FITTED)
    if not 0 < fitted < len(x):
        return False
    result = round_weight(weight, scale, x[:fitted].T @ x[:fitted], quantized.level_range, sparse=quantized.SPARSE)
    left = x[fitted:]

    def off(levels: Tensor) -> float:
        return float((left @ (levels.double() * scale - weight).T).square().sum())

    if not off(result) < off(nearest):
        return False
    quantized.levels = result
    return True


def round_weight(
    weight: Tensor,
    scale: Tensor | None,
    hessian: Tensor,
    bounds: tuple[Tensor | int, Tensor | int] = (-LEVELS, LEVELS),
    *,
    sparse: bool = False,
) -> Tensor:
    """int8 levels of a weight [N, K] with the scale [N, 1] or [N, K], for inputs with XᵀX = `hessian` [K, K].

    `bounds`, broadcastable to the levels, are the lowest and the highest of them. `sparse`: of each four neighbours the
    two that matter least become zero. Without a scale nothing is rounded: what is left of the weight is returned, in
    its own type.
    """
    diagonal = hessian.diagonal()
    order = torch.arange(len(diagonal)) if sparse else diagonal.argsort(descending=True, stable=True)
    left = weight.double()[:, order]
    unit, low, high = (
        torch.as_tensor(part, device=left.device).double().expand(weight.shape)[:, order]
        for part in (1 if scale is None else scale, *bounds)
    )
    damped = hessian.double()[order][:, order]
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean().clamp_min(1e-12))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    levels = torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        stop = min(start + _BLOCK, left.shape[1])
        errors = left.new_empty(len(left), stop - start)
        for column in range(start, stop):
            if sparse and column % GROUP == 0:
                group = slice(column, column + GROUP)
                kept = mask((left[:, group] / upper.diagonal()[group]).abs())
            value = left[:, column]
            if scale is not None:
                value = (value / unit[:, column]).round().clamp(low[:, column], high[:, column])
            levels[:, column] = value * kept[:, column % GROUP] if sparse else value
            error = (left[:, column] - levels[:, column] * unit[:, column]) / upper[column, column]
            left[:, column + 1 : stop] -= error[:, None] * upper[column, column + 1 : stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    rounded = torch.empty_like(levels)
    rounded[:, order] = levels
    return rounded.to(weight.dtype if scale is None else torch.int8)
