"""The architecture of SDXL base 1.0 with seeded random weights, for performance measurements; its images are noise.

It is built on its target device: 3.5 billion parameters take a minute on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.tiny import byte_tokenizer

if TYPE_CHECKING:
    import torch

NAME = "random:sdxl"
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


def parts(device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Return a pipeline's parts by name, in bf16 on this device; equal seeds give equal weights on equal devices."""
    import torch

    # Full module paths: diffusers' and transformers' top levels import slowly.
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
    from transformers.models.clip.configuration_clip import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = byte_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    builds: dict[str, Callable[[], Any]] = {
        "unet": lambda: UNet2DConditionModel(**UNET),
        "vae": lambda: AutoencoderKL(**VAE),
        "text_encoder": lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L, **special)),
        "text_encoder_2": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G, **special)),
    }
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        modules = {part: build().to(torch.bfloat16).eval() for part, build in builds.items()}
    scheduler = EulerDiscreteScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    return {**modules, "tokenizer": tokenizer, "tokenizer_2": byte_tokenizer(pad="!"), "scheduler": scheduler}
