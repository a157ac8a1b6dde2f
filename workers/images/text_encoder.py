"""Runs an image model's text encoder on the text path's kernels, where it is a language model that they support."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from core.config import Settings
from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering
from llm.families.encoder import PromptEncoder
from pipeline.families.family import ImageModel
from workers.backends import GRAPHS, PROGRAMS
from workers.devices import kernels

log = logging.getLogger(__name__)

_ROWS = 1  # prompts of one forward


def on_kernels(settings: Settings, model: ImageModel, backend: str, *, release: bool) -> ImageModel:
    """The model, whose `embed` runs on the kernels of the image backend of this name, without a KV cache.

    Unchanged if its text encoder is none of the Llama family, which is logged, or if the backend has no such kernels.
    `release`: the text encoder's own forward is not used any more, so that its weights may be dropped once packed.
    """
    part = model.family.language_model
    if part is None or (lowering := _lowering(settings, model, part, backend)) is None:
        return model
    try:
        encoder = PromptEncoder(lowering, model.parts[part])
    except ValueError as error:
        log.info("%s: torch encodes prompts: %s", model.name, error)
        return model
    if release and isinstance(lowering, CpuLowering):
        lowering.layers.release()
    log.info("%s: our kernels encode prompts in %s", model.name, str(lowering.dtype).removeprefix("torch."))

    def embed(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (tokens,) = ids
        return (torch.stack(encoder(tokens.tolist())),)

    return replace(model, embed=embed)


def _lowering(settings: Settings, model: ImageModel, part: str, backend: str) -> Lowering | None:
    """None without kernels; why an image backend that needs them cannot do without is its own to say."""
    if backend == GRAPHS:
        return CudaLowering(model.dtype, _ROWS)
    library, _ = kernels(settings, model) if backend == PROGRAMS else (None, "")
    return None if library is None else CpuLowering(library, model.parts[part])
