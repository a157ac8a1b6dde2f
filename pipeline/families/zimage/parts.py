"""The parts of a Z-Image: what its folder must hold, whether they fit together, and the sizes that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.card import Size
from pipeline.checkpoints.folder import Fact, ModelError, Part, check_facts
from pipeline.families.family import ImageModel

PARTS = {
    "tokenizer": Part(
        "tokenizer", ("Qwen2Tokenizer", "Qwen2TokenizerFast"), "transformers.models.qwen2.tokenization_qwen2"
    ),
    "text_encoder": Part(
        "encoder", ("Qwen3Model", "Qwen3ForCausalLM"), "transformers.models.qwen3.modeling_qwen3"
    ),
    "transformer": Part(
        "network", ("ZImageTransformer2DModel",), "diffusers.models.transformers.transformer_z_image", strict=True
    ),
    "vae": Part("network", ("AutoencoderKL",), "diffusers.models.autoencoders.autoencoder_kl"),
    "scheduler": Part("scheduler"),
}  # fmt: skip
ALPHA = 0.5  # the usual strength of SmoothQuant
TOKENS = 512  # of a prompt with its chat template, in diffusers' pipeline
PATCH = 2  # latents, along one side of an image token


def native(model: ImageModel) -> int:
    """Return the native side length of a square image, in pixels: the transformer has none, its VAE says one."""
    return int(model.vae.config.sample_size)


def size_multiple(model: ImageModel) -> int:
    """Return the pixels of which every side is a multiple: those of an image token."""
    return PATCH * model.vae_scale


def image_tokens(model: ImageModel, size: Size) -> int:
    """Return the number of image tokens of a picture."""
    width, height = size
    return (width // size_multiple(model)) * (height // size_multiple(model))


def check(name: str, loaded: Mapping[str, Any]) -> None:
    """Reject parts that load but do not form a Z-Image together, before the first image fails."""
    transformer, text, vae = (loaded[part].config for part in ("transformer", "text_encoder", "vae"))
    facts: list[Fact] = [
        ("transformer in_channels (the VAE's latent_channels)", transformer.in_channels, vae.latent_channels),
        ("transformer cap_feat_dim (the text encoder's width)", transformer.cap_feat_dim, text.hidden_size),
        ("transformer all_patch_size", list(transformer.all_patch_size), [PATCH]),
        ("transformer all_f_patch_size", list(transformer.all_f_patch_size), [1]),
        ("transformer siglip_feat_dim", transformer.siglip_feat_dim, None),
    ]
    check_facts(f"{name}: not a text-to-image Z-Image", facts)
    token = PATCH * 2 ** (len(vae.block_out_channels) - 1)  # pixels, along one side
    if vae.sample_size % token:
        raise ModelError(f"{name}: vae sample_size is {vae.sample_size}, no multiple of a token's {token} pixels")
    reach = 2 * vae.sample_size // token  # of the longest side that is offered
    # Text tokens are numbered from 1, and image tokens come after them.
    for label, limit, needed in zip(
        ("text tokens", "rows", "columns"), transformer.axes_lens, (TOKENS + 2, reach, reach), strict=True
    ):
        if limit < needed:
            raise ModelError(f"{name}: transformer axes_lens has room for {limit} {label}, of {needed}")
    tokenizer = loaded["tokenizer"]
    if len(tokenizer) > text.vocab_size:
        raise ModelError(
            f"{name}: tokenizer has {len(tokenizer)} words, and text_encoder has room for {text.vocab_size}"
        )
    if not tokenizer.chat_template:
        raise ModelError(f"{name}: tokenizer has no chat template, which prompts are written in")
