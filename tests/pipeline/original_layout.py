"""The layout of Stability's own code for SDXL: the inverse of diffusers' conversion, written down from its names."""

from __future__ import annotations

import re
from typing import Any

import torch

_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip


def checkpoint(pipeline: Any) -> dict[str, torch.Tensor]:
    """All weights of an SDXL pipeline of diffusers as one file of the original layout has them."""
    found = _networks(pipeline)
    for (
        key,
        value,
    ) in pipeline.text_encoder.state_dict().items():  # with a level that some versions of transformers lack
        found[f"conditioner.embedders.0.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    found |= _open_clip(pipeline.text_encoder_2.state_dict())
    return _with_upsamplers_placed({key: value.contiguous() for key, value in found.items()})


def _networks(pipeline: Any) -> dict[str, torch.Tensor]:
    layers = int(pipeline.unet.config.layers_per_block)
    found = {f"model.diffusion_model.{_unet(key, layers)}": value for key, value in pipeline.unet.state_dict().items()}
    levels = len(pipeline.vae.config.block_out_channels)
    for key, value in pipeline.vae.state_dict().items():
        name = _vae(key, levels)
        is_linear = ".attn_1." in name and value.ndim == 2
        found[f"first_stage_model.{name}"] = value[:, :, None, None] if is_linear else value
    return found


def checkpoint_1(pipeline: Any, level: str = "text_model.") -> dict[str, torch.Tensor]:
    """All weights of a Stable Diffusion 1 as one file of CompVis's layout has them; `level` is that of its CLIP."""
    found = {key: value for key, value in _networks(pipeline).items() if ".label_emb." not in key}
    for key, value in pipeline.text_encoder.state_dict().items():
        found[f"cond_stage_model.transformer.{level}{key.removeprefix('text_model.')}"] = value
    return _with_upsamplers_placed({key: value.contiguous() for key, value in found.items()})


def original_controlnet(net: Any) -> dict[str, torch.Tensor]:
    """All weights of a ControlNet of diffusers as its authors' code names them (Zhang et al., 2023)."""
    layers, found = int(net.config.layers_per_block), {}
    for key, value in net.state_dict().items():
        hint = re.fullmatch(r"controlnet_cond_embedding\.(conv_in|conv_out|blocks\.(\d+))\.(\w+)", key)
        zero = re.fullmatch(r"controlnet_down_blocks\.(\d+)\.(\w+)", key)
        if hint is not None:
            at = {"conv_in": 0, "conv_out": 14}[hint[1]] if hint[2] is None else 2 * int(hint[2]) + 2
            name = f"input_hint_block.{at}.{hint[3]}"
        elif zero is not None:
            name = f"zero_convs.{zero[1]}.0.{zero[2]}"
        elif key.startswith("controlnet_mid_block."):
            name = key.replace("controlnet_mid_block", "middle_block_out.0")
        else:
            name = _unet(key, layers)
        found[f"control_model.{name}"] = value.contiguous()
    return found


def _unet(key: str, layers: int) -> str:
    for theirs, ours in _UNET.items():
        if key.startswith(f"{theirs}."):
            return key.replace(theirs, ours, 1)
    mid = re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", key)
    if mid is not None:
        return (
            f"middle_block.1.{mid[3]}"
            if mid[1] == "attentions"
            else f"middle_block.{2 * int(mid[2])}.{_resnet(mid[3])}"
        )
    match = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)", key)
    assert match is not None, key
    way, block, kind, index, rest = match.groups()
    level, layer = int(block), int(index)
    if kind == "downsamplers":
        return f"input_blocks.{(layers + 1) * (level + 1)}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":  # behind the attention, where there is one
        return f"output_blocks.{(layers + 1) * level + layers}.UP.{rest}"
    count = (layers + 1) * level + layer
    place = f"input_blocks.{count + 1}" if way == "down" else f"output_blocks.{count}"
    return f"{place}.0.{_resnet(rest)}" if kind == "resnets" else f"{place}.1.{rest}"


def _resnet(rest: str) -> str:
    name, _, end = rest.rpartition(".")
    return f"{_RESNET[name]}.{end}"


def _vae(key: str, levels: int) -> str:
    key = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", key)
    key = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", key)
    key = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)", lambda f: f"up.{levels - 1 - int(f[1])}.block.{f[2]}", key)
    key = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda f: f"up.{levels - 1 - int(f[1])}.upsample", key)
    if "mid_block.attentions.0." in key:
        key = key.replace("mid_block.attentions.0.", "mid.attn_1.")
        for theirs, ours in _VAE_ATTENTION.items():
            key = key.replace(f"attn_1.{theirs}.", f"attn_1.{ours}.")
    return key


def _open_clip(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in weights.items():
        name = key.removeprefix("text_model.")
        if name == "text_projection.weight":
            found["text_projection"] = value.T
        elif name == "embeddings.token_embedding.weight":
            found["token_embedding.weight"] = value
        elif name == "embeddings.position_embedding.weight":
            found["positional_embedding"] = value
        elif name.startswith("final_layer_norm."):
            found[name.replace("final_layer_norm", "ln_final")] = value
        elif ".q_proj." in name:
            parts = torch.cat([weights[key.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            place, end = name.split(".self_attn.q_proj.")
            found[f"{place.replace('encoder.layers', 'transformer.resblocks')}.attn.in_proj_{end}"] = parts
        elif not re.search(r"\.[kv]_proj\.", name):
            name = name.replace("encoder.layers", "transformer.resblocks")
            for theirs, ours in _OPEN_CLIP.items():
                name = name.replace(theirs, ours)
            found[name] = value
    return {f"conditioner.embedders.1.model.{key}": value for key, value in found.items()}


def _with_upsamplers_placed(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Upsamplers come last of their block: after the resnet, and after the attention where there is one."""
    blocks = {key.split(".UP.")[0] for key in found if ".UP." in key}
    attended = {block for block in blocks if any(key.startswith(f"{block}.1.") for key in found)}
    return {
        key.replace(".UP.", ".2." if key.split(".UP.")[0] in attended else ".1."): value for key, value in found.items()
    }
