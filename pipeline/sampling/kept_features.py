"""What requests keep of a deep step for the shallow ones behind it, and batches of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.families.family import Network
from pipeline.request_state import ImageState


def keep(denoiser: Network, features: Sequence[torch.Tensor], works: Sequence[ImageState]) -> None:
    """Copy each request's rows of a deep step's features to where its shallow steps read them.

    Only if a shallow step comes next. A retry writes the same again, and nothing reads it before.
    """
    start = 0
    for work in works:
        end, following = start + work.rows, work.step + 1
        if following < len(work.plan) and not work.plan[following]:
            for own, found in zip(work.features, denoiser.kept(features, work.depth), strict=True):
                own[-work.rows :].copy_(found[start:end])
        start = end


def gather(works: Sequence[ImageState], rows: int) -> tuple[torch.Tensor, ...]:
    """The features of each request's last deep step, concatenated; padding repeats the first row."""
    missing = rows - sum(work.rows for work in works)
    parts = zip(*([own[-work.rows :] for own in work.features] for work in works), strict=True)
    return tuple(torch.cat([*part, *[part[0][:1]] * missing]) for part in parts)
