"""LoRA files for tests: random ones for a tiny model, in each of the layouts that are about."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.checkpoints.load import ImageModel

ATTENTION = "down_blocks.1.attentions.0.transformer_blocks.0"
UNET = (
    f"{ATTENTION}.attn1.to_q",
    f"{ATTENTION}.attn2.to_q",
    f"{ATTENTION}.attn2.to_k",
    f"{ATTENTION}.attn2.to_v",
    f"{ATTENTION}.attn2.to_out.0",
    f"{ATTENTION}.ff.net.0.proj",
    f"{ATTENTION}.ff.net.2",
    "up_blocks.0.attentions.1.transformer_blocks.0.attn1.to_v",
    "up_blocks.0.attentions.1.proj_in",
    "up_blocks.1.resnets.1.time_emb_proj",
)
CONVOLUTIONS = (
    "conv_in",
    "down_blocks.0.resnets.0.conv1",
    "down_blocks.0.downsamplers.0.conv",
    "up_blocks.1.resnets.1.conv2",
    "up_blocks.1.resnets.1.conv_shortcut",
)
TEXT = (
    *(f"text_model.encoder.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
    "text_model.encoder.layers.1.mlp.fc1",
)
LAYERS: Mapping[str, Sequence[str]] = {
    "unet": (*UNET, *CONVOLUTIONS), "text_encoder": TEXT, "text_encoder_2": TEXT,
}  # fmt: skip


def layer(model: ImageModel, part: str, name: str) -> Any:
    """The model's own layer, whether its text encoders have a level more or less."""
    module = model.parts[part]
    try:
        return module.get_submodule(name)
    except AttributeError:
        return module.get_submodule(name.removeprefix("text_model."))


def matrices(
    model: ImageModel, seed: int, *, rank: int = 2, loud: float = 0.1, layers: Mapping[str, Sequence[str]] = LAYERS
) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Random (down, up) for each (part, layer)."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for part, names in layers.items():
        for name in names:
            weight = layer(model, part, name).weight
            down = torch.randn((rank, *weight.shape[1:]), generator=generator)
            up = torch.randn((weight.shape[0], rank, *[1] * (weight.dim() - 2)), generator=generator)
            made[part, name] = loud * down / weight[0].numel() ** 0.5, up
    return made


def write(
    model: ImageModel,
    folder: Path,
    name: str,
    seed: int = 0,
    *,
    layout: str = "peft",
    alpha: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A file of `matrices`, in the layout "peft", "diffusers" (its older one), "kohya" or "sgm" (kohya's for SDXL)."""
    tensors: dict[str, torch.Tensor] = {}
    for (part, own), (down, up) in matrices(model, seed, **options).items():
        if layout in ("kohya", "sgm"):
            key = _sgm(own) if layout == "sgm" and part == "unet" else own.replace(".", "_")
            key = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}[part] + key
            ends = (".lora_down.weight", ".lora_up.weight")
            if alpha is not None:
                tensors[f"{key}.alpha"] = torch.tensor(alpha)
        else:
            key, ends = f"{part}.{own}", (".lora_A.weight", ".lora_B.weight")
            if layout == "diffusers":
                ends = (".lora.down.weight", ".lora.up.weight") if part == "unet" else (
                    ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight")  # fmt: skip
        tensors[key + ends[0]], tensors[key + ends[1]] = down.contiguous(), up.contiguous()
    path = folder / f"{name}.safetensors"
    told = {} if metadata is None else {"lora_adapter_metadata": json.dumps(metadata)}
    save_file(tensors, path, {"format": "pt", **told})
    return path


def _sgm(name: str) -> str:
    """A layer of the tiny UNet as Stability's own code calls it."""
    for ours, theirs in (
        ("conv_in", "input_blocks_0_0"),
        ("down_blocks.0.resnets.0", "input_blocks_1_0"),
        ("down_blocks.0.downsamplers.0.conv", "input_blocks_2_0_op"),
        ("down_blocks.1.attentions.0", "input_blocks_3_1"),
        ("up_blocks.0.attentions.1", "output_blocks_1_1"),
        ("up_blocks.1.resnets.1", "output_blocks_3_0"),
    ):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    for ours, theirs in (
        ("conv1", "in_layers.2"), ("conv2", "out_layers.3"), ("time_emb_proj", "emb_layers.1"),
        ("conv_shortcut", "skip_connection"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name.replace(".", "_")
