"""LoRAs of requests: encodes their prompts with adapted encoders, and adds their branches to the denoiser's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from contract.image import ImageParameters
from pipeline.backends.backend import BatchGroup, ImageBackend
from pipeline.backends.lora import LoraBackend
from pipeline.backends.phases import KEYS, TEXT
from pipeline.extensions.adapted import AdaptedModel
from pipeline.extensions.adapters import LoraFolder, LoraLease, ScaledAdapter, refused, same
from pipeline.extensions.extension import Extension, invalid
from pipeline.text.conditioning import Conditioner, Told
from pipeline.text.encode import Encoder

if TYPE_CHECKING:
    from core.config import Settings
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class LoraExtension(Extension[LoraFolder]):
    field, card_field = "lora", "loras"
    unconfigured = "no LoRA folder is configured (DIPTYCH_LORA_DIR)"
    waits, steps, share = True, True, 0.15

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: LoraFolder | None = None) -> None:
        """Steps run on `backend` if it packs LoRAs, else on a twin of `model`, which keeps its denoiser's weights."""
        super().__init__(model, backend, folder)
        self._why_none = refused(model, packs=backend.packs)
        if folder is not None:
            twin = None if backend.packs else LoraBackend(model, backend.widths)
            adapted = AdaptedModel(backend.model, denoiser=False) if twin is None else twin.adapted
            self.backend = twin or backend
            self.conditioner = AdaptedConditioner(adapted, folder, self.backend)

    @classmethod
    def _folder_of(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> LoraFolder | None:
        if not settings.lora_dir or refused(model, packs=backend.packs) is not None:
            return None
        pack = backend.pack_adapter if backend.packs else None
        return LoraFolder(Path(settings.lora_dir), model, settings.lora_mib * 2**20, pack)

    @classmethod
    def kept_parts(cls, settings: Settings, model: ImageModel, *, packs: bool) -> set[str | None]:
        family = model.family
        if not settings.lora_dir or refused(model, packs=packs) is not None:
            return set()
        adapted: set[str | None] = {*family.adapters.parts}
        return adapted - {family.denoiser} if packs else adapted | {family.language_model}

    def _refusal(self) -> str | None:
        return None if self.folder is not None else self._why_none or self.unconfigured

    def _check_files(self, request: ImageParameters) -> None:
        with invalid(self.field):
            self._files.check(request.lora)

    def release(self, lease: LoraLease, *, keep: bool = False) -> None:
        super().release(lease, keep=keep)
        if lease.uses and self.backend is not None:
            self.backend.forget_adapters()

    def rows_left(self, request: ImageParameters, state: ImageState, backend: ImageBackend) -> Sequence[int]:
        return [
            state.widths[step] if backend.graphs.records and self._adapts(state, step) else 0
            for step in range(state.step, len(state.plan))
        ]

    def batch_rows(self, batch: Sequence[ImageState], backend: ImageBackend, group: BatchGroup, rows: int) -> int:
        """Only where steps are recorded, with graphs of their own. Elsewhere their time counts as any step's."""
        return sum(state.rows for state in batch if self._adapts(state, state.step)) if backend.graphs.records else 0

    def relaunches(self, batch: Sequence[ImageState], group: BatchGroup) -> bool:
        return any(self._adapts(state, state.step) for state in batch)

    def _adapts(self, state: ImageState, step: int) -> bool:
        """Whether the request's LoRAs take part in this step: not on a refiner, since they are the model's own."""
        lease = state.extensions.get(self.field)
        return lease is not None and bool(lease.uses) and not state.refines(step)

    def low_rank(self, lease: LoraLease) -> tuple[ScaledAdapter, ...]:
        return lease.uses

    def _lease_digests(self, lease: LoraLease) -> Mapping[str, str]:
        return {use.name: use.digest for use in lease.uses}


class AdaptedConditioner(Conditioner):
    """The conditioning of requests with LoRAs: one by one, each with its own encoders and projections."""

    def __init__(self, adapted: AdaptedModel, folder: LoraFolder, backend: ImageBackend) -> None:
        """`backend` computes what the denoiser reads of the text, and encodes prompts where LoRAs change no encoder."""
        model, parts = adapted.model, adapted.parts
        family = model.family
        text = family.text_encoder(model, None if {*parts} - {family.denoiser} else backend.phases[TEXT])
        super().__init__(model, Encoder(text), self._prepared)
        self._adapted = adapted
        self._folder = folder
        self._backend = backend
        self._uses: tuple[ScaledAdapter, ...] = ()  # of the request under way

    def __call__(self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0) -> list[Told]:
        """As `Conditioner`; also loads the requests' LoRAs. Raises `Invalid`, naming the LoRA."""
        made = []
        for request, state in zip(wanted, works, strict=True):
            lease = state.extensions[LoraExtension.field]
            with invalid(LoraExtension.field):
                lease.uses = self._uses = self._folder.uses(lease)
                with self._adapted.every(lease.uses):
                    made += self.conditions([request], bucket, [state.prompts], of=same(lease.uses))
        self._uses = ()
        return made

    def _prepared(self, hidden: torch.Tensor) -> torch.Tensor:
        keys: torch.Tensor
        if not self._backend.packs:  # the denoiser is a twin, and inside `every`
            keys = self._backend.phases[KEYS](hidden)
            return keys
        with self._backend.adapt([self._uses] * hidden.shape[0], apart=False):
            keys = self._backend.phases[KEYS](hidden)
        return keys
