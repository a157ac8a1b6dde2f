"""LoRA files of SDXL: kohya's, Stability's and ComfyUI's layouts by `lora_names`, diffusers' old ones by its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.families.family import Adapters

if TYPE_CHECKING:
    from torch import Tensor


def of(names: tuple[str, ...], models: str) -> Adapters:
    """The adapters of a family with a UNet, of these parts."""

    def to_diffusers(state: dict[str, Tensor], parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
        from pipeline.families.sdxl import lora_names

        return lora_names.to_peft(state, {name: parts[name] for name in names})

    return Adapters(names, models, to_diffusers, to_peft)


def to_peft(part: str, keys: Sequence[str]) -> dict[str, str]:
    """The keys of one part under peft's names, by diffusers' tables."""
    from diffusers.utils import state_dict_utils as tables

    old = {key: key for key in keys if ".lora_A." not in key and ".lora_B." not in key}
    own = {key: key for key in keys if key not in old}
    if part == "unet":
        return own | dict(tables.convert_unet_state_dict_to_peft(old))
    for table in (tables.DIFFUSERS_OLD_TO_PEFT, tables.DIFFUSERS_TO_PEFT):
        old = tables.convert_state_dict(old, table)
    return own | old


ADAPTERS = of(("unet", "text_encoder", "text_encoder_2"), "an SDXL")
