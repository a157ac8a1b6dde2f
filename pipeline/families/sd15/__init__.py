"""The family of Stable Diffusion 1.x (Rombach et al., 2022): SDXL's kind of UNet with one CLIP encoder and no size."""

from __future__ import annotations

from dataclasses import replace

from pipeline.families import sdxl
from pipeline.families.family import on_first_call
from pipeline.families.sd15.parts import ADAPTERS, PARTS, check

_CONDITIONING = "pipeline.families.sd15.conditioning"

FAMILY = replace(
    sdxl.FAMILY,
    label="Stable Diffusion 1",
    pipelines=("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline"),
    parts=PARTS,
    prompt_fields=(),
    adapters=ADAPTERS,
    image_prompts=False,
    scheduler_settings={"steps_offset": 1, "clip_sample": False},  # as diffusers' pipeline sets them in old configs
    seeded=lambda name: None,
    options=lambda index: {},
    check=check,
    embedding_widths=lambda model: {},
    embed=on_first_call(_CONDITIONING, "embed"),
    text_encoder=on_first_call(_CONDITIONING, "CLIPText"),
    condition=on_first_call(_CONDITIONING, "condition"),
    example=on_first_call(_CONDITIONING, "example"),
)
