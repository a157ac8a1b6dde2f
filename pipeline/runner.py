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
from pipeline.extensions.extension import Extension
from pipeline.extensions.refining import REFINER
from pipeline.extensions.registry import KINDS
from pipeline.fingerprint import code_digest
from pipeline.iterations import IterationBuilder
from pipeline.memory_ledger import MemoryLedger
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
    ) -> None:
        """`extensions` are what requests may bring along: requests for another known kind are refused. `refiner` is the
        backend of a second model that may take last steps. `max_requests` limits admitted requests, and `memory_bytes`
        what they hold together, mainly features (default: no limit).
        """
        self.backend = backend
        self.model = model = backend.model
        given = {extension.field: extension for extension in extensions}
        known = {kind.field: given.get(kind.field) or kind(model, backend) for kind in KINDS}
        self.extensions = known | given
        self.refiner = refiner
        self.patience_s = patience_s
        self.sizes = model.sizes
        self.schedulers = model.samplers
        self.default_scheduler = samplers.default_name(model.scheduler_config, self.schedulers)
        self._lane = lane or Lane("image")
        self._own_lane = lane is None
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
        self.recording = BackgroundRecorder(self._lane, self._record_next, lambda: self.held() > 0)
        self.holdings = MemoryLedger(self._backends, max_requests, memory_bytes, self.extensions)
        self._builder = IterationBuilder(self._backends, conditioners, self.holdings, self.extensions)

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        wanted = request.parameters
        if not isinstance(wanted, ImageParameters):
            raise Invalid("parameters", f"must be ImageParameters, not {type(wanted).__name__}")
        offer = ImageOffer(
            self.sizes, self.schedulers, vaes=self.model.vaes, inpaint_only=self.model.inpaints,
            size_range=self.model.size_range,
            refiners=None if self.refiner is None else (self.refiner.model.name,),
        )  # fmt: skip
        edit = wanted.edit
        masked, soft = edit is not None and edit.mask is not None, edit is not None and edit.soft_mask
        offer.check_source(edited=edit is not None, masked=masked, soft=soft)
        wanted.check(offer)
        self._check_schedule(wanted)
        found = self._read(wanted)
        self.holdings.check(wanted, found)
        request.checked = found

    def _read(self, wanted: ImageParameters) -> CheckedInputs:
        """What admission needs of its prompts and its extensions. Raises `Invalid`."""
        prompts = self._conditioner.read(wanted)
        refined = None if wanted.refiner is None else self._conditioners[REFINER].read(wanted)
        return CheckedInputs(prompts, refined, {one.field: one.check(wanted) for one in self._requested(wanted)})

    def _requested(self, wanted: ImageParameters) -> list[Extension[Any]]:
        return [extension for extension in self.extensions.values() if extension.requested(wanted)]

    def _named_in(self, texts: Mapping[str, str]) -> tuple[TextualInversion, ...]:
        return tuple(chain.from_iterable(extension.named_in(texts) for extension in self.extensions.values()))

    def _check_schedule(self, wanted: ImageParameters) -> None:
        """Raise `Invalid` for steps that the sampler, or the refiner, does not make."""
        if wanted.refiner is not None and self.refiner is None:
            raise Invalid("refiner", "there is none (DIPTYCH_REFINER)")
        try:
            name = wanted.scheduler or self.default_scheduler
            size = (wanted.width, wanted.height)
            self.model.sampler_table(name, wanted.steps, size, wanted.skipped, wanted.schedule)
            if wanted.refiner is not None and self.refiner is not None:
                refining.table(self.model, self.refiner.model, wanted, name)
        except Invalid:
            raise
        except ValueError as error:
            own = (name for name in ("timesteps", "sigmas", "schedule_type") if getattr(wanted, name) is not None)
            raise Invalid(next(own, "scheduler"), str(error)) from error

    def resources(self, request: Request) -> frozenset[str]:
        """The fields whose files the request needs: each kind has a cache with a budget of its own."""
        return frozenset(extension.field for extension in self._requested(request.parameters) if extension.waits)

    def admit(self, request: Request) -> NotYet | None:
        name = request.parameters.scheduler or self.default_scheduler
        work = self.holdings.take(request.parameters, name, request.checked or self._read(request.parameters))
        if isinstance(work, NotYet):
            return work
        request.work = work
        request.phase = ENCODE if request.parameters.edit is None else IMAGE
        return None

    def release(self, request: Request) -> None:
        work, request.work = request.work, None
        self.holdings.give(work)
        if not self.held():
            self._builder.clear_cache()
        self._record()  # what its last iteration missed

    def held(self) -> int:
        return self.holdings.slots.taken

    def group(self, request: Request) -> BatchGroup:
        return self._group(request, request.phase)

    def _group(self, request: Request, phase: str, step: int | None = None) -> BatchGroup:
        """Of this phase; of the step that comes next, unless it is another `step`."""
        wanted, work = request.parameters, request.work
        step = work.step if step is None else step
        name = work.backend_at(step) if phase in STEPS else MAIN
        refined = work.refinement if name == REFINER else None
        if phase == ENCODE:
            return BatchGroup(ENCODE, (0, 0), work.mode, work.encoder)
        # Where bits do not depend on the batch, deterministic requests share it with all others, and so do texts of
        # different lengths.
        invariant = self._backends[name].batch_invariant
        mode = "" if invariant else (refined or work).mode
        chunks = 1 if invariant or phase not in STEPS else (refined or work).prompts.chunks
        alike = mode and phase in STEPS and refined is None
        own = ((field, self.extensions[field].group(lease)) for field, lease in work.extensions.items() if alike)
        shared = tuple((field, value) for field, value in own if value)
        return BatchGroup(phase, (wanted.width, wanted.height), mode, name, chunks, shared)

    def rows(self, request: Request) -> int:
        if request.phase in (*DECODES.values(), IMAGE, UPSCALE):
            return 1
        work: ImageState = request.work
        return work.most_rows if request.phase == ENCODE else work.rows

    def iterations(self, request: Request) -> int:
        if request.phase == UPSCALE:
            return int(request.work.finish.left)
        return request.work.trajectory.left if request.phase in STEPS else 1

    def left_s(self, request: Request, rows: int) -> float:
        if request.phase not in STEPS:
            return self.iterations(request) * self.cost(self.group(request), rows)
        work: ImageState = request.work
        others = rows - work.rows
        left = Counter(
            (self._group(request, work.phase(step), step), work.widths[step])
            for step in range(work.step, len(work.plan))
        )
        steps_s = sum(n * self.cost(group, others + own) for (group, own), n in left.items())
        group = self.group(request)
        backend = self._backends[group.backend]
        return steps_s + costs.left(self.extensions.values(), backend, group.size, request.parameters, work)

    def next_group(self, request: Request) -> BatchGroup | None:
        work: ImageState = request.work
        if request.phase in DECODES.values():
            finishes = any(self.extensions[field].finishes for field in work.extensions)
            return self._group(request, UPSCALE) if finishes else None
        if request.phase == UPSCALE:
            return self.group(request) if self.iterations(request) > 1 else None
        if request.phase == IMAGE:
            return self._group(request, ENCODE)
        step = work.step + (request.phase in STEPS)
        return self._group(request, work.phase(step), step)

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
        """Of a step at this size: beyond the usual sizes fewer, so that a forward's memory does not grow with them."""
        usual = size_range(self.model.native, 1).most_pixels
        return max(2, min(rows, rows * usual // (size[0] * size[1])))

    def lane(self, group: Hashable) -> str:
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
        """Whether requests may name files that are read for them."""
        return any(extension.waits and extension.folder is not None for extension in self.extensions.values())

    def held_files(self) -> set[str]:
        """The files of requests that are in memory, each as its field and its name."""
        return {f"{field} {name}" for field, extension in self.extensions.items() for name in extension.held()}

    def _record(self) -> None:
        """Begin to record what is missing, if anything is."""
        if any(backend.graphs.pending for backend in self._own):
            self.recording.start()

    def _record_next(self) -> bool:
        return any(backend.graphs.record_next() for backend in self._own)

    @property
    def _own(self) -> tuple[ImageBackend, ...]:
        """The backends of both models."""
        return (self.backend,) if self.refiner is None else (self.backend, self.refiner)

    def close(self) -> None:
        """Stop compiling and recording, and the lane if it is the runner's own."""
        self.recording.close()
        for backend in {*self._backends.values()}:
            backend.close()
        if self._own_lane:
            self._lane.close()
