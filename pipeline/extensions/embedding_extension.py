"""Textual inversions, which words of prompts name: they have no field of their own, and nothing to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipeline.extensions.extension import Extension
from pipeline.text.textual_inversion import EmbeddingFolder

if TYPE_CHECKING:
    from core.config import Settings
    from pipeline.backends.backend import ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class EmbeddingExtension(Extension[EmbeddingFolder]):
    field = card_field = "embeddings"

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: EmbeddingFolder | None = None) -> None:
        super().__init__(model, backend, folder)
        self.vocabulary = folder

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        widths = model.family.embedding_widths(model)
        if not settings.embeddings_dir or not widths:
            return cls(model, backend)
        most = model.family.text_encoder(model).tokens - 2  # of one chunk, without its start and end
        return cls(model, backend, EmbeddingFolder(Path(settings.embeddings_dir), widths, most))

    def digests(self, state: ImageState) -> Mapping[str, str]:
        return state.prompts.embeddings
