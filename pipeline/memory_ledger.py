"""Accounts for the memory and the files that all image requests hold together, and makes their state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from contract import plan as plans
from contract import students
from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.runner import NotYet
from core.batching.slots import Budget, Slots
from pipeline.backends.backend import MAIN, ImageBackend
from pipeline.backends.phases import DECODES
from pipeline.extensions import refining
from pipeline.extensions.extension import Extension
from pipeline.extensions.refining import REFINER, Refinement
from pipeline.request_state import CheckedInputs, ImageState, NarrowedState
from pipeline.sampling import sigmas
from pipeline.text.encode import RequestPrompts


class MemoryLedger:
    """Accounts for the memory that all requests hold together."""

    def __init__(
        self,
        backends: Mapping[str, ImageBackend],
        max_requests: int,
        memory_bytes: int | None,
        extensions: Mapping[str, Extension[Any]],
    ) -> None:
        self.slots = Slots(max_requests)
        self.memory = Budget(2**63 if memory_bytes is None else memory_bytes)
        main = backends[MAIN]
        self._model = main.model
        self._denoiser = main.denoiser
        self._backends = backends
        self._row_bytes = cache(self._bytes_of_conditioning)
        self._extensions = extensions

    def check(self, wanted: ImageParameters, found: CheckedInputs) -> None:
        """Raise `Invalid` for a request that could never fit."""
        needed = self.size_bytes(wanted, found.prompts.chunks, found.extensions)
        if needed > self.memory.capacity:
            raise Invalid("size", f"it needs {needed} bytes of memory, and requests have {self.memory.capacity}")

    def take(self, wanted: ImageParameters, scheduler: str, found: CheckedInputs) -> ImageState | NotYet:
        """Reserve all that the request will hold; `NotYet`: nothing is reserved."""
        leases: dict[str, Any] = {}
        try:
            refusal = self._acquire(wanted, found, leases) or self._take_room(wanted, scheduler, found, leases)
        except BaseException:
            self._release(leases)
            raise
        if isinstance(refusal, NotYet):
            self._release(leases, keep=not refusal.resource)  # only room is missing: it is the next to be admitted
        return refusal

    def _acquire(self, wanted: ImageParameters, found: CheckedInputs, leases: dict[str, Any]) -> NotYet | None:
        """Reserve the request's files, as far as there is room. First of all: `NotYet` names what they wait for."""
        wait = self.slots.taken > 0  # alone nothing is delayed by what is read again
        for field, extension in self._extensions.items():
            if extension.requested(wanted):
                lease = extension.acquire(wanted, found.extensions.get(field), wait=wait)
                if lease is None:
                    return NotYet(field)
                leases[field] = lease
        return None

    def _take_room(
        self, wanted: ImageParameters, scheduler: str, found: CheckedInputs, leases: dict[str, Any]
    ) -> ImageState | NotYet:
        """Reserve memory and a slot; the request's state with its `leases`."""
        needed = self.size_bytes(wanted, found.prompts.chunks, found.extensions)
        if not self.memory.take(needed):
            return NotYet()
        slot = self.slots.take()
        if slot is None:
            self.memory.give(needed)
            return NotYet()
        try:
            return self._work(wanted, scheduler, found, slot, needed, leases)
        except BaseException:
            self.slots.give(slot)
            self.memory.give(needed)
            raise

    def narrow(self, work: ImageState, narrowed: NarrowedState) -> None:
        """Give back the second row, and the copy's, after the last guided step."""
        work.conditionings, work.features = {1: narrowed.conditioning}, narrowed.features
        work.size_bytes -= 2 * work.row_bytes
        self.memory.give(2 * work.row_bytes)

    def give(self, work: ImageState) -> None:
        self.slots.give(work.slot)
        self.memory.give(work.size_bytes)
        self._release(work.extensions)

    def _release(self, leases: Mapping[str, Any], *, keep: bool = False) -> None:
        for field, lease in leases.items():
            self._extensions[field].release(lease, keep=keep)

    def size_bytes(
        self, wanted: ImageParameters, chunks: int = 1, checked: Mapping[str, Any] = MappingProxyType({})
    ) -> int:
        """Its size at most: latents, what its extensions make, which were `checked`, and each row's conditioning, with
        so many chunks of text, and features.

        Where guidance ends before the last step, one row more: what is kept is copied while both rows are still there.
        """
        scale, channels = self._model.vae_scale, self._model.latent_channels
        held = 3 if wanted.edit is None else 6  # an edit also holds its image, the starting noise and a mask
        held += wanted.edit is not None and wanted.refiner is not None  # and the noise of the refiner's steps
        latents = held * 4 * channels * (wanted.height // scale) * (wanted.width // scale)
        rows = self._rows(wanted)
        narrows = rows > 1 and not wanted.guidance.guided(wanted.made)[-1] and wanted.refiner is None
        refined = 0 if wanted.refiner is None else rows * self._row_bytes(chunks, REFINER)
        beside = sum(
            extension.size_bytes(wanted, checked.get(field), rows, chunks)
            for field, extension in self._extensions.items()
            if extension.requested(wanted)
        )
        return latents + refined + beside + (rows + narrows) * self._bytes_of_row(wanted, chunks)

    def _bytes_of_row(self, wanted: ImageParameters, chunks: int) -> int:
        features = sum(math.prod(shape) for shape in self._features(wanted))
        return self._row_bytes(chunks) + self._model.dtype.itemsize * features

    def _bytes_of_conditioning(self, chunks: int, name: str = MAIN) -> int:
        """Of one row of the longest prompt of so many chunks, of this backend's model."""
        backend = self._backends[name]
        model, generator = backend.model, torch.Generator(self._model.device)
        row = model.family.example(model, backend.denoiser.text_width, 1, generator, chunks)
        return sum(tensor.nbytes for tensor in row.values())

    def _rows(self, wanted: ImageParameters) -> int:
        return self._model.family.rows(self._model, wanted)

    def _features(self, wanted: ImageParameters) -> list[tuple[int, ...]]:
        """The shape of one row of each map."""
        if wanted.deepcache is None or all(wanted.deepcache.plan(wanted.made)):
            return []
        scale = self._model.vae_scale
        return self._denoiser.feature_shapes(wanted.deepcache.depth, wanted.height // scale, wanted.width // scale)

    def _work(
        self, wanted: ImageParameters, scheduler: str, found: CheckedInputs, slot: list[int], size_bytes: int,
        leases: dict[str, Any],
    ) -> ImageState:  # fmt: skip
        prompts = found.prompts
        size = (wanted.width, wanted.height)
        table, at = self._table(wanted, scheduler)
        cached, rows = wanted.deepcache, self._rows(wanted)
        steps = plans.rows_and_depths(cached, wanted.guidance, table.steps, rows)
        widths = tuple(width for width, _ in steps)
        last = table.steps if at is None else at  # a refiner's are deep
        plan = tuple(deep or step >= last for step, (_, deep) in enumerate(steps))
        depth = "" if cached is None or all(plan) else cached.depth
        # A deterministic request runs in one mode to its end, whatever is compiled meanwhile.
        # Steps of such requests share forwards with all others where the same backend takes both.
        encoder = next((field for field in leases if field in self._backends), MAIN)
        name = encoder if self._backends[encoder] is not self._backends[MAIN] else MAIN
        decode = DECODES[wanted.vae]
        find = self._backends[name].deterministic_mode
        changed = any(self._extensions[field].steps for field in leases)
        beside = {"controlled": True} if changed else {}  # backends of other packages may not know it
        mode = find(size, depth, decode, prompts.chunks, **beside) if wanted.deterministic else ""
        features = [
            torch.empty(rows, *shape, dtype=self._model.dtype, device=self._model.device)
            for shape in self._features(wanted)
        ]
        generator = torch.Generator().manual_seed(wanted.seed)
        warnings = students.warnings(
            self._model.defaults, self._model.samplers, wanted.lora, wanted.made, wanted.guidance_scale
        )
        state = ImageState(
            slot, size_bytes, self._bytes_of_row(wanted, prompts.chunks), widths, name, mode, table,
            generator, plan, depth, prompts, scheduler, decode, features, warnings=warnings, extensions=leases,
            encoder=encoder,
        )  # fmt: skip
        if at is not None and found.refined is not None:
            state.refinement = self._refinement(wanted, at, decode, found.refined)
        return state

    def _table(self, wanted: ImageParameters, scheduler: str) -> tuple[sigmas.SamplerTable, int | None]:
        """The sampler's table, and the first step of the refiner, if there is one."""
        if wanted.refiner is not None:
            return refining.table(self._model, self._backends[REFINER].model, wanted, scheduler)
        size = (wanted.width, wanted.height)
        return self._model.sampler_table(scheduler, wanted.steps, size, wanted.skipped, wanted.schedule), None

    def _refinement(self, wanted: ImageParameters, at: int, decode: str, prompts: RequestPrompts) -> Refinement:
        find = self._backends[REFINER].deterministic_mode
        size = (wanted.width, wanted.height)
        return Refinement(at, find(size, "", decode, prompts.chunks) if wanted.deterministic else "", prompts)
