"""Features of images by DINOv2, for FD-DINOv2 (Stein et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from evaluation.hub import digest_of, load, name_of, normalized
from evaluation.pixels import Pixels

_SIDE, _BATCH = 224, 64
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


class DinoV2:
    """The normalized class token of a `Dinov2Model`; published figures are ViT-L/14's (facebook/dinov2-large)."""

    def __init__(self, source: Path, *, device: torch.device | str = "cpu") -> None:
        """`source` is a folder in transformers' format. Raises `WeightsError`."""
        from transformers import Dinov2Model

        self._model: Any = load(Dinov2Model, source, "Dinov2Model").to(device)
        self._device = torch.device(device)
        self.name = name_of(source)
        self.width = int(self._model.config.hidden_size)
        self.digest = digest_of(self._model)

    @torch.inference_mode()
    def see(self, pictures: Sequence[Pixels]) -> Tensor:
        """fp32 [N, D] of uint8 [H, W, 3] pictures, each fitted to 224×224 by Pillow's bicubic filter."""
        features = []
        for start in range(0, len(pictures), _BATCH):
            images = [Image.fromarray(np.asarray(picture)) for picture in pictures[start : start + _BATCH]]
            part = [np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)) for image in images]
            scaled = normalized(part, _MEAN, _STD)
            features.append(self._model(pixel_values=scaled.to(self._device)).pooler_output.float().cpu())
        return torch.cat(features)
