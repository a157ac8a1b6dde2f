"""SDXL base 1.0 with random weights: the published configurations, seeded, built on the device.

Speed does not depend on what weights say; pictures do, so nothing here is a picture. Knows diffusers' and transformers'
classes; knows nothing of what is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UNET: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}
CLIP_L: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
CLIP_G: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}


def unet(seed: int = 0) -> Any:
    """The UNet in bf16, 2,567,463,684 parameters."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = UNet2DConditionModel(**UNET)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def vae(seed: int = 1) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = AutoencoderKL(**VAE)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def text_encoders(seed: int = 2) -> list[Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    with torch.device("cuda"):
        models = [CLIPTextModel(CLIPTextConfig(**CLIP_L)), CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G))]
    return [model.to(torch.bfloat16).eval().requires_grad_(False) for model in models]


def inputs(rows: int, seed: int = 3) -> dict[str, Tensor]:
    """What the UNet is given: noise, timesteps, text, its pooled form, and the sizes that SDXL is told."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    return {
        "latents": normal(rows, 4, 128, 128),
        "timestep": torch.randint(1, 1000, (rows,), generator=g, device="cuda").float(),
        "text": normal(rows, 77, 2048).to(torch.bfloat16),
        "pooled": normal(rows, 1280).to(torch.bfloat16),
        "ids": torch.tensor([1024.0, 1024, 0, 0, 1024, 1024], device="cuda").repeat(rows, 1),
    }


def stock(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The forward of diffusers' own UNet."""
    conditions = {"text_embeds": given["pooled"], "time_ids": given["ids"].to(torch.bfloat16)}
    latents = given["latents"].to(torch.bfloat16)
    noise: Tensor = model(latents, given["timestep"], given["text"], added_cond_kwargs=conditions, return_dict=False)[0]
    return noise
