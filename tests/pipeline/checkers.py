"""Tiny checkers of contents for tests, with random weights, in the layouts of diffusers and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image, Resampling, fromarray

SIDE = 32
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip


def images(count: int) -> list[Image]:
    """Smooth colours with noise, of several sizes."""
    chance = np.random.default_rng(5)
    drawn = []
    for k in range(count):
        width, height = ((64, 64), (96, 56), (40, 72), (32, 32))[k % 4]
        coarse = fromarray(chance.integers(0, 256, (3, 3, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Resampling.BICUBIC))
        noisy = smooth + chance.normal(0, 16, (height, width, 3))
        drawn.append(fromarray(np.clip(noisy, 0, 255).astype(np.uint8)))
    return drawn


def safety_checker(folder: Path, seen: Sequence[Image], share: float = 0.3) -> Path:
    """Save a `StableDiffusionSafetyChecker` of which about this share of the pictures seen exceeds a concept.

    Its concepts are the embeddings of some of them, and each threshold lies where few are near.
    """
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(3)
    vision = {**_VISION, "projection_dim": 16}
    network = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=16)).eval()
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    with torch.inference_mode():
        for parameter in network.visual_projection.parameters():
            parameter.normal_()
        pixels = processor(images=[*seen], return_tensors="pt")["pixel_values"]
        embedded = F.normalize(network.visual_projection(network.vision_model(pixels)[1]))
        middle = F.normalize(embedded.mean(0, keepdim=True))
        for name, count in (("concept_embeds", 17), ("special_care_embeds", 3)):
            directions = F.normalize(torch.randn(count, 16) + 0.5 * middle)
            thresholds = torch.quantile(embedded @ directions.t(), 1 - share / (1 if count == 3 else 6), 0)
            getattr(network, name).copy_(directions)
            getattr(network, f"{name}_weights").copy_(thresholds)
    network.save_pretrained(folder / "safety_checker")
    processor.save_pretrained(folder / "feature_extractor")
    return folder


def classifier(folder: Path, labels: Sequence[str] = ("normal", "nsfw"), **config: Any) -> Path:
    """Save a ViT that classifies images, with these labels and further values of its config. Each label is the one of
    some of `images`.
    """
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(4)
    named: Mapping[int, str] = dict(enumerate(labels))
    options = {**_VISION, "id2label": named, "label2id": {name: k for k, name in named.items()}, **config}
    network = ViTForImageClassification(ViTConfig(**options)).eval()
    processor = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})
    with torch.no_grad():
        logits = network(processor(images=images(48), return_tensors="pt")["pixel_values"]).logits
        scale = 3.0 / logits.std(0)
        network.classifier.weight.mul_(scale[:, None])
        network.classifier.bias.copy_(-scale * logits.mean(0))
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
