"""The backend of requests with LoRAs of their own: torch on a copy of the model in which each row applies its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from pipeline.backends.backend import Widths
from pipeline.backends.torch_backend import TorchBackend
from pipeline.extensions.adapted import AdaptedModel
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.families.family import ImageModel


class LoraBackend(TorchBackend):
    """A backend that encodes such requests' prompts and takes their steps, eagerly; what decodes them has no LoRA."""

    def __init__(self, model: ImageModel, widths: Widths | None = None) -> None:
        """`model` is unquantized, and keeps its UNet's weights."""
        self.adapted = AdaptedModel(model)
        super().__init__(self.adapted.model, widths)

    def adapt(self, owners: Sequence[tuple[ScaledAdapter, ...]], *, apart: bool) -> AbstractContextManager[None]:
        return self.adapted.rows(owners, apart=apart)

    def forget_adapters(self) -> None:
        self.adapted.clear_cache()
