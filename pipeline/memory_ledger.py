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


class RequestCapacity:
    """What the requests of one or more models may hold together: places, and memory (None: no limit)."""

    def __init__(self, max_requests: int, memory_bytes: int | None = None) -> None:
        self.slots = Slots(max_requests)
        self.memory = Budget(2**63 if memory_bytes is None else memory_bytes)


class MemoryLedger:
    """Accounts for the memory that all requests of one model hold together."""

    def __init__(
        self, backends: Mapping[str, ImageBackend], capacity: RequestCapacity, extensions: Mapping[str, Extension[Any]]
    ) -> None:
        self.slots, self.memory = capacity.slots, capacity.memory
        self.requests = 0  # of this model
        main = backends[MAIN]
        self._model = main.model
        self._denoiser = main.denoiser
        self._backends = backends
        self._row_bytes = cache(self._bytes_of_conditioning)
        self._extensions = extensions

    def check(self, checked: CheckedInputs) -> None:
        """Raise `Invalid` for a request that could never fit."""
        needed = self._needed(checked)
        if needed > self.memory.capacity:
            raise Invalid("size", f"it needs {needed} bytes of memory, and requests have {self.memory.capacity}")

    def take(self, checked: CheckedInputs, scheduler: str) -> ImageState | NotYet:
        """Reserve all that the request will hold; `NotYet`: nothing is reserved."""
        leases: dict[str, Any] = {}
        try:
            taken = self._acquire(checked, leases) or self._take_room(checked, scheduler, leases)
        except BaseException:
            self._release(leases)
            raise
        if isinstance(taken, NotYet):
            self._release(leases, keep=not taken.resource)  # only room is missing: it is the next to be admitted
        else:
            self.requests += 1
        return taken

    def _acquire(self, checked: CheckedInputs, leases: dict[str, Any]) -> NotYet | None:
        """Reserve the request's files, as far as there is room. First of all: `NotYet` names what they wait for."""
        wait = self.slots.taken > 0  # alone nothing is delayed by what is read again
        for field, own in checked.extensions.items():
            lease = self._extensions[field].acquire(checked.parameters, own, wait=wait)
            if lease is None:
                return NotYet(field)
            leases[field] = lease
        return None

    def _take_room(self, checked: CheckedInputs, scheduler: str, leases: dict[str, Any]) -> ImageState | NotYet:
        """Reserve memory and a slot; returns the request's state with its `leases`."""
        needed = self._needed(checked)
        if not self.memory.take(needed):
            return NotYet()
        slot = self.slots.take()
        if slot is None:
            self.memory.give(needed)
            return NotYet()
        try:
            return self._state(checked, scheduler, slot, needed, leases)
        except BaseException:
            self.slots.give(slot)
            self.memory.give(needed)
            raise

    def narrow(self, state: ImageState, narrowed: NarrowedState) -> None:
        """Give back the second row, and the copy's, after the last guided step."""
        state.conditionings, state.features = {1: narrowed.conditioning}, narrowed.features
        state.size_bytes -= 2 * state.row_bytes
        self.memory.give(2 * state.row_bytes)

    def give(self, state: ImageState) -> None:
        self.requests -= 1
        self.slots.give(state.slot)
        self.memory.give(state.size_bytes)
        self._release(state.extensions)

    def _release(self, leases: Mapping[str, Any], *, keep: bool = False) -> None:
        for field, lease in leases.items():
            self._extensions[field].release(lease, keep=keep)

    def _needed(self, checked: CheckedInputs) -> int:
        return self.size_bytes(checked.parameters, checked.prompts.chunks, checked.extensions)

    def size_bytes(
        self, parameters: ImageParameters, chunks: int = 1, checked: Mapping[str, Any] = MappingProxyType({})
    ) -> int:
        """Return its size at most: latents, what its extensions make, which were `checked`, and each row's
        conditioning, with so many chunks of text, and features.

        Where guidance ends before the last step, one row more: what is kept is copied while both rows are still there.
        """
        scale, channels = self._model.vae_scale, self._model.latent_channels
        held = 3 if parameters.edit is None else 6  # an edit also holds its image, the starting noise and a mask
        held += parameters.edit is not None and parameters.refiner is not None  # and the noise of the refiner's steps
        latents = held * 4 * channels * (parameters.height // scale) * (parameters.width // scale)
        rows = self._rows(parameters)
        narrows = rows > 1 and not parameters.guidance.guided(parameters.made)[-1] and parameters.refiner is None
        refined = 0 if parameters.refiner is None else rows * self._row_bytes(chunks, REFINER)
        beside = sum(
            self._extensions[field].size_bytes(parameters, own, rows, chunks) for field, own in checked.items()
        )
        return latents + refined + beside + (rows + narrows) * self._bytes_of_row(parameters, chunks)

    def _bytes_of_row(self, parameters: ImageParameters, chunks: int) -> int:
        features = sum(math.prod(shape) for shape in self._features(parameters))
        return self._row_bytes(chunks) + self._model.dtype.itemsize * features

    def _bytes_of_conditioning(self, chunks: int, name: str = MAIN) -> int:
        """Return the size of one row of the longest prompt of so many chunks, of this backend's model."""
        backend = self._backends[name]
        model, generator = backend.model, torch.Generator(self._model.device)
        row = model.family.example(model, backend.denoiser.text_width, 1, generator, chunks)
        return sum(tensor.nbytes for tensor in row.values())

    def _rows(self, parameters: ImageParameters) -> int:
        return self._model.family.rows(self._model, parameters)

    def _features(self, parameters: ImageParameters) -> list[tuple[int, ...]]:
        """Return the shape of one row of each map."""
        if parameters.deepcache is None or all(parameters.deepcache.plan(parameters.made)):
            return []
        scale = self._model.vae_scale
        return self._denoiser.feature_shapes(
            parameters.deepcache.depth, parameters.height // scale, parameters.width // scale
        )

    def _state(
        self, checked: CheckedInputs, scheduler: str, slot: list[int], size_bytes: int, leases: dict[str, Any]
    ) -> ImageState:
        parameters, prompts = checked.parameters, checked.prompts
        size = (parameters.width, parameters.height)
        table, at = self._table(parameters, scheduler)
        cached, rows = parameters.deepcache, self._rows(parameters)
        steps = plans.rows_and_depths(cached, parameters.guidance, table.steps, rows)
        widths = tuple(width for width, _ in steps)
        last = table.steps if at is None else at  # a refiner's are deep
        plan = tuple(deep or step >= last for step, (_, deep) in enumerate(steps))
        depth = "" if cached is None or all(plan) else cached.depth
        # A deterministic request runs in one mode to its end, whatever is compiled meanwhile.
        # Steps of such requests share forwards with all others where the same backend takes both.
        encoder = next((field for field in leases if field in self._backends), MAIN)
        name = encoder if self._backends[encoder] is not self._backends[MAIN] else MAIN
        decode = DECODES[parameters.vae]
        find = self._backends[name].deterministic_mode
        changed = any(self._extensions[field].steps is not None for field in leases)
        beside = {"controlled": True} if changed else {}  # backends of other packages may not know it
        mode = find(size, depth, decode, prompts.chunks, **beside) if parameters.deterministic else ""
        features = [
            torch.empty(rows, *shape, dtype=self._model.dtype, device=self._model.device)
            for shape in self._features(parameters)
        ]
        generator = torch.Generator().manual_seed(parameters.seed)
        warnings = students.warnings(
            self._model.defaults, self._model.samplers, parameters.lora, parameters.made, parameters.guidance_scale
        )
        state = ImageState(
            slot, size_bytes, self._bytes_of_row(parameters, prompts.chunks), widths, name, mode, table,
            generator, plan, depth, prompts, scheduler, decode, features, warnings=warnings, extensions=leases,
            encoder=encoder,
        )  # fmt: skip
        if at is not None and checked.refined is not None:
            state.refinement = self._refinement(parameters, at, decode, checked.refined)
        return state

    def _table(self, parameters: ImageParameters, scheduler: str) -> tuple[sigmas.SamplerTable, int | None]:
        """Return the sampler's table, and the first step of the refiner, if there is one."""
        if parameters.refiner is not None:
            return refining.table(self._model, self._backends[REFINER].model, parameters, scheduler)
        size = (parameters.width, parameters.height)
        return self._model.sampler_table(
            scheduler, parameters.steps, size, parameters.skipped, parameters.schedule
        ), None

    def _refinement(self, parameters: ImageParameters, at: int, decode: str, prompts: RequestPrompts) -> Refinement:
        find = self._backends[REFINER].deterministic_mode
        size = (parameters.width, parameters.height)
        return Refinement(at, find(size, "", decode, prompts.chunks) if parameters.deterministic else "", prompts)
