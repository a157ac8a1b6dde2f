"""The family of Z-Image (Tongyi-MAI, 2025): a single-stream transformer trained by flow matching, which reads Qwen3.

`guidance_scale` is as in diffusers' `ZImagePipeline`: positive + scale · (positive - negative), off at 0. Defaults are
those of Z-Image-Turbo.
"""

from __future__ import annotations

from contract.card import ImageDefaults
from pipeline.checkpoints import tiny_zimage
from pipeline.families.family import Family, Seeded, on_first_call
from pipeline.families.zimage.adapters import ADAPTERS
from pipeline.families.zimage.parts import ALPHA, PARTS, TOKENS, check, image_tokens, native, size_multiple
from pipeline.sampling.samplers import FLOW_SCHEDULERS

_FOLDER = "pipeline.families.zimage"
_BLOCK = 32  # the transformer pads texts to multiples of this many tokens


def seeded(name: str) -> Seeded | None:
    """Return one of `tiny_zimage.SHAPES` with random weights."""
    if name not in tiny_zimage.SHAPES:
        return None
    shape = tiny_zimage.SHAPES[name]
    return Seeded(lambda device: tiny_zimage.parts(shape), False, {})


FAMILY = Family(
    label="Z-Image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    parts=PARTS,
    denoiser="transformer",
    samplers=FLOW_SCHEDULERS,
    defaults=ImageDefaults(steps=8, guidance_scale=0.0, guided_above=0.0),
    adapters=ADAPTERS,
    alpha=ALPHA,
    padded={"text": _BLOCK},
    longest={"text": TOKENS},
    calibration={"steps": 8, "watched_steps": 8, "guidance": 0.0},
    language_model="text_encoder",
    seeded=seeded,
    check=check,
    native=native,
    multiple=size_multiple,
    grid=size_multiple,
    image_tokens=image_tokens,
    embed=on_first_call(f"{_FOLDER}.conditioning", "embed"),
    text_encoder=on_first_call(f"{_FOLDER}.conditioning", "ChatEncoder"),
    condition=on_first_call(f"{_FOLDER}.conditioning", "condition"),
    example=on_first_call(f"{_FOLDER}.conditioning", "example"),
    check_network=on_first_call(f"{_FOLDER}.transformer", "check"),
    network=on_first_call(f"{_FOLDER}.transformer", "ZImageNetwork"),
    recipe=on_first_call(f"{_FOLDER}.recipe", "transformer"),
)
