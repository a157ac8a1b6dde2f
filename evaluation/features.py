"""Features of pictures and captions by a CLIP model of transformers' format, such as the embedded emoji-clip.

Knows CLIP models; knows nothing of what is done with features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BATCH = 128


class Clip:
    """A folder with a CLIPModel and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, CLIPModel

        self.name = folder.name
        self._model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._side = int(self._model.config.vision_config.image_size)

    @torch.inference_mode()
    def see(self, pixels: Tensor) -> Tensor:
        """Unit features [N, D] of pictures, uint8 [N, H, W, 3]."""
        found = []
        for start in range(0, len(pixels), _BATCH):
            part = pixels[start : start + _BATCH].permute(0, 3, 1, 2).float() / 127.5 - 1
            if part.shape[-1] != self._side:
                part = F.interpolate(part, size=self._side, mode="bilinear", antialias=True)
            pooled = self._model.vision_model(pixel_values=part).pooler_output
            found.append(F.normalize(self._model.visual_projection(pooled), dim=-1))
        return torch.cat(found)

    @torch.inference_mode()
    def read(self, captions: Sequence[str]) -> Tensor:
        """Unit features [N, D] of captions."""
        found = []
        for start in range(0, len(captions), _BATCH):
            part = list(captions[start : start + _BATCH])
            ids = self._tokenizer(part, padding=True, truncation=True, return_tensors="pt").input_ids
            pooled = self._model.text_model(input_ids=ids).pooler_output
            found.append(F.normalize(self._model.text_projection(pooled), dim=-1))
        return torch.cat(found)
