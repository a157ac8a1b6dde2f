"""The family of SDXL's refiner (Podell et al., 2023, section 2.5): a UNet for SDXL's last steps, with one encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.families import sdxl
from pipeline.families.family import on_first_call
from pipeline.families.sdxl_refiner.parts import PARTS, check

_CONDITIONING = "pipeline.families.sdxl_refiner.conditioning"


def reads(index: Mapping[str, Any]) -> bool:
    """Return whether this model_index.json is that of a refiner: an SDXL without a first text encoder."""
    return index.get("_class_name") in sdxl.FAMILY.pipelines and index.get("text_encoder") == [None, None]


FAMILY = replace(
    sdxl.FAMILY,
    label="SDXL refiner",
    pipelines=(),
    parts=PARTS,
    refines=sdxl.FAMILY.label,
    reads=reads,
    seeded=lambda name: None,
    check=check,
    condition=on_first_call(_CONDITIONING, "condition"),
    example=on_first_call(_CONDITIONING, "example"),
)
