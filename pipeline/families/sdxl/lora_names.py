"""Finds the layers of a UNet and its text encoders that the keys of LoRA files name, in the layouts that tools write.

- kohya's (sd-scripts, OneTrainer, LyCORIS): `lora_unet_` or `lora_te1_` and a layer's name with underscores, in
  diffusers' or in Stability's (sgm) naming, read by a table of the model's own layers.
- ComfyUI's: Stability's names with dots, behind `diffusion_model.`, `clip_l.` and `clip_g.`.
- diffusers' and peft's: dots throughout, behind the part's name, peft's `base_model.model.`, or nothing for a UNet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_TABLED = {  # prefixes whose rest is a name with underscores, by part
    "unet": ("lora_unet_", "lycoris_"),
    "text_encoder": ("lora_te1_", "lora_te_"),
    "text_encoder_2": ("lora_te2_",),
}
_DOTTED = {  # prefixes that stand for those
    "model.diffusion_model.": "lora_unet_", "diffusion_model.": "lora_unet_",
    "text_encoders.clip_l.transformer.": "lora_te1_", "text_encoders.clip_g.transformer.": "lora_te2_",
    "text_encoders.clip_l.": "lora_te1_", "text_encoders.clip_g.": "lora_te2_",
    "clip_l.transformer.": "lora_te1_", "clip_g.transformer.": "lora_te2_",
    "clip_l.": "lora_te1_", "clip_g.": "lora_te2_",
}  # fmt: skip
_PEFT = "base_model.model."
_ENDINGS = {  # of all tools, as peft's
    ".lora_down.weight": "lora_A.weight", ".lora_up.weight": "lora_B.weight",
    ".lora_A.weight": "lora_A.weight", ".lora_B.weight": "lora_B.weight",
    ".lora.down.weight": "lora_A.weight", ".lora.up.weight": "lora_B.weight",
}  # fmt: skip
_ADAPTER = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")  # peft's, with the adapter's name
_ALPHA = ".alpha"
_SGM_RESNET = {
    "conv1": "in_layers_2", "conv2": "out_layers_3", "time_emb_proj": "emb_layers_1",
    "conv_shortcut": "skip_connection", "norm1": "in_layers_0", "norm2": "out_layers_0",
}  # fmt: skip


def to_peft(state: Mapping[str, Tensor], parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the file's tensors under the part's name and the layer's, and alphas by the names of `lora_A`.

    Keys of diffusers' older layouts keep their endings. Raises ValueError, naming the key, where the model lacks a
    layer.
    """
    layers = {
        prefix: _table(part, parts[part]) for part, prefixes in _TABLED.items() if part in parts for prefix in prefixes
    }
    tensors: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    fallback: dict[str, Tensor] = {}  # in Stability's names, of files that may hold a layer under both
    for key, tensor in state.items():
        name = _underscored(_ADAPTER.sub(r".\1.weight", key))
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), "")
        layer, ending = _split(name.removeprefix(prefix))
        if not prefix:
            layer = _layer_path(layer, parts)
        elif layer in layers[prefix]:
            layer, sgm = layers[prefix][layer]
            if ending in _ENDINGS and sgm:
                fallback[f"{layer}.{_ENDINGS[ending]}"] = tensor
                continue
        else:
            raise ValueError(f"{_sanitized(key)} names no layer of this model")
        if ending == _ALPHA:
            if tensor.numel() != 1:
                raise ValueError(f"{_sanitized(key)} is no number")
            alphas[f"{layer}.lora_A.weight.alpha"] = alphas[f"{layer}.lora.down.weight.alpha"] = float(tensor)
        elif ending in _ENDINGS and (prefix or not ending.startswith(".lora.")):
            tensors[f"{layer}.{_ENDINGS[ending]}"] = tensor
        else:
            tensors[layer + ending] = tensor
    return {**fallback, **tensors}, alphas


def _underscored(key: str) -> str:
    """Rewrite Stability's names with dots as kohya's; other keys are unchanged."""
    for dotted, prefix in _DOTTED.items():
        if key.startswith(dotted):
            layer, ending = _split(key.removeprefix(dotted))
            return prefix + layer.replace(".", "_") + ending
    return key


def _split(key: str) -> tuple[str, str]:
    """Return a layer's name, and a known ending or nothing."""
    for ending in (*_ENDINGS, _ALPHA):
        if key.endswith(ending):
            return key.removesuffix(ending), ending
    return key, ""


def _layer_path(name: str, parts: Mapping[str, Any]) -> str:
    """Return a dotted name behind its part's."""
    path = name.replace(_PEFT, "", 1)
    top = path.partition(".")[0]
    if top in parts or (top == "text_model" and path == name):
        return path
    if top == "text_model":
        return f"text_encoder.{path}"
    return f"unet.{path}" if top in dict(parts["unet"].named_children()) else path


def _table(part: str, model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Return for each name with underscores the layer behind its part's name, and whether the name is Stability's."""
    table: dict[str, tuple[str, bool]] = {}
    paths = [path for path, _ in model.named_modules() if path]
    if part == "unet":
        table |= {name: (f"{part}.{path}", True) for path, name in _sgm(model, paths)}
    for path in paths:
        # Some versions of transformers have one level less, and files of both are about.
        bare = path.removeprefix("text_model.")
        names = {path, bare, f"text_model.{bare}"} if part != "unet" else {path}
        table |= {name.replace(".", "_"): (f"{part}.{path}", False) for name in names}
    return table


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


def _sanitized(text: str) -> str:
    """Sanitize a name from a file, which may be anything."""
    return ascii(text[:160])
