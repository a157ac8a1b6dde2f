"""The refiner's conditioning: as SDXL's, with an aesthetic score in place of the picture's target size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from contract.image import ImageParameters
from core.transfers import to_device
from pipeline.families.family import ImageModel, Prepare
from pipeline.families.sdxl import conditioning
from pipeline.sampling.denoise import Conditioning
from pipeline.text.encode import Embedding

SCORES = (2.5, 6.0)  # of the negative and the positive prompt: diffusers' defaults


def condition(model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare) -> Conditioning:
    """SDXL's conditioning with time_ids [R, 5]: original size, crop, score."""
    made = conditioning.condition(model, wanted, found, prepare)
    pooled = made.tensors["pooled"]
    ids = [[wanted.height, wanted.width, 0, 0, score] for score in SCORES[-made.rows :]]
    time_ids = to_device(torch.tensor(ids, dtype=pooled.dtype), pooled.device)
    return Conditioning({**made.tensors, "time_ids": time_ids}, made.guidance_scale)


def example(
    model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int
) -> dict[str, torch.Tensor]:
    """Random conditioning of `rows` rows of so many chunks, as `condition` makes it."""
    made = conditioning.example(model, width, rows, generator, chunks)
    return {**made, "time_ids": made["time_ids"][:, :5].contiguous()}
