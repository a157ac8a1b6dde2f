"""LoRA files of Z-Image, in the layouts that diffusers reads: peft's, and those that its converter knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class ZImageAdapters:
    """`Adapters` of Z-Image: its transformer alone."""

    parts: tuple[str, ...] = ("transformer",)
    models = "a Z-Image"

    def to_diffusers(
        self, state: dict[str, Tensor], parts: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The converter multiplies alphas into the matrices."""
        from diffusers.loaders.lora_pipeline import ZImageLoraLoaderMixin

        return ZImageLoraLoaderMixin.lora_state_dict(state), {}

    def to_peft(self, part: str, keys: Sequence[str]) -> dict[str, str]:
        return {key: key for key in keys}
