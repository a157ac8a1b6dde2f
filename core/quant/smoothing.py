"""SmoothQuant's formula: how much of a channel's range moves from the activations into the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from core.quant.linear import LEVELS

_TINY = 1e-5  # avoids a division by zero for a channel that was always zero


def smoothing(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """The scale s [K] that activations are divided by and weights multiplied with.

    s_k = max|x_k|^α / max|w_k|^(1−α) (Xiao et al., 2023, equation 4); both arguments are largest magnitudes [K], and
    `alpha` is between 0 (all that is hard goes to the activations) and 1 (all to the weights), else ValueError.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha}")
    return activations.clamp_min(_TINY) ** alpha / weights.clamp_min(_TINY) ** (1 - alpha)


def inverse_scales(activations: Tensor, smooth: Tensor | None = None, halves: int | None = None) -> Tensor:
    """One over the scale of each input channel [K], for one static scale per tensor behind the smoothing.

    `activations` [K] are the largest magnitudes. `smooth` None is plain INT8. `halves` is where the second part of a
    concatenation begins: each part then has a scale of its own, because they differ in range. Raises ValueError where
    that is not within the channels.
    """
    if halves is not None and not 0 < halves < len(activations):
        raise ValueError(f"the second half of {len(activations)} channels cannot begin at {halves}")
    smooth = torch.ones_like(activations) if smooth is None else smooth
    ranges = activations / smooth
    inverse = torch.empty_like(ranges)
    for part in (slice(None),) if halves is None else (slice(halves), slice(halves, None)):
        inverse[part] = LEVELS / ranges[part].max().clamp_min(_TINY)
    return inverse / smooth
