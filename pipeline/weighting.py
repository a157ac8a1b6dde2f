"""Applies prompt weights to text embeddings.

Follows compel (damian0815/compel, `EmbeddingsProvider`, with its default way of down-weighting). `contract.markup`
parses the weights, `pipeline.encode` runs the encoders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contract.markup import WeightedPrompt

_LEAST = 1e-5  # replaces a weight of 0, whose share would be infinite


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A prompt as one encoder reads it."""

    ids: torch.Tensor  # [T]
    weights: torch.Tensor  # [T], fp32: 1 for start, end and padding
    parts: torch.Tensor  # [T]: the index of the token's part; -1 for start, end and padding
    dropped: str  # the truncated text


def tokens(tokenizer: Any, prompt: WeightedPrompt) -> Tokens:
    """Each part's tokens concatenated, truncated to the encoder's context, and padded to that length."""
    reach = tokenizer.model_max_length - 2
    ids: list[int] = []
    weights: list[float] = []
    owners: list[int] = []
    dropped = ""
    for number, (text, weight) in enumerate(prompt.parts):
        if dropped:
            dropped += text
            continue
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        room = reach - len(ids)
        if len(found.input_ids) > room:
            dropped = text[found.offset_mapping[room][0] :]
        kept = found.input_ids[:room]
        ids += kept
        weights += [weight] * len(kept)
        owners += [number] * len(kept)
    rest = reach - len(ids)
    return Tokens(
        torch.tensor([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id, *[tokenizer.pad_token_id] * rest]),
        torch.tensor([1.0, *weights, 1.0, *[1.0] * rest]),
        torch.tensor([-1, *owners, -1, *[-1] * rest]),
        dropped.strip(),
    )


def lowered(prompt: WeightedPrompt, read: Sequence[Tokens]) -> list[int]:
    """Indices of the parts below 1 that any encoder reads: each needs an embedding of the prompt without it."""
    seen = {int(number) for one in read for number in one.parts.unique()}
    return [number for number, (_, weight) in enumerate(prompt.parts) if weight < 1 and number in seen]


def apply(hidden: torch.Tensor, empty: torch.Tensor, weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """The weighted embedding [T, D], fp32.

    `hidden` [1 + L, T, D] is the prompt, and the prompt with each of the L parts below 1 masked; `empty` [T, D] the
    empty prompt; `weights` [T, D]. Every token is moved away from the empty prompt's, or towards it, by its weight.
    Then the embeddings without each part are mixed in by its `share`.
    """
    hidden, empty = hidden.float(), empty.float()
    moved = torch.where(weights == 1, hidden, empty + (hidden - empty) * weights)
    mix = torch.tensor([1.0, *shares], device=hidden.device)
    return (moved * (mix / mix.sum())[:, None, None]).sum(0)


def share(weight: float) -> float:
    """The weight of the prompt without a part of this weight, below 1, relative to 1 for the prompt with it."""
    return math.tan((1 - max(_LEAST, weight)) * math.pi / 2)
