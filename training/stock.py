"""Draws by stock diffusers over an exported folder, each image from its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from evaluation.pixels import Pixels
from pipeline.extensions.ip_adapter_file import ENCODER
from training.run import TrainingRun

SEED = 1234


class StockPipeline:
    """The pipeline of `emoji-xl` or `emoji-xl-turbo`, at the run's size."""

    def __init__(self, run: TrainingRun, name: str, steps: int, guidance: float) -> None:
        from diffusers import DiffusionPipeline

        # 16 bits are how the weights are kept; a CPU computes in float32.
        dtype = torch.float16 if run.on_gpu else torch.float32
        pipeline: Any = DiffusionPipeline.from_pretrained(run.models / name, dtype=dtype, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        self._pipeline = pipeline.to(run.device)
        self._chunk = 250 if run.on_gpu else 32
        self._given = {
            "height": run.size, "width": run.size, "num_inference_steps": steps, "guidance_scale": guidance,
            "output_type": "np",
        }  # fmt: skip

    def adapt(self, run: TrainingRun, folder: str, name: str) -> None:
        """Load an exported IP-Adapter and its encoder."""
        from transformers import CLIPImageProcessor

        path = run.models / folder
        self._pipeline.register_modules(feature_extractor=CLIPImageProcessor.from_pretrained(path / ENCODER))
        self._pipeline.load_ip_adapter(
            str(path), subfolder="", weight_name=f"{name}.safetensors", image_encoder_folder=ENCODER
        )
        # As given: the pipeline repeats embeddings for all prompts, by which each would see all images.
        self._pipeline.prepare_ip_adapter_image_embeds = lambda image, embeds, *_: embeds

    def draw(self, texts: Sequence[str], conditions: Sequence[Image.Image] = (), strength: float = 1.0) -> list[Pixels]:
        """Images of texts, with an adapter each with one that is `conditions`."""
        pictures: list[Pixels] = []
        if conditions:
            self._pipeline.set_ip_adapter_scale(strength)
        for start in range(0, len(texts), self._chunk):
            part = list(texts[start : start + self._chunk])
            arguments: dict[str, Any] = dict(self._given)
            if conditions:
                images = list(conditions[start : start + self._chunk])
                seen = self._pipeline.encode_image(images, self._pipeline.device, 1)
                arguments["ip_adapter_image_embeds"] = [torch.cat(seen[::-1])[:, None]]
            seeds = [torch.Generator("cpu").manual_seed(SEED + start + n) for n in range(len(part))]
            outputs = self._pipeline(prompt=part, generator=seeds, **arguments).images
            pictures += [(image * 255).round().astype(np.uint8) for image in outputs]
        return pictures
