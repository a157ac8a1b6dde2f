"""Applies prompt weights to text embeddings.

Follows compel (damian0815/compel, `EmbeddingsProvider`, with its default way of down-weighting) and the web UI of
AUTOMATIC1111 (`modules/sd_emphasis.py`, "No norm", which it recommends for SDXL), each for its own syntax.
`contract.markup` and `contract.a1111` parse the weights, `pipeline.text.encode` runs the encoders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from contract.markup import WeightedPrompt
from pipeline.text.chunks import Tokens

_LEAST = 1e-5  # replaces a weight of 0, whose share would be infinite


def downweighted_parts(prompt: str | WeightedPrompt, tokens: Tokens) -> list[int]:
    """Return the indices of the read parts below 1: each needs an embedding of the prompt without it."""
    if isinstance(prompt, str):
        return []
    read_parts = {int(number) for number in tokens.parts.unique()}
    return [number for number, (_, weight) in enumerate(prompt.parts) if weight < 1 and number in read_parts]


def apply(hidden: torch.Tensor, empty: torch.Tensor, weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Return the weighted embedding [T, D], fp32.

    `hidden` [1 + L, T, D] is the prompt, and the prompt with each of the L parts below 1 masked; `empty` [T, D] the
    empty prompt; `weights` [T, 1]. Every token is moved away from the empty prompt's, or towards it, by its weight.
    Then the embeddings without each part are mixed in by its `share`.
    """
    hidden, empty = hidden.float(), empty.float()
    moved = torch.where(weights == 1, hidden, empty + (hidden - empty) * weights)
    mix = torch.tensor([1.0, *shares], device=hidden.device)
    return (moved * (mix / mix.sum())[:, None, None]).sum(0)


def share(weight: float) -> float:
    """Return the weight of the prompt without a part of this weight, below 1, relative to 1 for the prompt with it."""
    return math.tan((1 - max(_LEAST, weight)) * math.pi / 2)


def scaled(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return A1111's weighted embedding [T, D], fp32: every token's is multiplied by its weight [T, 1]."""
    return hidden.float() * weights
