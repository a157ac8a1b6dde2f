"""The small SDXL-shaped models: their dimensions, and such models with seeded random weights.

They have every part of SDXL. Random weights are for tests and benchmarks, and their images show nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EMOJI_XL = "random:emoji-xl"
TINY = "random:tiny"

FACTOR = 8  # pixels per latent, along one side
TOKENS = 77  # of a prompt
TIMESTEPS = 1000
BETAS = (0.00085, 0.012)  # first and last, "scaled_linear"


@dataclass(frozen=True)
class SDXLShape:
    """The dimensions of an SDXL-shaped model. `native` is in pixels, `channels` are the UNet's.

    Both text encoders are `text_width` wide, and their feed-forward layers `text_factor` times that. Methods give the
    configurations of the parts for diffusers and transformers.
    """

    native: int = 32
    channels: tuple[int, ...] = (16, 32)
    transformers: tuple[int, ...] = (1, 1)
    resnets: int = 1
    heads: tuple[int, ...] = (2, 4)
    groups: int = 8
    text_width: int = 16
    text_layers: tuple[int, int] = (2, 2)
    text_heads: int = 4
    text_factor: int = 2
    text_activation: str = "quick_gelu"
    pooled_width: int = 24
    time_width: int = 8
    vae_channels: tuple[int, ...] = (8, 8, 16, 16)
    vae_groups: int = 8
    vae_attention: bool = False
    vae_upcast: bool = True
    prediction_type: str = "epsilon"
    time_cond: int | None = None
    input_channels: int = 4
    force_zeros: bool = True
    scheduler: dict[str, Any] = field(default_factory=dict)

    def unet(self) -> dict[str, Any]:
        """Return the arguments of `UNet2DConditionModel`: SDXL's blocks with `text_time` conditioning."""
        down = ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * (len(self.channels) - 1)
        return {
            "sample_size": self.native // FACTOR,
            "in_channels": self.input_channels,
            "out_channels": 4,
            "down_block_types": down,
            "up_block_types": tuple(name.replace("Down", "Up") for name in reversed(down)),
            "block_out_channels": self.channels,
            "layers_per_block": self.resnets,
            "transformer_layers_per_block": self.transformers,
            "attention_head_dim": self.heads,
            "cross_attention_dim": 2 * self.text_width,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": self.time_width,
            "projection_class_embeddings_input_dim": 6 * self.time_width + self.pooled_width,
            "norm_num_groups": self.groups,
            "time_cond_proj_dim": self.time_cond,
        }

    def vae(self) -> dict[str, Any]:
        """Return the arguments of `AutoencoderKL`: four latent channels, one resnet a level less than SDXL's."""
        levels = len(self.vae_channels)
        if 2 ** (levels - 1) != FACTOR:
            raise ValueError(f"vae_channels: {levels} levels do not give factor {FACTOR}")
        return {
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",) * levels,
            "up_block_types": ("UpDecoderBlock2D",) * levels,
            "block_out_channels": self.vae_channels,
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": self.vae_groups,
            "sample_size": self.native,
            "scaling_factor": 0.13025,
            "mid_block_add_attention": self.vae_attention,
            "force_upcast": self.vae_upcast,
        }

    def text(self, encoder: int, vocabulary: int, pad: int) -> dict[str, Any]:
        """Return the arguments of encoder 0's or 1's `CLIPTextConfig`; two special tokens close the vocabulary."""
        return {
            "vocab_size": vocabulary,
            "hidden_size": self.text_width,
            "intermediate_size": self.text_factor * self.text_width,
            "num_hidden_layers": self.text_layers[encoder],
            "num_attention_heads": self.text_heads,
            "max_position_embeddings": TOKENS,
            "projection_dim": self.pooled_width,
            "hidden_act": self.text_activation,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
            "pad_token_id": pad,
        }

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of `EulerDiscreteScheduler`."""
        return {
            "num_train_timesteps": TIMESTEPS,
            "beta_start": BETAS[0],
            "beta_end": BETAS[1],
            "beta_schedule": "scaled_linear",
            "prediction_type": self.prediction_type,
            "timestep_spacing": "leading",
            "steps_offset": 1,
            **self.scheduler,
        }


# Shipped as models/emoji-xl: 19M UNet parameters, 16×16 latents.
EMOJI = SDXLShape(
    native=128,
    channels=(64, 96, 192),
    transformers=(1, 1, 2),
    resnets=2,
    heads=(2, 3, 6),
    groups=32,
    text_width=128,
    text_layers=(3, 4),
    text_factor=4,
    text_activation="gelu",
    pooled_width=128,
    time_width=32,
    vae_channels=(16, 32, 64, 96),
    vae_groups=4,
    vae_attention=True,
    vae_upcast=False,
)
SHAPES = {TINY: SDXLShape(heads=(1, 2)), EMOJI_XL: EMOJI}


def save(folder: Path, shape: SDXLShape, seed: int = 0, *, variant: str | None = None, dtype: str = "float32") -> Path:
    """Write a model of this shape as `StableDiffusionXLPipeline.save_pretrained` would. Equal seeds, equal weights."""
    import torch
    from diffusers import StableDiffusionXLPipeline

    pipeline = make(shape, seed)
    pipeline.to(getattr(torch, dtype))
    assert isinstance(pipeline, StableDiffusionXLPipeline)
    pipeline.save_pretrained(folder, variant=variant)
    return folder


def make(shape: SDXLShape, seed: int = 0) -> Any:
    """Build a `StableDiffusionXLPipeline` of the shape's `parts`."""
    from diffusers import StableDiffusionXLPipeline

    return StableDiffusionXLPipeline(
        **parts(shape, seed), force_zeros_for_empty_prompt=shape.force_zeros, add_watermarker=False
    )


def parts(shape: SDXLShape, seed: int = 0) -> dict[str, Any]:
    """Return the parts of a pipeline of this shape by their names, with seeded random weights, in fp32 on the CPU."""
    import torch

    # Full module paths: diffusers' and transformers' top levels import slowly.
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
    from transformers.models.clip.configuration_clip import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = byte_tokenizer()
    first_text, second_text = (
        CLIPTextConfig(**shape.text(encoder, len(tokenizer), tokenizer.pad_token_id)) for encoder in (0, 1)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = CLIPTextModel(first_text), CLIPTextModelWithProjection(second_text)
        unet = UNet2DConditionModel(**shape.unet())
        vae = AutoencoderKL(**shape.vae())
        # Fresh weights predict almost nothing and decode to grey: larger heads make errors visible in the image.
        with torch.no_grad():
            unet.conv_out.weight.mul_(3.0)
            vae.decoder.conv_out.weight.mul_(3.0)
    return {
        "vae": vae.eval(),
        "text_encoder": first.eval(),
        "text_encoder_2": second.eval(),
        "tokenizer": tokenizer,
        "tokenizer_2": byte_tokenizer(pad="!"),
        "unet": unet.eval(),
        "scheduler": EulerDiscreteScheduler(**shape.sampling()),
    }


def byte_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """Build a CLIP tokenizer of single bytes, which reads any text and needs no file. Pads as SDXL's two do."""
    from transformers.models.clip.tokenization_clip import CLIPTokenizer

    letters = byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad, model_max_length=TOKENS)


def byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE writes for each byte (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index, _ in enumerate(unprintable)]
