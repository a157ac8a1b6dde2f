"""The architectures of the embedded models as plain configuration.

Knows sizes only: no weights, no data and no training. `EMOJI` is what ships; `SMOKE` is the same family of
shapes at a size that trains in seconds, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LATENT_FACTOR = 8
TOKENS = 77  # model_max_length of both picture tokenizers, as in SDXL; the longest caption in the data needs 29


@dataclass(frozen=True)
class TextShape:
    """A CLIP text tower: `width` channels, `layers` blocks, `heads` heads; the feed-forward is 4 x width."""

    width: int
    layers: int
    heads: int


@dataclass(frozen=True)
class LlamaShape:
    """A Llama with grouped-query attention: `kv_heads` shared by `heads` queries, tied embeddings."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


@dataclass(frozen=True)
class Shapes:
    """Every size of every model. `size` in the methods is the picture's side in pixels."""

    vocab: int
    text: TextShape
    text_2: TextShape
    vae_channels: tuple[int, ...]
    vae_groups: int
    unet_channels: tuple[int, int, int]
    unet_heads: tuple[int, int, int]
    unet_layers: tuple[int, int, int]
    unet_resnets: int
    unet_groups: int
    time_ids_width: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    clip_width: int
    lm_vocab: int
    lm: LlamaShape
    draft: LlamaShape

    def unet(self, size: int) -> dict[str, Any]:
        """Arguments of `UNet2DConditionModel`: SDXL's blocks, `text_time` micro-conditioning, fewer channels."""
        return {
            "sample_size": size // LATENT_FACTOR,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": self.unet_channels,
            "layers_per_block": self.unet_resnets,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": self.unet_layers,
            "attention_head_dim": self.unet_heads,
            "cross_attention_dim": self.text.width + self.text_2.width,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": self.time_ids_width,
            "projection_class_embeddings_input_dim": 6 * self.time_ids_width + self.clip_width,
            "norm_num_groups": self.unet_groups,
        }

    def vae(self, size: int) -> dict[str, Any]:
        """Arguments of `AutoencoderKL`: factor 8, four latent channels, one resnet a level less than SDXL's."""
        levels = len(self.vae_channels)
        if 2 ** (levels - 1) != LATENT_FACTOR:
            raise ValueError(f"vae_channels: {levels} levels do not give factor {LATENT_FACTOR}")
        return {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "sample_size": size,
            "block_out_channels": self.vae_channels,
            "layers_per_block": 1,
            "down_block_types": ("DownEncoderBlock2D",) * levels,
            "up_block_types": ("UpDecoderBlock2D",) * levels,
            "norm_num_groups": self.vae_groups,
            "force_upcast": False,
        }

    def clip_text(self, shape: TextShape, vocab: int, pad: int) -> dict[str, Any]:
        """Arguments of `CLIPTextConfig`; the two special tokens close the vocabulary, as in CLIP."""
        return {
            "vocab_size": vocab,
            "hidden_size": shape.width,
            "intermediate_size": 4 * shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "max_position_embeddings": TOKENS,
            "projection_dim": self.clip_width,
            "hidden_act": "gelu",
            "bos_token_id": vocab - 2,
            "eos_token_id": vocab - 1,
            "pad_token_id": pad,
        }

    def clip_vision(self, size: int) -> dict[str, Any]:
        """Arguments of `CLIPVisionConfig`: 64 patches whatever the picture's side."""
        return {
            "hidden_size": self.vision_width,
            "intermediate_size": 4 * self.vision_width,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
            "image_size": size,
            "patch_size": size // 8,
            "projection_dim": self.clip_width,
            "hidden_act": "gelu",
        }

    def llama(self, shape: LlamaShape, vocab: int, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """Arguments of `LlamaConfig`."""
        return {
            "vocab_size": vocab,
            "hidden_size": shape.width,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }


EMOJI = Shapes(
    vocab=3072,
    text=TextShape(128, 3, 4),
    text_2=TextShape(128, 4, 4),
    vae_channels=(16, 32, 64, 96),
    vae_groups=4,
    unet_channels=(64, 96, 192),
    unet_heads=(2, 3, 6),
    unet_layers=(1, 1, 2),
    unet_resnets=2,
    unet_groups=32,
    time_ids_width=32,
    vision_width=192,
    vision_layers=6,
    vision_heads=6,
    clip_width=128,
    lm_vocab=4096,
    lm=LlamaShape(256, 6, 8, 4, 704),
    draft=LlamaShape(128, 4, 4, 2, 352),
)

SMOKE = Shapes(
    vocab=640,
    text=TextShape(32, 2, 2),
    text_2=TextShape(32, 2, 2),
    vae_channels=(8, 8, 16, 16),
    vae_groups=4,
    unet_channels=(16, 32, 32),
    unet_heads=(1, 2, 2),
    unet_layers=(1, 1, 2),
    unet_resnets=1,
    unet_groups=8,
    time_ids_width=16,
    vision_width=32,
    vision_layers=2,
    vision_heads=2,
    clip_width=32,
    lm_vocab=640,
    lm=LlamaShape(64, 2, 4, 2, 128),
    draft=LlamaShape(32, 1, 2, 1, 64),
)

BY_NAME = {"emoji": EMOJI, "smoke": SMOKE}
