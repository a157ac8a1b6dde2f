"""All kinds of what requests may bring along."""

from __future__ import annotations

from typing import Any

from pipeline.extensions.control import ControlExtension
from pipeline.extensions.embedding_extension import EmbeddingExtension
from pipeline.extensions.extension import Extension
from pipeline.extensions.image_prompts import ImagePromptExtension
from pipeline.extensions.lora_extension import LoraExtension
from pipeline.extensions.upscaling import UpscaleExtension

KINDS: tuple[type[Extension[Any]], ...] = (
    UpscaleExtension, LoraExtension, ControlExtension, ImagePromptExtension, EmbeddingExtension,
)  # fmt: skip
