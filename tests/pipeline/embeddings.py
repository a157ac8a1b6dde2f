"""Files of textual inversions with random vectors, for the tests' tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints.load import ImageModel
from pipeline.extensions.embedding_extension import EmbeddingExtension
from pipeline.runner import ImageRunner
from pipeline.text.textual_inversion import EmbeddingFolder


def vectors(model: ImageModel, count: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """[count, D] of each encoder; several times as large as a token's own."""
    generator = torch.Generator().manual_seed(seed)
    widths = model.family.embedding_widths(model)
    return {key: 0.3 * torch.randn(count, width, generator=generator) for key, width in widths.items()}


def write(model: ImageModel, folder: Path, name: str, count: int = 2, seed: int = 0) -> Path:
    path = folder / f"{name}.safetensors"
    save_file(vectors(model, count, seed), path)
    return path


def folder_of(model: ImageModel, folder: Path) -> EmbeddingFolder:
    return EmbeddingFolder(folder, model.family.embedding_widths(model), 75)


def runner_of(model: ImageModel, folder: Path | None, **options: Any) -> ImageRunner:
    """A runner on torch whose prompts may name the embeddings of a folder."""
    backend = TorchBackend(model)
    files = None if folder is None else folder_of(model, folder)
    return ImageRunner(backend, [EmbeddingExtension(model, backend, files)], **options)
