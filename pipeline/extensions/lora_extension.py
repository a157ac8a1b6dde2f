"""LoRAs of requests: encodes their prompts with adapted encoders, and adds their branches to the denoiser's steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from contract.image import ImageParameters
from pipeline.backends.backend import BatchGroup, ImageBackend
from pipeline.backends.lora import LoraBackend
from pipeline.backends.phases import KEYS, TEXT
from pipeline.extensions.adapted import AdaptedModel
from pipeline.extensions.adapters import LoraFolder, LoraLease, ScaledAdapter, refused, same
from pipeline.extensions.extension import Extension, Steps, invalid
from pipeline.text.conditioning import ConditionedRequest, Conditioner
from pipeline.text.encode import Encoder

if TYPE_CHECKING:
    from core.config import Settings
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class LoraSteps(Steps):
    """The branches of LoRAs in the denoiser's steps."""

    def charged_rows(self, states: Sequence[ImageState], backend: ImageBackend, total: int, ahead: int = 0) -> int:
        """Count them only where steps are recorded, with graphs of their own: elsewhere their time is any step's."""
        if not backend.graphs.records:
            return 0
        return sum(state.widths[state.step + ahead] for state in states if self._adapts(state, ahead))

    def relaunches(self, states: Sequence[ImageState], group: BatchGroup) -> bool:
        return any(self._adapts(state) for state in states)

    def low_rank(self, lease: LoraLease) -> tuple[ScaledAdapter, ...]:
        return lease.uses

    def _adapts(self, state: ImageState, ahead: int = 0) -> bool:
        """Return whether the request's LoRAs take part in a step: not on a refiner, since they are the model's own."""
        lease = state.extensions.get(self.field)
        return lease is not None and bool(lease.uses) and not state.refines(state.step + ahead)


class LoraExtension(Extension[LoraFolder]):
    field, card_field = "lora", "loras"
    unconfigured = "no LoRA folder is configured (--lora-dir, or DIPTYCH_LORA_DIR)"
    waits = True

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: LoraFolder | None = None) -> None:
        """Steps run on `backend` if it packs LoRAs, else on a twin of `model`, which keeps its denoiser's weights."""
        super().__init__(model, backend, folder)
        self.steps = LoraSteps(self.field, 0.15)
        if folder is None:
            self.unconfigured = refused(model, packs=backend.packs) or self.unconfigured
            return
        twin = None if backend.packs else LoraBackend(model, backend.widths)
        adapted = AdaptedModel(backend.model, denoiser=False) if twin is None else twin.adapted
        self.backend = twin or backend
        self.conditioner = AdaptedConditioner(adapted, folder, self.backend)

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        if not settings.lora_dir or refused(model, packs=backend.packs) is not None:
            return cls(model, backend)
        pack = backend.pack_adapter if backend.packs else None
        return cls(model, backend, LoraFolder(Path(settings.lora_dir), model, settings.lora_mib * 2**20, pack))

    def _check_files(self, request: ImageParameters) -> None:
        self._files.check(request.lora)

    def acquire(self, request: ImageParameters, checked: None, *, wait: bool) -> LoraLease | None:
        return self._files.take(request.lora, wait=wait)

    def release(self, lease: LoraLease, *, keep: bool = False) -> None:
        super().release(lease, keep=keep)
        if lease.uses and self.backend is not None:
            self.backend.forget_adapters()

    def _used(self, lease: LoraLease) -> Iterable[ScaledAdapter]:
        return lease.uses


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

    def __call__(
        self, requests: Sequence[ImageParameters], states: Sequence[ImageState], bucket: int = 0
    ) -> list[ConditionedRequest]:
        """Encode as `Conditioner` does; also loads the requests' LoRAs. Raises `Invalid`, naming the LoRA."""
        conditioned = []
        for request, state in zip(requests, states, strict=True):
            lease = state.extensions[LoraExtension.field]
            with invalid(LoraExtension.field):
                lease.uses = self._uses = self._folder.uses(lease)
                with self._adapted.every(lease.uses):
                    conditioned += self.conditions([request], bucket, [state.prompts], of=same(lease.uses))
        self._uses = ()
        return conditioned

    def _prepared(self, hidden: torch.Tensor) -> torch.Tensor:
        keys: torch.Tensor
        if not self._backend.packs:  # the denoiser is a twin, and inside `every`
            keys = self._backend.phases[KEYS](hidden)
            return keys
        with self._backend.adapt([self._uses] * hidden.shape[0], apart=False):
            keys = self._backend.phases[KEYS](hidden)
        return keys
