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


def condition(
    model: ImageModel, parameters: ImageParameters, embeddings: Sequence[Embedding], prepare: Prepare
) -> Conditioning:
    """Return SDXL's conditioning with time_ids [R, 5]: original size, crop, score."""
    base = conditioning.condition(model, parameters, embeddings, prepare)
    pooled = base.tensors["pooled"]
    ids = [[parameters.height, parameters.width, 0, 0, score] for score in SCORES[-base.rows :]]
    time_ids = to_device(torch.tensor(ids, dtype=pooled.dtype), pooled.device)
    return Conditioning({**base.tensors, "time_ids": time_ids}, base.guidance_scale)


def example(
    model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int
) -> dict[str, torch.Tensor]:
    """Return random conditioning of `rows` rows of so many chunks, shaped as by `condition`."""
    tensors = conditioning.example(model, width, rows, generator, chunks)
    return {**tensors, "time_ids": tensors["time_ids"][:, :5].contiguous()}
