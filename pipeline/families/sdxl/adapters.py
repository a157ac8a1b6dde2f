"""LoRA files of SDXL, in the layouts that diffusers reads, by diffusers' own name tables: kohya's, Stability's,
diffusers' old and new ones, peft's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class SDXLAdapters:
    """`Adapters` of SDXL."""

    parts: tuple[str, ...] = ("unet", "text_encoder", "text_encoder_2")
    models = "an SDXL"

    def to_diffusers(
        self, state: dict[str, Tensor], parts: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        from diffusers.loaders.lora_pipeline import StableDiffusionXLLoraLoaderMixin

        found, alphas = StableDiffusionXLLoraLoaderMixin.lora_state_dict(state, unet_config=parts["unet"].config)
        return found, alphas or {}

    def to_peft(self, part: str, keys: Sequence[str]) -> dict[str, str]:
        from diffusers.utils import state_dict_utils as tables

        own = {key: key for key in keys}
        if any(".lora_A." in key for key in keys):
            return own
        if part == "unet":
            return dict(tables.convert_unet_state_dict_to_peft(own))
        for table in (tables.DIFFUSERS_OLD_TO_PEFT, tables.DIFFUSERS_TO_PEFT):
            own = tables.convert_state_dict(own, table)
        return own
