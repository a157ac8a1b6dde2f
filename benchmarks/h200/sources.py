"""Provides SDXL for these benchmarks: the model or a seeded stand-in in bf16, quantized variants, and UNet inputs.

Speed does not depend on the weights' values; images do, so the stand-in's images are noise.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract.precision import Scheme
from pipeline import quantized, sdxl
from pipeline.calibration import default_prompts
from pipeline.load import ImageModel, load
from unet_opt.calibrate import CalibrationSettings

PROMPTS = (
    "a red boat on a lake", "three blue teapots", "the moon over a harbour", "a fox that reads a map",
    "pink hearts", "a green apple", "a yellow bird in the snow", "a purple flower",
)  # fmt: skip
STEPS, GUIDANCE = CalibrationSettings().steps, CalibrationSettings().guidance
CALIBRATED = 8  # prompts: fewer than `diptych quantize` takes, since what is measured does not depend on the ranges


def model(name: str = sdxl.NAME, device: str = "cuda", *, tiny_vae: str = "") -> ImageModel:
    """In bf16, UNet and VAE channels last; on a CPU, where that is for trying a benchmark out, in fp32."""
    made = load(name, precision="fp32" if device == "cpu" else "bf16", device=device, tiny_vae=tiny_vae)
    made.denoiser.to(memory_format=torch.channels_last)
    made.vae.to(memory_format=torch.channels_last)
    return made


def tiny_vae(folder: Path) -> str:
    """Saves a random decoder of TAESDXL's shape (diffusers' defaults for AutoencoderTiny); returns its folder."""
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    AutoencoderTiny().save_pretrained(folder)
    return str(folder)


def ranges(source: ImageModel, prompts: int = CALIBRATED) -> quantized.Ranges:
    """Input ranges of the layers of UNet and VAE, collected as in `diptych quantize`, on the first of its prompts."""
    return quantized.ranges(source, default_prompts()[:prompts])


def variant(source: ImageModel, scheme: Scheme | None, found: quantized.Ranges) -> ImageModel:
    """The model with copies of UNet and VAE, quantized unless `scheme` is None."""
    parts = {part: source.parts[part] for part in source.family.quantized}
    if scheme is not None:
        parts = {part: quantized.in_8_bits(source, part, found, scheme=scheme)[0] for part in parts}
    # Copies, because what runs a model may let go of its weights, and `source` is needed again.
    copies = {part: copy.deepcopy(module) for part, module in parts.items()}
    return replace(source.with_parts(**copies), precision=scheme or "bf16")


def stock_pipeline(source: ImageModel) -> Any:
    """diffusers' own pipeline on the model's weights."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    made = StableDiffusionXLPipeline(
        **source.parts, scheduler=EulerDiscreteScheduler.from_config(source.scheduler_config),
        force_zeros_for_empty_prompt=source.options["force_zeros"], add_watermarker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def inputs(source: ImageModel, rows: int, seed: int = 3) -> dict[str, Tensor]:
    """The UNet's inputs: noise, timesteps, text embeddings, pooled embeddings, and SDXL's size conditioning."""
    g = torch.Generator("cuda").manual_seed(seed)
    config, side = source.denoiser.config, source.native // source.vae_scale
    pooled = source.parts["text_encoder_2"].config.projection_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    return {
        "latents": normal(rows, config.in_channels, side, side),
        "timestep": torch.randint(1, 1000, (rows,), generator=g, device="cuda").float(),
        "text": normal(rows, 77, config.cross_attention_dim).to(torch.bfloat16),
        "pooled": normal(rows, pooled).to(torch.bfloat16),
        "ids": torch.tensor([float(source.native)] * 2 + [0.0] * 2 + [float(source.native)] * 2).repeat(rows, 1).cuda(),
    }


def stock(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The forward of diffusers' own UNet."""
    conditions = {"text_embeds": given["pooled"], "time_ids": given["ids"].to(torch.bfloat16)}
    latents = given["latents"].to(torch.bfloat16)
    noise: Tensor = model(latents, given["timestep"], given["text"], added_cond_kwargs=conditions, return_dict=False)[0]
    return noise


def fused(unet: Any, given: dict[str, Tensor], kv: Tensor) -> tuple[Tensor, ...]:
    """The deep forward of a `SplitUNet`, with its features."""
    conditions = {"text_embeds": given["pooled"], "time_ids": given["ids"].to(torch.bfloat16)}
    latents = given["latents"].to(torch.bfloat16)
    made: tuple[Tensor, ...] = unet.deep(latents, given["timestep"], kv, added_cond_kwargs=conditions)
    return made
