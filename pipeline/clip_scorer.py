"""Scores pictures by their prompts with a CLIP in transformers' format, as CLIPScore does (Hessel et al., 2021)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from core.digests import digest_of
from core.failures import NotFinite
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError, Part
from pipeline.extensions.vision import fit, normalization

if TYPE_CHECKING:
    from PIL.Image import Image

_PART = Part("encoder", ("CLIPModel",), "transformers.models.clip.modeling_clip")
_TOKENIZER = Part("tokenizer", ("AutoTokenizer",), "transformers.models.auto.tokenization_auto")


class ClipScorer:
    """A CLIP on the CPU, in fp32. Pictures go through it one at a time, so that a score depends on nothing else."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError`, naming the folder."""
        from pipeline.checkpoints.load import load_part

        where = folder.expanduser().absolute()
        if not where.is_dir():
            raise ModelError(f"{folder}: no such folder")
        files = folders.check_part(where, where.name, _PART)
        folders.check_part(where, where.name, _TOKENIZER)
        self.name = where.name
        self.digest = digest_of(where, [where / "config.json", *files])
        self._network: Any = load_part(where.parent, where.name, _PART, torch.float32, None).eval()
        self._tokenizer: Any = load_part(where.parent, where.name, _TOKENIZER, torch.float32, None)
        self._side = int(self._network.config.vision_config.image_size)
        self._length = int(self._network.config.text_config.max_position_embeddings)
        self._mean, self._std = normalization(where)

    @torch.inference_mode()
    def score(self, image: Image, prompt: str) -> float:
        """Return 100 times the cosine of a picture, RGB, and its prompt, which is truncated to the model's context.
        Raises `NotFinite`.
        """
        network = self._network
        ids = self._tokenizer([prompt], truncation=True, max_length=self._length, return_tensors="pt").input_ids
        text = network.text_projection(network.text_model(input_ids=ids).pooler_output)
        pixels = fit(image, self._side, self._mean, self._std)
        picture = network.visual_projection(network.vision_model(pixel_values=pixels).pooler_output)
        score = float(100 * F.cosine_similarity(text, picture))
        if not math.isfinite(score):
            raise NotFinite(f"the fp32 CLIP {self.name}")
        return score
