"""DINOv2's features: as transformers computes them over the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import BitImageProcessor, Dinov2Model

from evaluation.dinov2 import DinoV2
from tests.evaluation.conftest import blocks


@pytest.mark.parametrize("size", [(224, 224), (300, 200), (70, 70)])
def test_dinov2_is_transformers(size: tuple[int, int], dino: Path) -> None:
    seen = blocks(3, size)
    processor = BitImageProcessor(
        size={"height": 224, "width": 224}, resample=3, do_center_crop=False,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    images = processor([Image.fromarray(one) for one in seen], return_tensors="pt")
    model = Dinov2Model.from_pretrained(dino).eval()
    with torch.inference_mode():
        expected = model.layernorm(model(**images, output_hidden_states=True).hidden_states[-1])[:, 0]
    ours = DinoV2(dino)
    assert ours.width == 32 and ours.name == "dinov2-small-random"
    # Pillow's filter, and torchvision's or none where pictures have the size
    torch.testing.assert_close(ours.see(seen), expected, rtol=1e-3, atol=1e-5 if size == (224, 224) else 2e-2)
