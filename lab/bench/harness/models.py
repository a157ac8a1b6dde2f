"""Provides SDXL with seeded random weights in any precision, for benchmarks.

Speed does not depend on the weights' values; images do, so theirs are noise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract.precision import Scheme
from pipeline.checkpoints import sdxl
from pipeline.checkpoints.load import ImageModel, load
from pipeline.quantization import quantized
from pipeline.quantization.calibration import default_prompts
from unet_opt.calibrate import CalibrationSettings
from unet_opt.inputs import DenoiserInputs

STEPS, GUIDANCE = CalibrationSettings().steps, CalibrationSettings().guidance
CALIBRATED = 8  # prompts: fewer than `diptych quantize` takes, since what is measured does not depend on the ranges


def model(name: str = sdxl.NAME, device: str = "cuda", *, tiny_vae: str = "") -> ImageModel:
    """The model in bf16, UNet and VAE channels last; on a CPU, where that is for rehearsals, in fp32."""
    loaded = load(name, precision="fp32" if device == "cpu" else "bf16", device=device, tiny_vae=tiny_vae)
    loaded.denoiser.to(memory_format=torch.channels_last)
    loaded.vae.to(memory_format=torch.channels_last)
    return loaded


def tiny_vae(folder: Path) -> str:
    """Save a random decoder of TAESDXL's shape (diffusers' defaults for AutoencoderTiny); returns its folder."""
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    AutoencoderTiny().save_pretrained(folder)
    return str(folder)


def ranges(source: ImageModel, prompts: int = CALIBRATED) -> quantized.Ranges:
    """Input ranges of the layers of UNet and VAE, collected as in `diptych quantize`, on the first of its prompts."""
    return quantized.ranges(source, default_prompts()[:prompts])


def variant(source: ImageModel, scheme: Scheme | None, calibrated: quantized.Ranges) -> ImageModel:
    """The model with copies of UNet and VAE, quantized unless `scheme` is None."""
    parts = {part: source.parts[part] for part in source.family.quantized}
    if scheme is not None:
        parts = {part: quantized.in_8_bits(source, part, calibrated, scheme=scheme)[0] for part in parts}
    # Copies, because what runs a model may let go of its weights, and `source` is needed again.
    copies = {part: copy.deepcopy(module) for part, module in parts.items()}
    return replace(source.with_parts(**copies), precision=scheme or "bf16")


def stock_pipeline(source: ImageModel) -> Any:
    """diffusers' own pipeline on the model's weights."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline(
        **source.parts, scheduler=EulerDiscreteScheduler.from_config(source.scheduler_config),
        force_zeros_for_empty_prompt=source.options["force_zeros"], add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def inputs(source: ImageModel, rows: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Inputs of the UNet in its precision: noise, timesteps, text embeddings, and SDXL's added conditions."""
    device, dtype = source.device, source.dtype
    g = torch.Generator(device).manual_seed(seed)
    config, side = source.denoiser.config, source.native // source.vae_scale
    pooled = source.parts["text_encoder_2"].config.projection_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    noise = normal(rows, config.in_channels, side, side)
    timestep = torch.randint(1, 1000, (rows,), generator=g, device=device).float()
    text, native = normal(rows, 77, config.cross_attention_dim), float(source.native)
    added = {"text_embeds": normal(rows, pooled)}
    added["time_ids"] = torch.tensor([native, native, 0.0, 0.0, native, native], device=device, dtype=dtype)
    added["time_ids"] = added["time_ids"].repeat(rows, 1)
    return noise, timestep, text, added


def of_denoiser(sample: Tensor, timestep: Tensor, kv: Tensor, added: Mapping[str, Tensor]) -> DenoiserInputs:
    """The same for `SplitUNet`, with the text's keys and values."""
    return DenoiserInputs(sample, timestep, {"kv": kv, "pooled": added["text_embeds"], "time_ids": added["time_ids"]})
