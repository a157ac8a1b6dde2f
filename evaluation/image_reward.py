"""Scores an image with its caption by ImageReward (Xu et al., 2023): BLIP, whose text encoder sees it, and an MLP."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from evaluation.hub import digest_of_file, file_of, fill, normalized, read_file, snapshot
from evaluation.inception import WeightsError
from evaluation.pixels import Pixels

# As in ImageReward/ImageReward.py of github.com/THUDM/ImageReward, whose MLP has no activations.
_SIDE, _TOKENS = 224, 35
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_REWARD_MEAN, _REWARD_STD = 0.16717362830052426, 1.0333394966054072
_MLP = {"0": 1024, "2": 128, "4": 64, "6": 16, "7": 1}
_HEAD_WIDTH, _EPS = 64, 1e-6  # of timm's vision transformers
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "blocks": "encoder.layers",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
}
_IMAGES, _TEXT, _MLP_LAYERS = "blip.visual_encoder.", "blip.text_encoder.", "mlp.layers."


class ImageReward:
    """Rewards, of mean 0 and deviation 1 over their authors' pictures."""

    name = "imagereward"

    def __init__(self, source: Path, *, device: torch.device | str = "cpu") -> None:
        """`source` holds `ImageReward.pt` (or the same as `ImageReward.safetensors`), `med_config.json`, and
        bert-base-uncased's `vocab.txt`. Raises `WeightsError`.
        """
        from transformers import BertTokenizer

        folder = snapshot(source)
        path = file_of(folder, "ImageReward.pt", "ImageReward.safetensors")
        tensors = read_file(path)
        network = _network(tensors, file_of(folder, "med_config.json"), path)
        fill(network, dict(_renamed(tensors)), path, "ImageReward")
        vocabulary = file_of(folder, "vocab.txt")
        self._tokenizer: Any = BertTokenizer(str(vocabulary), do_lower_case=True)
        self._tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)  # as BLIP does
        rows = len(tensors[f"{_TEXT}embeddings.word_embeddings.weight"])
        if len(self._tokenizer) != rows:
            raise WeightsError(f"{vocabulary}: has {len(self._tokenizer) - 2} tokens, where {path.name} has {rows - 2}")
        self._device = torch.device(device)
        self._network: Any = network.float().eval().requires_grad_(False).to(self._device)
        self.digest = digest_of_file(path)

    @torch.inference_mode()
    def score(self, picture: Pixels, caption: str) -> float:
        """The reward of a uint8 [H, W, 3] picture: shorter side fitted to 224 by bicubic, the middle cut out.

        Of the caption the first 35 tokens are read, as their authors do.
        """
        ids = self._tokenizer(caption, truncation=True, max_length=_TOKENS, return_tensors="pt").input_ids
        seen = self._network["vision"](pixel_values=_prepare(picture).to(self._device)).last_hidden_state
        read = self._network["text"](input_ids=ids.to(self._device), encoder_hidden_states=seen).last_hidden_state
        return (float(self._network["mlp"](read[:, 0])) - _REWARD_MEAN) / _REWARD_STD


def _network(tensors: Mapping[str, Tensor], config: Path, path: Path) -> nn.ModuleDict:
    """The networks, of the sizes that the weights and the text encoder's config have."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    try:
        width, _, patch, _ = tensors[f"{_IMAGES}patch_embed.proj.weight"].shape
        hidden_width = len(tensors[f"{_IMAGES}blocks.0.mlp.fc1.weight"])
    except KeyError as error:
        raise WeightsError(f"{path}: is not ImageReward (no {error.args[0]})") from None
    try:
        config_data = json.loads(config.read_text("utf-8"))
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "max_position_embeddings", "hidden_act", "layer_norm_eps")  # fmt: skip
        text = {name: config_data[name] for name in names} | {"encoder_hidden_size": width}
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{config}: is not the config of ImageReward's text encoder ({error})") from None
    vision = BlipVisionConfig(
        hidden_size=width, intermediate_size=hidden_width, num_attention_heads=width // _HEAD_WIDTH,
        layer_norm_eps=_EPS, num_hidden_layers=sum(name.endswith("attn.qkv.weight") for name in tensors),
        image_size=_SIDE, patch_size=patch,
    )  # fmt: skip
    sizes = [text["hidden_size"], *_MLP.values()]
    layers = {name: nn.Linear(*pair) for name, pair in zip(_MLP, pairwise(sizes), strict=True)}
    return nn.ModuleDict({
        "vision": BlipVisionModel(vision),
        "text": BlipTextModel(BlipTextConfig(**text), add_pooling_layer=False),
        "mlp": nn.Sequential(OrderedDict(layers)),
    })  # fmt: skip


def _renamed(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The weights by transformers' names; the rest, BLIP's projections for its training, is left out."""
    parts = []
    for name, value in tensors.items():
        if name.startswith(_IMAGES):
            inner = name.removeprefix(_IMAGES)
            for source, target in _VISION.items():
                inner = inner.replace(source, target)
            parts.append((f"vision.{'post_layer' if inner.startswith('norm.') else ''}{inner}", value))
        elif name.startswith(_TEXT) and not name.endswith("position_ids"):
            parts.append((f"text.{name.removeprefix(_TEXT)}", value))
        elif name.startswith(_MLP_LAYERS):
            parts.append((f"mlp.{name.removeprefix(_MLP_LAYERS)}", value))
    return parts


def _prepare(picture: Pixels) -> Tensor:
    """uint8 [H, W, 3] to normalized [1, 3, 224, 224], as torchvision's Resize and CenterCrop do."""
    image = Image.fromarray(np.asarray(picture))
    short = min(image.size)
    width, height = (_SIDE if edge == short else int(_SIDE * edge / short) for edge in image.size)
    left, top = round((width - _SIDE) / 2), round((height - _SIDE) / 2)
    fitted = image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + _SIDE, top + _SIDE))
    return normalized([np.asarray(fitted)], _MEAN, _STD)
