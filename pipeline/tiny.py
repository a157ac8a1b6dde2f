"""Small SDXL-shaped models with seeded random weights, made in code: for tests and for benchmarks.

They have every part of SDXL and draw nothing that a person would recognise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EMOJI_XL = "random:emoji-xl"
TINY = "random:tiny"


@dataclass(frozen=True)
class Shape:
    """What distinguishes one SDXL-shaped model from another. `native` is in pixels, `channels` are the UNet's."""

    native: int = 32
    channels: tuple[int, ...] = (16, 32)
    transformers: tuple[int, ...] = (1, 1)
    resnets: int = 1
    heads: tuple[int, ...] = (2, 4)
    groups: int = 8
    text_width: int = 16
    text_layers: int = 2
    pooled_width: int = 24
    time_width: int = 8
    vae_channels: tuple[int, ...] = (8, 8, 16, 16)
    prediction_type: str = "epsilon"
    time_cond: int | None = None
    force_zeros: bool = True
    scheduler: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    TINY: Shape(heads=(1, 2)),
    # The shape of models/emoji-xl: 19M UNet parameters, 16×16 latents, 77 tokens.
    EMOJI_XL: Shape(
        native=128,
        channels=(64, 96, 192),
        transformers=(1, 1, 2),
        resnets=2,
        heads=(2, 3, 6),
        groups=32,
        text_width=128,
        text_layers=4,
        pooled_width=128,
        time_width=32,
        vae_channels=(16, 32, 64, 64),
    ),
}


def save(folder: Path, shape: Shape, seed: int = 0, *, variant: str | None = None, dtype: str = "float32") -> Path:
    """Write a model of this shape as `StableDiffusionXLPipeline.save_pretrained` would. Equal seeds, equal weights."""
    import torch
    from diffusers import StableDiffusionXLPipeline

    pipeline = make(shape, seed)
    pipeline.to(getattr(torch, dtype))
    assert isinstance(pipeline, StableDiffusionXLPipeline)
    pipeline.save_pretrained(folder, variant=variant)
    return folder


def make(shape: Shape, seed: int = 0) -> Any:
    """A `StableDiffusionXLPipeline` of this shape with seeded random weights, in fp32 on the CPU."""
    import torch
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = byte_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "intermediate_size": 2 * shape.text_width,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    levels = len(shape.channels)
    down = ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * (levels - 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = CLIPTextModel(CLIPTextConfig(hidden_size=shape.text_width, projection_dim=shape.text_width, **text))
        second = CLIPTextModelWithProjection(
            CLIPTextConfig(hidden_size=shape.text_width, projection_dim=shape.pooled_width, **text)
        )
        unet = UNet2DConditionModel(
            sample_size=shape.native // 8,
            in_channels=4,
            out_channels=4,
            down_block_types=down,
            up_block_types=tuple(name.replace("Down", "Up") for name in reversed(down)),
            block_out_channels=shape.channels,
            layers_per_block=shape.resnets,
            transformer_layers_per_block=shape.transformers,
            attention_head_dim=shape.heads,
            cross_attention_dim=2 * shape.text_width,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=shape.time_width,
            projection_class_embeddings_input_dim=6 * shape.time_width + shape.pooled_width,
            norm_num_groups=shape.groups,
            time_cond_proj_dim=shape.time_cond,
        )
        vae = AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=shape.vae_channels,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=8,
            sample_size=shape.native,
            scaling_factor=0.13025,
            mid_block_add_attention=False,
        )
        # Fresh weights predict next to nothing and decode to grey: louder heads make errors visible in the picture.
        with torch.no_grad():
            unet.conv_out.weight.mul_(3.0)
            vae.decoder.conv_out.weight.mul_(3.0)
    scheduler = EulerDiscreteScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=shape.prediction_type,
        timestep_spacing="leading",
        steps_offset=1,
        **shape.scheduler,
    )
    return StableDiffusionXLPipeline(
        vae=vae.eval(),
        text_encoder=first.eval(),
        text_encoder_2=second.eval(),
        tokenizer=tokenizer,
        tokenizer_2=byte_tokenizer(pad="!"),
        unet=unet.eval(),
        scheduler=scheduler,
        force_zeros_for_empty_prompt=shape.force_zeros,
        add_watermarker=False,
    )


def byte_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """A CLIP tokenizer whose tokens are single bytes: it reads any text, and needs no file. Pads as SDXL's two do."""
    from transformers import CLIPTokenizer

    letters = _byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad, model_max_length=77)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index, _ in enumerate(others)]
