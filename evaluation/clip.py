"""Computes features of images and captions with a CLIP model in transformers' format: the embedded emoji-clip, or
OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from evaluation.hub import digest_of, load, name_of, normalized, snapshot
from evaluation.inception import WeightsError
from evaluation.pixels import Pixels

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "emoji-clip"
OPENAI = "openai/clip-vit-base-patch32"  # the weights of open_clip's ViT-B/32 "openai"
_BATCH = 128


# Not torchmetrics' CLIPScore: 1.9 takes output objects of transformers 5 for features, and raises; and its figure is
# the mean, clamped at 0, where intervals and paired tests need every caption's. A test holds ours to its formula.
class Clip:
    """A CLIPModel with its tokenizer. `name` is the prefix of its figures."""

    def __init__(
        self, source: Path | str = EMBEDDED, *, device: torch.device | str = "cpu", padded: bool = False
    ) -> None:
        """`source` is a folder, or a hub id. Raises `WeightsError`.

        `padded`: a picture that is not square is fitted whole, between black borders, instead of cut.
        """
        from transformers import AutoTokenizer, CLIPModel

        folder = snapshot(source) if isinstance(source, Path) else Path(_fetched(source))
        self._model: Any = load(CLIPModel, folder, "CLIP model").to(device)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{folder}: is not a CLIP model ({str(error).splitlines()[0]})") from None
        self._device = torch.device(device)
        self._padded = padded
        name = name_of(source) if isinstance(source, Path) else source.rpartition("/")[2]
        self.name = f"{name}-padded" if padded else name
        self.width = int(self._model.config.projection_dim)
        self.digest = digest_of(self._model)
        self._side = int(self._model.config.vision_config.image_size)
        self._mean, self._std = _normalization(folder)

    @property
    def scale(self) -> float:
        """The factor for cosines that the model was trained with."""
        return float(self._model.logit_scale.exp())

    @torch.inference_mode()
    def see(self, pictures: Sequence[Pixels]) -> Tensor:
        """Unit features [N, D] of uint8 [H, W, 3] pictures; shorter side fitted by bicubic, the middle cut out."""
        features = []
        for start in range(0, len(pictures), _BATCH):
            prepared = self._prepared(pictures[start : start + _BATCH])
            pooled = self._model.vision_model(pixel_values=prepared).pooler_output
            features.append(F.normalize(self._model.visual_projection(pooled), dim=-1).cpu())
        return torch.cat(features)

    @torch.inference_mode()
    def read(self, captions: Sequence[str]) -> Tensor:
        """Unit features [N, D] of captions, truncated to the model's context."""
        features = []
        limit = int(self._model.config.text_config.max_position_embeddings)
        for start in range(0, len(captions), _BATCH):
            part = list(captions[start : start + _BATCH])
            ids = self._tokenizer(part, padding=True, truncation=True, max_length=limit, return_tensors="pt").input_ids
            pooled = self._model.text_model(input_ids=ids.to(self._device)).pooler_output
            features.append(F.normalize(self._model.text_projection(pooled), dim=-1).cpu())
        return torch.cat(features)

    def _prepared(self, pictures: Sequence[Pixels]) -> Tensor:
        """Pictures as the vision tower reads them, on its device."""
        fitted = [self._fit(np.asarray(picture)) for picture in pictures]
        return normalized(fitted, self._mean, self._std).to(self._device)

    def _fit(self, picture: Pixels) -> Pixels:
        height, width = picture.shape[:2]
        side = self._side
        if (height, width) == (side, side):
            return picture
        if self._padded:
            scale = side / max(height, width)
            size = (round(width * scale), round(height * scale))
            image = Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)
            ground = Image.new("RGB", (side, side))
            ground.paste(image, ((side - size[0]) // 2, (side - size[1]) // 2))
            return np.asarray(ground)
        scale = side / min(height, width)
        size = (max(side, int(width * scale)), max(side, int(height * scale)))
        image = Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)
        left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
        return np.asarray(image.crop((left, top, left + side, top + side)))


def _normalization(folder: Path) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the model's pixels by channel, as its processor's config has them."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text("utf-8"))
            config = config.get("image_processor", config)
            if "image_mean" in config and "image_std" in config:
                return config["image_mean"], config["image_std"]
    raise WeightsError(f"{folder}: has no processor config with image_mean and image_std")


def _fetched(hub_id: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        # OpenAI's repository has no safetensors.
        return snapshot_download(hub_id, allow_patterns=["*.json", "*.txt", "model.safetensors", "pytorch_model.bin"])
    except Exception as error:  # anything the network raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{hub_id} could not be fetched ({reason}); name a folder with --clip") from None
