"""The LoRA files of Z-Image, in the layouts that diffusers reads: peft's, and those that its converter knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.families.family import Adapters

if TYPE_CHECKING:
    from torch import Tensor


def to_diffusers(state: dict[str, Tensor], parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors under diffusers' names; the converter multiplies alphas into the matrices."""
    from diffusers.loaders.lora_pipeline import ZImageLoraLoaderMixin

    return ZImageLoraLoaderMixin.lora_state_dict(state), {}


ADAPTERS = Adapters(("transformer",), "a Z-Image", to_diffusers, lambda part, keys: {key: key for key in keys})
