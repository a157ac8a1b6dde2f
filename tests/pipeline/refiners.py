"""SDXL refiners of random weights, as stock diffusers has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from contract.image import ImageParameters
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from pipeline.checkpoints.tiny import SDXLShape
from tests.pipeline import worlds
from tests.schedulers import replaced, scheduler

# As the published one: attention in the middle levels only, and one text encoder.
SECOND = SDXLShape(channels=(16, 32, 32), heads=(1, 2, 2), transformers=(1, 1, 1))


_MADE: dict[str, Any] = {}


def second(base: SDXLShape) -> Any:
    """A stock refiner, with the VAE of a base model of this shape, as the published one; made once."""
    if (key := repr(base)) not in _MADE:
        _MADE[key] = _second(base)
    return _MADE[key]


def _second(base: SDXLShape) -> Any:
    from diffusers import StableDiffusionXLImg2ImgPipeline
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    config = {
        **SECOND.unet(), "cross_attention_dim": SECOND.text_width,
        "projection_class_embeddings_input_dim": 5 * SECOND.time_width + SECOND.pooled_width,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        unet = UNet2DConditionModel(**config).eval()
        with torch.no_grad():
            unet.conv_out.weight.mul_(9.0)
    parts = {**tiny.parts(SECOND, seed=7), "unet": unet, "text_encoder": None, "tokenizer": None}
    pipeline = StableDiffusionXLImg2ImgPipeline(
        **{**parts, "vae": tiny.parts(base)["vae"]}, requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False, add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def refined(shape: str, one: ImageParameters, first: Callable[..., Any]) -> np.ndarray:
    """What diffusers' refiner makes of what its `first` pipeline gives, [H, W, 3] in levels, but for kept pixels."""
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline

    assert one.refiner is not None
    generator, then = torch.Generator().manual_seed(one.seed), second(worlds.shape(shape))
    latents = first(denoising_end=one.refiner.start, output_type="latent", generator=generator)[None]
    named = scheduler(then.scheduler.config, one.scheduler or "euler", **replaced(one.schedule_type))
    left = ("image_encoder", "feature_extractor", "scheduler")
    parts = {name: part for name, part in then.components.items() if name not in left}
    kind: Any = StableDiffusionXLImg2ImgPipeline
    options: dict[str, Any] = {}
    if one.edit is not None and one.edit.mask is not None:
        kind = StableDiffusionXLInpaintPipeline
        mask = Image.frombytes("L", (one.width, one.height), one.edit.mask)
        options = {"mask_image": mask, "width": one.width, "height": one.height}
    pipeline = kind(
        **parts, scheduler=named, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        one.prompt, image=latents, denoising_start=one.refiner.start, negative_prompt=one.negative_prompt,
        num_inference_steps=one.steps, guidance_scale=one.guidance_scale, clip_skip=one.clip_skip,
        generator=generator, **options,
    ).images[0]  # fmt: skip
    found = np.asarray(made).astype(int)
    assert found.std() > 5, "a flat picture would prove nothing"
    return found


def load_second(where: Path, shape: str) -> ImageModel:
    """The refiner of a base model of this shape, saved in a folder and read from it."""
    second(worlds.shape(shape)).save_pretrained(where)
    return load(str(where))
