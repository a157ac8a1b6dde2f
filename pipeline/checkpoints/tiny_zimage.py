"""The small Z-Image-shaped models: their dimensions, and such models with seeded random weights.

They have every part of Z-Image. Random weights are for tests and benchmarks, and their images show nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.checkpoints.tiny import FACTOR, TIMESTEPS, byte_letters

EMOJI_Z = "random:emoji-z"
TINY_Z = "random:tiny-z"

CHANNELS = 16  # of a latent
STEPS = 8  # of Z-Image-Turbo, which samples without guidance
TOKENS = 512  # of a prompt at most, chat template included
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # close the vocabulary; the first one pads
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ZImageShape:
    """The dimensions of a Z-Image-shaped model. `native` is in pixels; `axes` divide a head's width into the rotary
    axes of sequence, row and column.

    Methods give the configurations of the parts for diffusers and transformers.
    """

    native: int = 32
    width: int = 96
    heads: int = 3
    axes: tuple[int, int, int] = (8, 12, 12)
    layers: int = 2
    refiners: int = 1
    text_width: int = 64
    text_layers: int = 2
    text_heads: int = 2
    text_kv_heads: int = 1
    text_head_width: int = 32
    text_inner: int = 128
    vae_channels: tuple[int, ...] = (8, 8, 16, 16)
    vae_groups: int = 8
    vae_attention: bool = True
    vae_scale: float = 0.3611
    vae_shift: float = 0.1159
    shift: float = 3.0

    def transformer(self) -> dict[str, Any]:
        """Return the arguments of `ZImageTransformer2DModel`: patches of 2×2, feed-forward of 8/3 of the width."""
        return {
            "in_channels": CHANNELS,
            "dim": self.width,
            "n_layers": self.layers,
            "n_refiner_layers": self.refiners,
            "n_heads": self.heads,
            "n_kv_heads": self.heads,
            "cap_feat_dim": self.text_width,
            "axes_dims": self.axes,
        }

    def text(self, vocabulary: int, pad: int) -> dict[str, Any]:
        """Return the arguments of the `Qwen3Config`; the transformer reads what enters the last layer."""
        return {
            "vocab_size": vocabulary,
            "hidden_size": self.text_width,
            "intermediate_size": self.text_inner,
            "num_hidden_layers": self.text_layers,
            "num_attention_heads": self.text_heads,
            "num_key_value_heads": self.text_kv_heads,
            "head_dim": self.text_head_width,
            "max_position_embeddings": TOKENS,
            "tie_word_embeddings": True,
            "eos_token_id": pad,
            "pad_token_id": pad,
        }

    def vae(self) -> dict[str, Any]:
        """Return the arguments of `AutoencoderKL`: 16 latent channels, no 1×1 convolutions around them."""
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
            "latent_channels": CHANNELS,
            "norm_num_groups": self.vae_groups,
            "sample_size": self.native,
            "scaling_factor": self.vae_scale,
            "shift_factor": self.vae_shift,
            "mid_block_add_attention": self.vae_attention,
            "force_upcast": False,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        }

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of `FlowMatchEulerDiscreteScheduler`: Z-Image-Turbo's static shift."""
        return {"num_train_timesteps": TIMESTEPS, "shift": self.shift, "use_dynamic_shifting": False}


# Shipped as models/emoji-z: 64 image tokens a picture; the VAE's decoder costs what emoji-xl's does.
EMOJI = ZImageShape(
    native=128,
    width=192,
    heads=3,
    axes=(16, 24, 24),
    layers=9,
    text_width=192,
    text_layers=4,
    text_heads=3,
    text_kv_heads=1,
    text_head_width=64,
    text_inner=512,
    vae_channels=(16, 32, 64, 96),
    vae_groups=4,
)
SHAPES = {TINY_Z: ZImageShape(), EMOJI_Z: EMOJI}


def make(shape: ZImageShape, seed: int = 0) -> Any:
    """Build a `ZImagePipeline` of the shape's `parts`."""
    from diffusers import ZImagePipeline

    return ZImagePipeline(**parts(shape, seed))


def parts(shape: ZImageShape, seed: int = 0) -> dict[str, Any]:
    """Return the parts of a pipeline of this shape by their names, with seeded random weights, in fp32 on the CPU."""
    import torch

    # Full module paths: diffusers' and transformers' top levels import slowly.
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = Qwen3Model(Qwen3Config(**shape.text(len(tokenizer), tokenizer.pad_token_id)))
        transformer = ZImageTransformer2DModel(**shape.transformer())
        vae = AutoencoderKL(**shape.vae())
        # Padding starts at zero, and fresh weights decode to grey: larger ones make errors visible in the image.
        with torch.no_grad():
            transformer.cap_pad_token.normal_(std=0.5)
            transformer.x_pad_token.normal_(std=0.5)
            vae.decoder.conv_out.weight.mul_(3.0)
    return {
        "vae": vae.eval(),
        "text_encoder": text.eval(),
        "tokenizer": tokenizer,
        "transformer": transformer.eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(**shape.sampling()),
    }


def byte_tokenizer() -> Any:
    """Build a Qwen tokenizer of single bytes with the ChatML template: it reads any text, from no file."""
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate((*byte_letters(), *SPECIAL))},
        merges=[],
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=TOKENS,
        padding_side="right",
    )
