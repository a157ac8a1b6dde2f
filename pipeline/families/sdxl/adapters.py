"""LoRA files of SDXL: kohya's, Stability's and ComfyUI's layouts by `lora_names`, diffusers' old ones by its tables."""

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
        from pipeline.families.sdxl import lora_names

        return lora_names.to_peft(state, {part: parts[part] for part in self.parts})

    def to_peft(self, part: str, keys: Sequence[str]) -> dict[str, str]:
        from diffusers.utils import state_dict_utils as tables

        old = {key: key for key in keys if ".lora_A." not in key and ".lora_B." not in key}
        own = {key: key for key in keys if key not in old}
        if part == "unet":
            return own | dict(tables.convert_unet_state_dict_to_peft(old))
        for table in (tables.DIFFUSERS_OLD_TO_PEFT, tables.DIFFUSERS_TO_PEFT):
            old = tables.convert_state_dict(old, table)
        return own | old
