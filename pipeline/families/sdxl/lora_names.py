"""The names that LoRA files have for layers of a UNet and CLIP: kohya's, ComfyUI's, and Stability's own (sgm)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.extensions.lora_names import LoraNames

_SGM_RESNET = {
    "conv1": "in_layers_2", "conv2": "out_layers_3", "time_emb_proj": "emb_layers_1",
    "conv_shortcut": "skip_connection", "norm1": "in_layers_0", "norm2": "out_layers_0",
}  # fmt: skip


def _others(part: str, model: Any) -> Iterator[tuple[str, str]]:
    return _sgm(model, [path for path, _ in model.named_modules() if path]) if part == "unet" else iter(())


def _sgm(unet: Any, paths: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each path of diffusers' UNet with Stability's name for it, as far as one is known."""
    blocks = dict(_sgm_blocks(unet))
    for path in paths:
        words = path.split(".")
        for count in range(len(words), 0, -1):
            if (block := blocks.get(".".join(words[:count]))) is not None:
                rest = words[count:]
                if words[count - 2] == "resnets" and rest:
                    rest = [_SGM_RESNET.get(rest[0], rest[0])]
                yield path, "_".join([block, *rest])
                break


def _sgm_blocks(unet: Any) -> Iterator[tuple[str, str]]:
    yield from {
        "conv_in": "input_blocks_0_0", "conv_out": "out_2", "conv_norm_out": "out_0",
        "time_embedding.linear_1": "time_embed_0", "time_embedding.linear_2": "time_embed_2",
        "add_embedding.linear_1": "label_emb_0_0", "add_embedding.linear_2": "label_emb_0_2",
        "mid_block.resnets.0": "middle_block_0", "mid_block.attentions.0": "middle_block_1",
        "mid_block.resnets.1": "middle_block_2",
    }.items()  # fmt: skip
    number = 1
    for level, block in enumerate(unet.down_blocks):
        for index in range(len(block.resnets)):
            yield f"down_blocks.{level}.resnets.{index}", f"input_blocks_{number}_0"
            yield f"down_blocks.{level}.attentions.{index}", f"input_blocks_{number}_1"
            number += 1
        if block.downsamplers:
            yield f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks_{number}_0_op"
            number += 1
    number = 0
    for level, block in enumerate(unet.up_blocks):
        for index in range(len(block.resnets)):
            yield f"up_blocks.{level}.resnets.{index}", f"output_blocks_{number}_0"
            yield f"up_blocks.{level}.attentions.{index}", f"output_blocks_{number}_1"
            if block.upsamplers and index == len(block.resnets) - 1:
                place = 2 if getattr(block, "attentions", None) else 1
                yield f"up_blocks.{level}.upsamplers.0.conv", f"output_blocks_{number}_{place}_conv"
            number += 1


NAMES = LoraNames(
    prefixes={
        "unet": ("lora_unet_", "lycoris_"),
        "text_encoder": ("lora_te1_", "lora_te_"),
        "text_encoder_2": ("lora_te2_",),
    },
    dotted={
        "model.diffusion_model.": "lora_unet_", "diffusion_model.": "lora_unet_",
        "text_encoders.clip_l.transformer.": "lora_te1_", "text_encoders.clip_g.transformer.": "lora_te2_",
        "text_encoders.clip_l.": "lora_te1_", "text_encoders.clip_g.": "lora_te2_",
        "clip_l.transformer.": "lora_te1_", "clip_g.transformer.": "lora_te2_",
        "clip_l.": "lora_te1_", "clip_g.": "lora_te2_",
        "te1.": "lora_te1_", "te2.": "lora_te2_", "te.": "lora_te1_", "lora_te1.": "lora_te1_",
        "lora_te2.": "lora_te2_", "lora_te.": "lora_te1_", "lora_unet.": "lora_unet_",
        # The authors' own names of the encoder, and a denoiser by the word for those of other families.
        "conditioner.embedders.0.transformer.": "lora_te1_", "cond_stage_model.transformer.": "lora_te1_",
        "transformer.text_model.": "lora_te1_text_model_",
        **{f"transformer.{top}.": f"lora_unet_{top}_" for top in ("down_blocks", "mid_block", "up_blocks")},
    },
    others=_others,
)  # fmt: skip
