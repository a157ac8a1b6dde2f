"""The LoRA files of SDXL: kohya's, Stability's and ComfyUI's layouts by `lora_names`, diffusers' old ones by tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.families.family import Adapters

if TYPE_CHECKING:
    from torch import Tensor


def of(names: tuple[str, ...], models: str) -> Adapters:
    """Return the adapters of a family with a UNet, of these parts."""

    def to_diffusers(state: dict[str, Tensor], parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
        from pipeline.extensions import lora_names
        from pipeline.families.sdxl.lora_names import NAMES

        return lora_names.to_peft(state, {name: parts[name] for name in names}, NAMES)

    return Adapters(names, models, to_diffusers, to_peft)


def to_peft(part: str, keys: Sequence[str]) -> dict[str, str]:
    """Return the keys of one part under peft's names, by diffusers' tables."""
    from diffusers.utils import state_dict_utils as tables

    from pipeline.extensions.lora_names import DIRECT

    known = (".lora_A.weight", ".lora_B.weight", *(f".{ending}" for ending in DIRECT))
    old_keys = {key: key for key in keys if not key.endswith(known)}
    peft_keys = {key: key for key in keys if key not in old_keys}
    if part == "unet":
        return peft_keys | dict(tables.convert_unet_state_dict_to_peft(old_keys))
    for table in (tables.DIFFUSERS_OLD_TO_PEFT, tables.DIFFUSERS_TO_PEFT):
        old_keys = tables.convert_state_dict(old_keys, table)
    return peft_keys | old_keys


ADAPTERS = of(("unet", "text_encoder", "text_encoder_2"), "an SDXL")
