"""The parts of an SDXL refiner: what its folder must hold, and whether they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoints.folder import Fact, check_facts
from pipeline.families.sdxl.parts import PARTS as SDXL_PARTS

PARTS = {name: SDXL_PARTS[name] for name in ("tokenizer_2", "text_encoder_2", "unet", "vae", "scheduler")}


def check(name: str, loaded: Mapping[str, Any]) -> None:
    """Reject parts that load but do not form a refiner together, before the first image fails."""
    unet, text, vae = (loaded[part].config for part in ("unet", "text_encoder_2", "vae"))
    facts: list[Fact] = [
        ("unet addition_embed_type", unet.addition_embed_type, "text_time"),
        ("unet cross_attention_dim (the text encoder's width)", unet.cross_attention_dim, text.hidden_size),
        (
            "unet projection_class_embeddings_input_dim",
            unet.projection_class_embeddings_input_dim,
            5 * (unet.addition_time_embed_dim or 0) + text.projection_dim,
        ),
        ("unet encoder_hid_dim_type", unet.encoder_hid_dim_type, None),
        ("unet class_embed_type", unet.class_embed_type, None),
        ("unet time_cond_proj_dim (a guidance embedding)", unet.time_cond_proj_dim, None),
        ("unet in_channels (the VAE's latent_channels)", unet.in_channels, vae.latent_channels),
        ("unet out_channels (the VAE's latent_channels)", unet.out_channels, vae.latent_channels),
    ]
    check_facts(f"{name}: not an SDXL refiner", facts)
