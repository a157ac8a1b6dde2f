"""Image prompts of requests: the keys and values that IP-Adapters make of pictures, beside the text's in deep steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contract.image_prompt import FIELD, ImagePrompt
from pipeline.backends.phases import DEEP
from pipeline.extensions.extension import PictureExtension, StepBatch, invalid
from pipeline.extensions.image_prompt_rows import ImagePromptRows, prompts_of
from pipeline.extensions.image_prompts import ImagePromptFolder, ImagePromptLease

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class ImagePromptExtension(PictureExtension[ImagePromptFolder]):
    field, card_field = FIELD, ImagePrompt.OFFER
    unconfigured = "no folder of IP-Adapters is configured (DIPTYCH_IP_ADAPTER_DIR)"
    share, picture, supported = ImagePrompt.SHARE, ImagePrompt, "image_prompts"

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: ImagePromptFolder | None = None) -> None:
        super().__init__(model, backend, folder)
        self._width = backend.denoiser.text_width
        self._rows = ImagePromptRows(self.field)

    @classmethod
    def _folder_of(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> ImagePromptFolder | None:
        if not settings.ip_adapter_dir or not model.family.image_prompts:
            return None
        dtype, capacity = backend.denoiser.lowering.dtype, settings.ip_adapter_mib * 2**20
        return ImagePromptFolder(Path(settings.ip_adapter_dir), backend.model, dtype, capacity)

    def _refusal(self) -> str | None:
        family = self.model.family
        if family.image_prompts and getattr(self.model.denoiser.up_blocks[-1], "attentions", None):
            return "is not supported by a UNet with attention in its last block"  # shallow steps compute without them
        return super()._refusal()

    def _check_files(self, request: ImageParameters) -> None:
        with invalid(f"{self.field}.model"):
            self._files.check(getattr(request, self.field))

    def size_bytes(self, request: ImageParameters, checked: None, rows: int, chunks: int) -> int:
        return self._files.request_bytes(getattr(request, self.field), rows, self._width)

    def release(self, lease: ImagePromptLease, *, keep: bool = False) -> None:
        super().release(lease, keep=keep)
        lease.files = []

    def group(self, lease: ImagePromptLease) -> tuple[int, ...]:
        return lease.tokens

    def prepare(self, request: ImageParameters, state: ImageState, hidden: torch.Tensor) -> None:
        lease: ImagePromptLease = state.extensions[self.field]
        if lease.prompts:
            return
        with invalid(f"{self.field}.model"):
            lease.prompts = self._files.prepare(lease, getattr(request, self.field), state.most_rows, state.acts)
        self.release(lease)

    def batch_rows(self, batch: Sequence[ImageState], backend: ImageBackend, group: BatchGroup, rows: int) -> int:
        """All rows of a forward, whichever have one."""
        acting = (prompt.acts[state.step] for state in batch for prompt in prompts_of(state, self.field))
        return rows if group.phase == DEEP and any(acting) else 0

    def relaunches(self, batch: Sequence[ImageState], group: BatchGroup) -> bool:
        return group.phase == DEEP and self.field in dict(group.extensions)

    def evaluate(self, batch: StepBatch) -> Mapping[str, list[Any]]:
        images = self._rows.gather(batch.states, batch.rows, dict(batch.group.extensions).get(self.field, ()))
        return {"images": images} if images else {}

    def clear_cache(self) -> None:
        self._rows.clear_cache()

    def _lease_digests(self, lease: ImagePromptLease) -> Mapping[str, str]:
        return {prompt.name: prompt.digest for prompt in lease.prompts}
