"""The family of SDXL (Podell et al., 2023): a UNet that reads two CLIP text encoders, and models of its shape.

Options: `force_zeros`, whether an absent negative prompt is a zero embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.card import ImageDefaults
from contract.prompts import FIELDS
from pipeline.checkpoints import sdxl, tiny
from pipeline.families.family import Family, Seeded, on_first_call
from pipeline.families.sdxl.adapters import ADAPTERS
from pipeline.families.sdxl.parts import PARTS, check, embedding_widths, grid, native
from pipeline.sampling.samplers import SCHEDULERS
from unet_opt import ALPHA

_CONDITIONING = "pipeline.families.sdxl.conditioning"


def seeded(name: str) -> Seeded | None:
    """Return published SDXL's shape, or one of `tiny.SHAPES`, with random weights."""
    if name == sdxl.NAME:
        return Seeded(sdxl.parts, True, {"force_zeros": True})
    if name not in tiny.SHAPES:
        return None
    shape = tiny.SHAPES[name]
    return Seeded(lambda device: tiny.parts(shape), False, {"force_zeros": shape.force_zeros})


def options(index: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the family's options, of model_index.json."""
    return {"force_zeros": bool(index.get("force_zeros_for_empty_prompt", True))}


FAMILY = Family(
    label="SDXL",
    pipelines=("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    parts=PARTS,
    denoiser="unet",
    samplers=SCHEDULERS,
    defaults=ImageDefaults(steps=20, guidance_scale=5.0, guided_above=1.0),
    adapters=ADAPTERS,
    alpha=ALPHA,
    prompt_fields=FIELDS,
    controls=True,
    image_prompts=True,
    seeded=seeded,
    options=options,
    check=check,
    native=native,
    multiple=lambda model: model.vae_scale,
    grid=grid,
    embedding_widths=embedding_widths,
    embed=on_first_call(_CONDITIONING, "embed"),
    text_encoder=on_first_call(_CONDITIONING, "CLIPPair"),
    condition=on_first_call(_CONDITIONING, "condition"),
    example=on_first_call(_CONDITIONING, "example"),
    check_network=on_first_call("unet_opt.layout", "check_unet"),
    network=on_first_call("unet_opt.deepcache", "SplitUNet"),
    recipe=on_first_call("unet_opt.recipe", "unet"),
)
