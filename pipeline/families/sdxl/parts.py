"""The parts of an SDXL: what its folder must hold, whether they fit together, and the sizes that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoints.folder import Fact, ModelError, Part, check_facts
from pipeline.families.family import ImageModel

_TOKENIZER = Part("tokenizer", ("CLIPTokenizer", "CLIPTokenizerFast"), "transformers.models.clip.tokenization_clip")
_ENCODERS = "transformers.models.clip.modeling_clip"
PARTS = {
    "tokenizer": _TOKENIZER,
    "tokenizer_2": _TOKENIZER,
    "text_encoder": Part("encoder", ("CLIPTextModel",), _ENCODERS),
    "text_encoder_2": Part("encoder", ("CLIPTextModelWithProjection",), _ENCODERS),
    "unet": Part(
        "network", ("UNet2DConditionModel",), "diffusers.models.unets.unet_2d_condition", strict=True
    ),
    "vae": Part("network", ("AutoencoderKL",), "diffusers.models.autoencoders.autoencoder_kl"),
    "scheduler": Part("scheduler"),
}  # fmt: skip
KEYS = ("clip_l", "clip_g")  # the encoders in files of textual inversions
_SAMPLE_SIZE = 128  # diffusers' default for a UNet without a sample size


def tokenizers(model: ImageModel) -> tuple[Any, ...]:
    """Return the tokenizers of both text encoders; of a refiner, that of the second, which is its only one."""
    return tuple(model.parts[name] for name in ("tokenizer", "tokenizer_2") if name in model.parts)


def text_encoders(model: ImageModel) -> tuple[Any, ...]:
    """Return both text encoders; of a refiner, the second, which is its only one."""
    return tuple(model.parts[name] for name in ("text_encoder", "text_encoder_2") if name in model.parts)


def embedding_widths(model: ImageModel) -> dict[str, int]:
    """Return the channels of each encoder's token embeddings by its key in files of textual inversions."""
    encoders = text_encoders(model)
    return {key: encoder.config.hidden_size for key, encoder in zip(KEYS[-len(encoders) :], encoders, strict=True)}


def native(model: ImageModel) -> int:
    """Return the native side length of a square image, in pixels."""
    sample = model.denoiser.config.sample_size or _SAMPLE_SIZE
    return int(sample if isinstance(sample, int) else max(sample)) * model.vae_scale


def grid(model: ImageModel) -> int:
    """Return the pixels whose multiples are sides that each level of the UNet halves evenly."""
    return int(model.vae_scale * 2 ** (len(model.denoiser.config.block_out_channels) - 1))


def check(name: str, loaded: Mapping[str, Any]) -> None:
    """Reject parts that load but do not form an SDXL together, before the first image fails."""
    unet, vae = loaded["unet"].config, loaded["vae"].config
    widths = [loaded[part].config.hidden_size for part in ("text_encoder", "text_encoder_2")]
    added = 6 * (unet.addition_time_embed_dim or 0) + loaded["text_encoder_2"].config.projection_dim
    facts: list[Fact] = [
        ("unet addition_embed_type", unet.addition_embed_type, "text_time"),
        ("unet cross_attention_dim (the text encoders' widths together)", unet.cross_attention_dim, sum(widths)),
        (
            "unet projection_class_embeddings_input_dim",
            unet.projection_class_embeddings_input_dim,
            added,
        ),
        ("unet encoder_hid_dim_type", unet.encoder_hid_dim_type, None),
        ("unet class_embed_type", unet.class_embed_type, None),
        ("unet out_channels (the VAE's latent_channels)", unet.out_channels, vae.latent_channels),
    ]
    if unet.in_channels != 2 * vae.latent_channels + 1:  # else it inpaints
        facts.append(("unet in_channels (the VAE's latent_channels)", unet.in_channels, vae.latent_channels))
    lengths = [loaded[part].model_max_length for part in ("tokenizer", "tokenizer_2")]
    facts.append(("tokenizer_2 model_max_length", lengths[1], lengths[0]))
    check_facts(f"{name}: not a text-to-image SDXL", facts)
    for tokenizer, encoder in (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2")):
        config = loaded[encoder].config
        for label, actual, limit in (
            ("words", len(loaded[tokenizer]), config.vocab_size),
            ("tokens a prompt", loaded[tokenizer].model_max_length, config.max_position_embeddings),
        ):
            if actual > limit:
                raise ModelError(f"{name}: {tokenizer} has {actual} {label}, and {encoder} has room for {limit}")
