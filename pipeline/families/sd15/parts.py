"""The parts of a Stable Diffusion 1.x: what its folder must hold, whether they fit together, and its LoRAs' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoints.folder import Fact, check_facts
from pipeline.families.sdxl import adapters
from pipeline.families.sdxl.parts import PARTS as SDXL_PARTS

PARTS = {name: SDXL_PARTS[name] for name in ("tokenizer", "text_encoder", "unet", "vae", "scheduler")}
ADAPTERS = adapters.of(("unet", "text_encoder"), "a Stable Diffusion 1")


def check(name: str, loaded: Mapping[str, Any]) -> None:
    """Reject parts that load but do not form a text-to-image model together, before the first image fails."""
    unet, text, vae = (loaded[part].config for part in ("unet", "text_encoder", "vae"))
    facts: list[Fact] = [
        ("unet addition_embed_type", unet.addition_embed_type, None),
        ("unet cross_attention_dim (the text encoder's width)", unet.cross_attention_dim, text.hidden_size),
        ("unet class_embed_type", unet.class_embed_type, None),
        ("unet time_cond_proj_dim (a guidance embedding)", unet.time_cond_proj_dim, None),
        ("unet in_channels (the VAE's latent_channels)", unet.in_channels, vae.latent_channels),
        ("unet out_channels (the VAE's latent_channels)", unet.out_channels, vae.latent_channels),
    ]
    check_facts(f"{name}: not a text-to-image Stable Diffusion 1", facts)
