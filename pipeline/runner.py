"""The image modality's Runner for the engine. The scheduler decides order and width."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane, LaneTicket, NotYet
from core.failures import translate_device_errors
from pipeline.backends.backend import LORA, MAIN, BatchGroup, ImageBackend
from pipeline.backends.lora import LoraBackend, LoraPrompts
from pipeline.backends.phases import DECODES, ENCODE, IMAGE, KEYS, STEPS, TEXT, UPSCALE, VAE_ROWS, fixed_rows
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import control_costs, refining
from pipeline.extensions.adapters import check_loras, refused
from pipeline.extensions.control import ControlFolder, check_controls
from pipeline.extensions.image_prompts import ImagePromptFolder, check_image_prompts
from pipeline.extensions.refining import REFINER
from pipeline.extensions.upscaling import Upscaler, UpscalerFolder
from pipeline.fingerprint import code_digest
from pipeline.iterations import IterationBuilder
from pipeline.recording import BackgroundRecorder
from pipeline.request_state import CheckedInputs, ImageState, MemoryLedger
from pipeline.sampling import samplers
from pipeline.sizes import size_range
from pipeline.text.conditioning import AdaptedConditioner, Conditioner
from pipeline.text.encode import Encoder
from pipeline.text.textual_inversion import EmbeddingFolder

_ENCODE_ROWS = 32


class ImageRunner:
    """Generates images with one model on one lane."""

    modality = "image"

    def __init__(
        self,
        backend: ImageBackend,
        loras: LoraBackend | LoraPrompts | None = None,
        embeddings: EmbeddingFolder | None = None,
        upscalers: UpscalerFolder | None = None,
        controls: ControlFolder | None = None,
        image_prompts: ImagePromptFolder | None = None,
        *,
        refiner: ImageBackend | None = None,
        lane: Lane | None = None,
        max_requests: int = 32,
        patience_s: float = 20.0,
        memory_bytes: int | None = None,
    ) -> None:
        """`loras` is the backend for requests with LoRAs, or, where `backend` packs these, what encodes their prompts;
        without it they are rejected. `embeddings` are the textual inversions that prompts may name, `upscalers` the
        networks that may enlarge images, `controls` the control networks and `image_prompts` the IP-Adapters that
        requests may use, `refiner` the backend of a second model that may take last steps. `max_requests` limits
        admitted requests, and `memory_bytes` what they hold together, mainly features (default: no limit).
        """
        self.backend = backend
        self.model = model = backend.model
        self.adapters = None if loras is None else loras.adapters
        self.embeddings = embeddings
        self.upscalers = upscalers
        self.controls = controls
        self.image_prompts = image_prompts
        self.refiner = refiner
        self.patience_s = patience_s
        self.sizes = model.sizes
        self.schedulers = model.samplers
        self.default_scheduler = samplers.default_name(model.scheduler_config, self.schedulers)
        self._lane = lane or Lane("image")
        self._own_lane = lane is None
        self._backends: dict[str, ImageBackend] = {MAIN: backend}
        encoder = Encoder(model.family.text_encoder(model, backend.phases[TEXT]))
        self._conditioner = Conditioner(model, encoder, backend.phases[KEYS], embeddings)
        self._conditioners = conditioners = {MAIN: self._conditioner}
        if refiner is not None:
            self._backends[REFINER] = refiner
            second = Encoder(refiner.model.family.text_encoder(refiner.model, refiner.phases[TEXT]))
            conditioners[REFINER] = Conditioner(refiner.model, second, refiner.phases[KEYS], embeddings)
        if loras is not None:
            beside = loras if isinstance(loras, LoraBackend) else backend
            self._backends[LORA] = beside
            conditioners[LORA] = AdaptedConditioner(loras.adapted, loras.adapters, beside)
        code_digest()  # of the sources as they are now; they may change before an image is done
        self.recording = BackgroundRecorder(self._lane, self._record_next, lambda: self.held() > 0)
        self.holdings = MemoryLedger(self._backends, max_requests, memory_bytes, self.adapters, controls, image_prompts)
        self._builder = IterationBuilder(self._backends, conditioners, self.holdings, controls, image_prompts)

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
        if wanted.lora:
            check_loras(self.adapters, wanted.lora, refused(self.model, packs=self.backend.packs))
        if wanted.control:
            check_controls(self.controls, self.model, wanted.control, (wanted.width, wanted.height))
        if wanted.image_prompts:
            check_image_prompts(self.image_prompts, self.model, wanted.image_prompts)
        self.holdings.check(wanted, found)
        request.checked = found

    def _read(self, wanted: ImageParameters) -> CheckedInputs:
        """What admission needs of its prompts and its upscaler. Raises `Invalid`."""
        refined = None if wanted.refiner is None else self._conditioners[REFINER].read(wanted)
        return CheckedInputs(self._conditioner.read(wanted), refined, self._upscaler(wanted))

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

    def _upscaler(self, wanted: ImageParameters) -> Upscaler | None:
        """The network that enlarges it, if it asks for one. Raises `Invalid`."""
        if wanted.upscale is None:
            return None
        if self.upscalers is None:
            raise Invalid("upscale", "there is no folder of upscalers (DIPTYCH_UPSCALERS_DIR)")
        try:
            return self.upscalers.checked(wanted.upscale, wanted.width, wanted.height)
        except ModelError as error:
            raise Invalid("upscale", str(error)) from error

    def resources(self, request: Request) -> frozenset[str]:
        """The fields whose files the request needs: each kind has a cache with a budget of its own."""
        wanted: ImageParameters = request.parameters
        named = {"lora": wanted.lora, "control": wanted.control, "image_prompts": wanted.image_prompts}
        return frozenset(field for field, value in named.items() if value)

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
        if work.uses:
            self._backends[LORA].forget_adapters()
        if not self.held():
            self._builder.clear_cache()

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
            return BatchGroup(ENCODE, (0, 0), work.mode, LORA if wanted.lora else MAIN)
        # Where bits do not depend on the batch, deterministic requests share it with all others, and so do texts of
        # different lengths.
        invariant = self._backends[name].batch_invariant
        mode = "" if invariant else (refined or work).mode
        chunks = 1 if invariant or phase not in STEPS else (refined or work).prompts.chunks
        images = work.image_tokens if mode and phase in STEPS and refined is None else ()
        return BatchGroup(phase, (wanted.width, wanted.height), mode, name, chunks, images)

    def rows(self, request: Request) -> int:
        if request.phase in (*DECODES.values(), IMAGE, UPSCALE):
            return 1
        work: ImageState = request.work
        return work.most_rows if request.phase == ENCODE else work.rows

    def iterations(self, request: Request) -> int:
        if request.phase == UPSCALE:
            return int(request.work.upscaling.left)
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
        return steps_s + control_costs.left(backend, group.size, request.parameters, work)

    def next_group(self, request: Request) -> BatchGroup | None:
        work: ImageState = request.work
        if request.phase in DECODES.values():
            return self._group(request, UPSCALE) if work.upscaler is not None else None
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
        group = self.group(requests[0])
        compute, commit = self._builder.build(group, list(requests))

        def iteration() -> Any:
            made = translate_device_errors(compute)
            self._record()
            return made

        return self._lane.start(iteration, commit)

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
        return any(folder is not None for folder in (self.adapters, self.controls, self.image_prompts))

    def held_files(self) -> set[str]:
        """The files of requests that are in memory, each as its field and its name."""
        folders = {"lora": self.adapters, "control": self.controls, "image_prompts": self.image_prompts}
        return {f"{field} {name}" for field, own in folders.items() if own is not None for name in own.held}

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
