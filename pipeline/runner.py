"""The image modality's Runner for the engine. The scheduler decides order and width."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane, LaneTicket, NotYet
from pipeline.backends.backend import MAIN, BatchGroup, ImageBackend
from pipeline.backends.phases import DECODES, ENCODE, IMAGE, KEYS, STEPS, TEXT, UPSCALE, VAE_ROWS, fixed_rows
from pipeline.extensions import costs, refining
from pipeline.extensions.asset_folder import AssetFolder
from pipeline.extensions.extension import Extension
from pipeline.extensions.refining import REFINER
from pipeline.extensions.registry import KINDS
from pipeline.fingerprint import code_digest
from pipeline.iterations import IterationBuilder
from pipeline.memory_ledger import MemoryLedger, RequestCapacity
from pipeline.recording import BackgroundRecorder
from pipeline.request_state import CheckedInputs, ImageState
from pipeline.sampling import samplers
from pipeline.sizes import size_range
from pipeline.text.conditioning import Conditioner
from pipeline.text.encode import Encoder
from pipeline.text.textual_inversion import TextualInversion

_ENCODE_ROWS = 32


class ImageRunner:
    """Generates images with one model on one lane."""

    modality = "image"
    shallow_steps = True  # requests may have a DeepCache schedule

    def __init__(
        self,
        backend: ImageBackend,
        extensions: Iterable[Extension[Any]] = (),
        *,
        refiner: ImageBackend | None = None,
        lane: Lane | None = None,
        max_requests: int = 32,
        patience_s: float = 20.0,
        memory_bytes: int | None = None,
        capacity: RequestCapacity | None = None,
    ) -> None:
        """`extensions` are what requests may bring along: requests for another known kind are refused. `refiner` is the
        backend of a second model that may take last steps. `max_requests` limits admitted requests, and `memory_bytes`
        what they hold together, mainly features (default: no limit); `capacity` is both, shared with other runners.
        """
        self.backend = backend
        self.model = model = backend.model
        given = {extension.field: extension for extension in extensions}
        known = {kind.field: given.get(kind.field) or kind(model, backend) for kind in KINDS}
        self.extensions = known | given
        self.steps = {field: kind.steps for field, kind in self.extensions.items() if kind.steps is not None}
        self.refiner = refiner
        self.patience_s = patience_s
        self.sizes = model.sizes
        self.schedulers = model.samplers
        self.default_scheduler = samplers.default_name(model.scheduler_config, self.schedulers)
        self._lane = lane or Lane("image")
        self._own_lane = lane is None
        self._own = (backend,) if refiner is None else (backend, refiner)
        self._backends: dict[str, ImageBackend] = {MAIN: backend}
        encoder = Encoder(model.family.text_encoder(model, backend.phases[TEXT]))
        self._conditioner = Conditioner(model, encoder, backend.phases[KEYS], self._named_in)
        self._conditioners = conditioners = {MAIN: self._conditioner}
        if refiner is not None:
            self._backends[REFINER] = refiner
            second = Encoder(refiner.model.family.text_encoder(refiner.model, refiner.phases[TEXT]))
            conditioners[REFINER] = Conditioner(refiner.model, second, refiner.phases[KEYS], self._named_in)
        for field, extension in self.extensions.items():
            if extension.backend is not None and extension.conditioner is not None:
                self._backends[field], conditioners[field] = extension.backend, extension.conditioner
        code_digest()  # of the sources as they are now; they may change before an image is done
        self.capacity = capacity or RequestCapacity(max_requests, memory_bytes)
        self.holdings = MemoryLedger(self._backends, self.capacity, self.extensions)
        self.recording = backend.recording or BackgroundRecorder(
            self._lane, self._record_next, lambda: self.capacity.slots.taken > 0
        )
        self._builder = IterationBuilder(self._backends, conditioners, self.holdings, self.extensions)

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        parameters = request.parameters
        if not isinstance(parameters, ImageParameters):
            raise Invalid("parameters", f"must be ImageParameters, not {type(parameters).__name__}")
        offer = ImageOffer(
            self.sizes, self.schedulers, vaes=self.model.vaes, inpaint_only=self.model.inpaints,
            size_range=self.model.size_range,
            refiners=None if self.refiner is None else (self.refiner.model.name,), options={},
        )  # fmt: skip
        edit = parameters.edit
        masked, soft = edit is not None and edit.mask is not None, edit is not None and edit.soft_mask
        offer.check_source(edited=edit is not None, masked=masked, soft=soft)
        parameters.check(offer)
        self._check_schedule(parameters)
        request.checked = checked = self._read(parameters)
        self.holdings.check(checked)

    def _read(self, parameters: ImageParameters) -> CheckedInputs:
        """Read what admission needs of its prompts and its extensions. Raises `Invalid`."""
        prompts = self._conditioner.read(parameters)
        refined = None if parameters.refiner is None else self._conditioners[REFINER].read(parameters)
        extensions = {kind.field: kind.check(parameters) for kind in self._requested(parameters)}
        return CheckedInputs(parameters, prompts, refined, extensions)

    def _requested(self, parameters: ImageParameters) -> list[Extension[Any]]:
        return [kind for field, kind in self.extensions.items() if kind.is_requested(parameters)]

    def _named_in(self, texts: Mapping[str, str]) -> tuple[TextualInversion, ...]:
        folders = (kind.vocabulary for kind in self.extensions.values() if kind.vocabulary is not None)
        return tuple(chain.from_iterable(folder.named_in(texts) for folder in folders))

    def _check_schedule(self, parameters: ImageParameters) -> None:
        """Raise `Invalid` for steps that the sampler, or the refiner, does not take."""
        if parameters.refiner is not None and self.refiner is None:
            raise Invalid("refiner", "there is none (DIPTYCH_REFINER)")
        try:
            name = parameters.scheduler or self.default_scheduler
            size = (parameters.width, parameters.height)
            self.model.sampler_table(name, parameters.steps, size, parameters.skipped, parameters.schedule)
            if parameters.refiner is not None and self.refiner is not None:
                refining.table(self.model, self.refiner.model, parameters, name)
        except Invalid:
            raise
        except ValueError as error:
            own = (name for name in ("timesteps", "sigmas", "schedule_type") if getattr(parameters, name) is not None)
            raise Invalid(next(own, "scheduler"), str(error)) from error

    def resources(self, request: Request) -> frozenset[str]:
        """The fields whose files the request needs: each kind has a cache with a budget of its own."""
        return frozenset(kind.field for kind in self._requested(request.parameters) if kind.waits)

    def admit(self, request: Request) -> NotYet | None:
        name = request.parameters.scheduler or self.default_scheduler
        state = self.holdings.take(request.checked or self._read(request.parameters), name)
        if isinstance(state, NotYet):
            return state
        request.work = state
        request.phase = ENCODE if request.parameters.edit is None else IMAGE
        return None

    def release(self, request: Request) -> None:
        state, request.work = request.work, None
        self.holdings.give(state)
        if not self.held():
            self._builder.clear_cache()
        self._record()  # what its last iteration missed

    def held(self) -> int:
        return self.holdings.requests

    def group(self, request: Request) -> BatchGroup:
        return self._group(request, request.phase)

    def _group(self, request: Request, phase: str, step: int | None = None) -> BatchGroup:
        """Return the group of this phase: of the step that comes next, unless it is another `step`."""
        parameters, state = request.parameters, request.work
        step = state.step if step is None else step
        name = state.backend_at(step) if phase in STEPS else MAIN
        refined = state.refinement if name == REFINER else None
        if phase == ENCODE:
            return BatchGroup(ENCODE, (0, 0), state.mode, state.encoder)
        # Where bits do not depend on the batch, deterministic requests share it with all others, and so do texts of
        # different lengths.
        invariant = self._backends[name].batch_invariant
        mode = "" if invariant else (refined or state).mode
        chunks = 1 if invariant or phase not in STEPS else (refined or state).prompts.chunks
        kinds = self.steps.items() if mode and phase in STEPS and refined is None else ()
        own = ((field, kind.group(state.extensions[field])) for field, kind in kinds if field in state.extensions)
        shared = tuple((field, value) for field, value in own if value)
        return BatchGroup(phase, (parameters.width, parameters.height), mode, name, chunks, shared)

    def rows(self, request: Request) -> int:
        if request.phase in (*DECODES.values(), IMAGE, UPSCALE):
            return 1
        state: ImageState = request.work
        return state.most_rows if request.phase == ENCODE else state.rows

    def iterations(self, request: Request) -> int:
        if request.phase == UPSCALE:
            return int(request.work.finish.left)
        return request.work.trajectory.left if request.phase in STEPS else 1

    def left_s(self, request: Request, rows: int) -> float:
        if request.phase not in STEPS:
            return self.iterations(request) * self.cost(self.group(request), rows)
        state: ImageState = request.work
        others = rows - state.rows
        left = Counter(
            (self._group(request, state.phase(step), step), state.widths[step])
            for step in range(state.step, len(state.plan))
        )
        steps_s = sum(n * self.cost(group, others + own) for (group, own), n in left.items())
        group = self.group(request)
        backend = self._backends[group.backend]
        return steps_s + costs.left(self.steps.values(), backend, group.size, state)

    def next_group(self, request: Request) -> BatchGroup | None:
        state: ImageState = request.work
        if request.phase in DECODES.values():
            finishes = any(self.extensions[field].finishes for field in state.extensions)
            return self._group(request, UPSCALE) if finishes else None
        if request.phase == UPSCALE:
            return self.group(request) if self.iterations(request) > 1 else None
        if request.phase == IMAGE:
            return self._group(request, ENCODE)
        step = state.step + (request.phase in STEPS)
        return self._group(request, state.phase(step), step)

    def limit(self, group: Hashable) -> int:
        assert isinstance(group, BatchGroup)
        phase, widths = group.phase, self._backends[group.backend].widths
        if phase == ENCODE:
            return _ENCODE_ROWS
        if phase in (IMAGE, UPSCALE):
            return 1  # alone: on torch the last bits of a row depend on the batch size
        if group.mode:
            return fixed_rows(phase, widths.deterministic_rows)
        return VAE_ROWS if phase in DECODES.values() else self._most_rows(group.size, widths.max_rows)

    def _most_rows(self, size: tuple[int, int], rows: int) -> int:
        """Return a step's rows: beyond the usual sizes fewer, so that a forward's memory does not grow with them."""
        usual = size_range(self.model.native, 1).most_pixels
        return max(2, min(rows, rows * usual // (size[0] * size[1])))

    def lane_of(self, group: Hashable) -> str:
        return "device"

    def cost(self, group: Hashable, rows: int) -> float:
        assert isinstance(group, BatchGroup)
        backend = self._backends[group.backend]
        if group.phase in (ENCODE, IMAGE, UPSCALE):  # several parts, without an executable of their own
            return backend.costs.curve(group.phase, group.size, False)(rows)
        return backend.plan(group, rows).seconds

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        self._record()  # what the iterations before missed
        group = self.group(requests[0])
        return self._lane.start(*self._builder.phases[group.phase](group, list(requests)))

    # -- called by whoever built it ---------------------------------------------------------------------------------

    def fix_noise(self, latent: torch.Tensor) -> None:
        """Start every image from this latent, fp32 [1, C, h, w] of unit variance, whatever its seed.

        MLPerf's text-to-image test uses one for all prompts. The latent is named in fingerprints; noise that samplers
        add later still comes from seeds. Not to be called while the engine has requests.
        """
        digest = hashlib.sha256(latent.contiguous().numpy().tobytes()).hexdigest()[:12]
        self._builder.fixed_latent = (latent, digest)

    def prepare(self, *, measure_s: float = 0.0) -> None:
        """`ImageBackend.prepare` at the native size, on the lane's thread; remaining graphs are recorded in the
        background.
        """
        for backend in self._own:
            self._lane.call(partial(backend.prepare, measure_s=measure_s))
        self._record()

    @property
    def reads_files(self) -> bool:
        """Return whether requests may name files that are read for them."""
        return bool(self._folders)

    def held_files(self) -> set[str]:
        """Return the files of requests that are in memory, each as its field and its name."""
        return {f"{field} {name}" for field, folder in self._folders.items() for name in folder.held}

    @property
    def _folders(self) -> dict[str, AssetFolder[Any]]:
        """The folders of files that requests wait for."""
        kinds = self.extensions.items()
        return {field: kind.folder for field, kind in kinds if kind.waits and kind.folder is not None}

    def clear_caches(self) -> None:
        """Release what is kept for requests to come, while there are none."""
        self._builder.clear_cache()
        for conditioner in self._conditioners.values():
            conditioner.encoder.clear_cache()
        for folder in self._folders.values():
            folder.cache.evict([*folder.held])

    def _record(self) -> None:
        """Begin to record what is missing, if anything is."""
        if any(backend.graphs.pending for backend in self._own):
            self.recording.start()

    def _record_next(self) -> bool:
        return any(backend.graphs.record_next() for backend in self._own)

    def close(self) -> None:
        """Stop compiling and recording, and the lane if it is the runner's own."""
        if self.backend.recording is None:
            self.recording.close()
        for backend in {*self._backends.values()}:
            backend.close()
        if self._own_lane:
            self._lane.close()
