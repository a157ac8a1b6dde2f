"""Computes features of images and captions with a CLIP model in transformers' format: the embedded emoji-clip, or
OpenAI's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from evaluation.inception import WeightsError
from evaluation.pixels import Pixels

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "emoji-clip"
OPENAI = "openai/clip-vit-base-patch32"  # the weights of open_clip's ViT-B/32 "openai"
_BATCH = 128


class Clip:
    """A CLIPModel with its tokenizer. `name` is the prefix of its figures."""

    def __init__(self, source: Path | str = EMBEDDED, *, device: torch.device | str = "cpu") -> None:
        """`source` is a folder, or a hub id. Raises `WeightsError`."""
        from transformers import AutoTokenizer, CLIPModel
        from transformers.utils import logging

        folder = source if isinstance(source, Path) else Path(_fetched(source))
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it would overwrite our own
        try:
            self._model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{folder}: is not a CLIP model ({str(error).splitlines()[0]})") from None
        finally:
            if bars:
                logging.enable_progress_bar()
        self._device = torch.device(device)
        self._model.requires_grad_(False).to(self._device)
        self.name = folder.resolve().name if isinstance(source, Path) else source.rpartition("/")[2]
        self.width = int(self._model.config.projection_dim)
        self.digest = _digest(self._model)
        self._side = int(self._model.config.vision_config.image_size)
        self._mean, self._std = _normalization(folder)

    @torch.inference_mode()
    def see(self, pictures: Sequence[Pixels]) -> Tensor:
        """Unit features [N, D] of uint8 [H, W, 3] pictures; shorter side fitted by bicubic, the middle cut out."""
        found = []
        for start in range(0, len(pictures), _BATCH):
            part = np.stack([self._fit(np.asarray(picture)) for picture in pictures[start : start + _BATCH]])
            scaled = (torch.from_numpy(part).permute(0, 3, 1, 2).float() / 255 - self._mean) / self._std
            pooled = self._model.vision_model(pixel_values=scaled.to(self._device)).pooler_output
            found.append(F.normalize(self._model.visual_projection(pooled), dim=-1).cpu())
        return torch.cat(found)

    @torch.inference_mode()
    def read(self, captions: Sequence[str]) -> Tensor:
        """Unit features [N, D] of captions, truncated to the model's context."""
        found = []
        limit = int(self._model.config.text_config.max_position_embeddings)
        for start in range(0, len(captions), _BATCH):
            part = list(captions[start : start + _BATCH])
            ids = self._tokenizer(part, padding=True, truncation=True, max_length=limit, return_tensors="pt").input_ids
            pooled = self._model.text_model(input_ids=ids.to(self._device)).pooler_output
            found.append(F.normalize(self._model.text_projection(pooled), dim=-1).cpu())
        return torch.cat(found)

    def _fit(self, picture: Pixels) -> Pixels:
        height, width = picture.shape[:2]
        side = self._side
        if (height, width) == (side, side):
            return picture
        scale = side / min(height, width)
        size = (max(side, int(width * scale)), max(side, int(height * scale)))
        image = Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)
        left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
        return np.asarray(image.crop((left, top, left + side, top + side)))


def _normalization(folder: Path) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [3, 1, 1] of the model's pixels, as its processor's config has them."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text("utf-8"))
            config = config.get("image_processor", config)
            if "image_mean" in config and "image_std" in config:
                mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
                return mean, std
    raise WeightsError(f"{folder}: has no processor config with image_mean and image_std")


def _digest(model: Any) -> str:
    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole.update(name.encode() + value.contiguous().cpu().numpy().tobytes())
    return whole.hexdigest()


def _fetched(hub_id: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(hub_id, allow_patterns=["*.json", "*.txt", "model.safetensors"])
    except Exception as error:  # anything the network raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{hub_id} could not be fetched ({reason}); name a folder with --clip") from None
