"""The features of a deep step that requests keep for the shallow ones behind it, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.families.family import Network
from pipeline.request_state import ImageState


def keep(denoiser: Network, features: Sequence[torch.Tensor], states: Sequence[ImageState]) -> None:
    """Copy each request's rows of a deep step's features to where its shallow steps read them.

    Only if a shallow step comes next. A retry writes the same again, and nothing reads it before.
    """
    start = 0
    for state in states:
        end, next_step = start + state.rows, state.step + 1
        if next_step < len(state.plan) and not state.plan[next_step]:
            for buffer, feature in zip(state.features, denoiser.select_features(features, state.depth), strict=True):
                buffer[-state.rows :].copy_(feature[start:end])
        start = end


def gather(states: Sequence[ImageState], rows: int) -> tuple[torch.Tensor, ...]:
    """Concatenate the features of each request's last deep step; padding repeats the first row."""
    missing = rows - sum(state.rows for state in states)
    parts = zip(*([buffer[-state.rows :] for buffer in state.features] for state in states), strict=True)
    return tuple(torch.cat([*part, *[part[0][:1]] * missing]) for part in parts)
