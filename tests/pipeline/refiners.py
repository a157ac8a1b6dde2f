"""SDXL refiners of random weights, as stock diffusers has them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from pipeline.checkpoints import tiny
from pipeline.checkpoints.tiny import SDXLShape

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
