"""Image prompts of requests: the keys and values that IP-Adapters make of pictures, beside the text's in deep steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from contract import image_prompt
from contract.errors import Invalid
from pipeline.backends.phases import DEEP
from pipeline.extensions.extension import Extension, StepBatch, invalid
from pipeline.extensions.image_prompt_rows import ImagePromptRows, prompts_of
from pipeline.extensions.image_prompts import ImagePromptFolder, ImagePromptLease

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class ImagePromptExtension(Extension):
    field, card_field = image_prompt.FIELD, "image_prompts"
    waits, steps, share = True, True, image_prompt.SHARE
    folder: ImagePromptFolder | None

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: ImagePromptFolder | None = None) -> None:
        super().__init__(model, backend, folder)
        self._width = backend.denoiser.text_width
        self._rows = ImagePromptRows()

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        if not settings.ip_adapter_dir or not model.family.image_prompts:
            return cls(model, backend)
        dtype, capacity = backend.denoiser.lowering.dtype, settings.ip_adapter_mib * 2**20
        return cls(model, backend, ImagePromptFolder(Path(settings.ip_adapter_dir), backend.model, dtype, capacity))

    def reserved_bytes(self) -> int:
        return 0 if self.folder is None else self.folder.size_bytes()

    def check(self, request: ImageParameters) -> None:
        if not self.model.family.image_prompts:
            raise Invalid(self.field, f"is not supported by {self.model.family.label}")
        if getattr(self.model.denoiser.up_blocks[-1], "attentions", None):  # which shallow steps compute without them
            raise Invalid(self.field, "is not supported by a UNet with attention in its last block")
        if self.folder is None:
            raise Invalid(self.field, "no folder of IP-Adapters is configured (DIPTYCH_IP_ADAPTER_DIR)")
        with invalid(f"{self.field}.model"):
            self.folder.check(request.image_prompts)

    def size_bytes(self, request: ImageParameters, checked: None, rows: int, chunks: int) -> int:
        return 0 if self.folder is None else self.folder.request_bytes(request.image_prompts, rows, self._width)

    def acquire(self, request: ImageParameters, checked: None, *, wait: bool) -> ImagePromptLease | None:
        assert self.folder is not None
        files = self.folder.take(request.image_prompts, wait=wait)
        return None if files is None else ImagePromptLease(files, self.folder.tokens(request.image_prompts))

    def release(self, lease: ImagePromptLease, *, keep: bool = False) -> None:
        assert self.folder is not None
        files, lease.files = lease.files, {}
        self.folder.give(files, keep=keep)

    def group(self, lease: ImagePromptLease) -> tuple[int, ...]:
        return lease.tokens

    def prepare(self, request: ImageParameters, state: ImageState, hidden: torch.Tensor) -> None:
        lease: ImagePromptLease = state.extensions[self.field]
        if lease.prompts:
            return
        assert self.folder is not None
        with invalid(f"{self.field}.model"):
            given = request.image_prompts, state.most_rows, state.acts
            lease.prompts = self.folder.prepare(lease.files, *given)
        self.release(lease)

    def rows_left(self, request: ImageParameters, state: ImageState, backend: ImageBackend) -> Sequence[int]:
        acting = [any(acts) for acts in zip(*map(state.acts, request.image_prompts), strict=True)]
        left = slice(state.step, None)
        return [a * w * deep for a, w, deep in zip(acting[left], state.widths[left], state.plan[left], strict=True)]

    def batch_rows(self, batch: Sequence[ImageState], backend: ImageBackend, group: BatchGroup, rows: int) -> int:
        """All rows of a forward, whichever have one."""
        acting = (prompt.acts[state.step] for state in batch for prompt in prompts_of(state))
        return rows if group.phase == DEEP and any(acting) else 0

    def relaunches(self, batch: Sequence[ImageState], group: BatchGroup) -> bool:
        return group.phase == DEEP and self.field in dict(group.extensions)

    def evaluate(self, batch: StepBatch) -> dict[str, Any]:
        images = self._rows.gather(batch.states, batch.rows, dict(batch.group.extensions).get(self.field, ()))
        return {"images": images} if images else {}

    def clear_cache(self) -> None:
        self._rows.clear_cache()

    def changes_steps(self, lease: ImagePromptLease) -> bool:
        return bool(lease.prompts)

    def lease_digests(self, lease: ImagePromptLease) -> Mapping[str, str]:
        return {prompt.name: prompt.digest for prompt in lease.prompts}
