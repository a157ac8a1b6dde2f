"""Textual inversions, which words of prompts name: they have no field of their own, and nothing to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.extensions.extension import Extension
from pipeline.text.textual_inversion import EmbeddingFolder, TextualInversion

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class EmbeddingExtension(Extension[EmbeddingFolder]):
    field = card_field = "embeddings"

    @classmethod
    def _folder_of(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> EmbeddingFolder | None:
        widths = model.family.embedding_widths(model)
        if not settings.embeddings_dir or not widths:
            return None
        most = model.family.text_encoder(model).tokens - 2  # of one chunk, without its start and end
        return EmbeddingFolder(Path(settings.embeddings_dir), widths, most)

    def requested(self, request: ImageParameters) -> bool:
        return False

    def named_in(self, texts: Mapping[str, str]) -> tuple[TextualInversion, ...]:
        return () if self.folder is None else self.folder.named_in(texts)

    def digests(self, state: ImageState) -> Mapping[str, str]:
        return state.prompts.embeddings
