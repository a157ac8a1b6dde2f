"""The image modality's Runner for the engine. The scheduler decides order and width."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters, check
from core.batching.request import Request
from core.batching.runner import Lane, LaneTicket
from core.cuda_graphs import Recorder
from core.failures import translate_device_errors
from pipeline import sigmas
from pipeline.adapted import AdaptedModel
from pipeline.adapters import AdapterCache, check_loras, refused
from pipeline.conditioning import AdaptedConditioner, Conditioner
from pipeline.encode import Encoder
from pipeline.execution import BatchGroup, ImageExecution
from pipeline.families.family import ImageModel
from pipeline.fingerprint import KernelIdentity, code_digest
from pipeline.iterations import IterationBuilder
from pipeline.phases import ENCODE, IMAGE, STEPS, VAE, VAE_ROWS
from pipeline.recording import BackgroundRecorder
from pipeline.request_state import ImageState, MemoryLedger
from pipeline.sizes import sizes

_ENCODE_ROWS = 32


class ImageRunner:
    """Generates images with one model on one lane."""

    modality = "image"

    def __init__(
        self,
        model: ImageModel,
        *,
        lane: Lane | None = None,
        max_requests: int = 32,
        max_rows: int = 32,
        deterministic_rows: int = 8,
        buckets: Sequence[int] = (2, 4, 8, 16, 32),
        compiled: bool = False,
        cache: Path | None = None,
        patience_s: float = 20.0,
        kernels: ctypes.CDLL | None = None,
        fused: bool = False,
        memory_bytes: int | None = None,
        frugal: bool = False,
        adapters: AdapterCache | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`max_rows` limits one UNet forward; `max_requests` limits admitted requests. `cache` stores compiled code.

        `memory_bytes` limits what requests hold together, mainly features (default: no limit). `kernels` are the CPU
        kernels (core.kernels.cpu) to use instead of torch's; `fused`, `frugal` and `recorder` as for
        `ImageExecution`. `adapters` are the LoRAs that requests may use; they need an unquantized model.
        """
        if deterministic_rows < 2 or max_rows < 2:
            raise ValueError("max_rows and deterministic_rows must be at least 2: guidance brings two rows")
        self.model = model
        self.patience_s = patience_s
        self.sizes = sizes(model.native, model.multiple)
        self.schedulers = model.family.samplers
        self.default_scheduler = sigmas.default_name(model.scheduler_config, self.schedulers)
        self._lane = lane or Lane("image")
        self._own_lane = lane is None
        self._max_rows = max_rows
        keys = model.family.prepare(model)
        self.adapters = None if refused(model) else adapters
        self._adapted = None if self.adapters is None else AdaptedModel(model)
        code_digest()  # of the sources as they are now; they may change before an image is done
        self.kernels = KernelIdentity.of(model, kernels, fused=fused)
        self.execution = ImageExecution(
            model,
            keys.width,
            buckets=[*(bucket for bucket in buckets if bucket <= max_rows), *([max_rows] if fused else [])],
            deterministic_rows=deterministic_rows,
            compiled=compiled,
            cache=cache,
            kernels=kernels,
            fused=fused,
            frugal=frugal,
            adapted=None if self._adapted is None else self._adapted.model,
            recorder=recorder,
        )
        self.recording = BackgroundRecorder(self._lane, self.execution.record_next, lambda: self.held() > 0)
        encoder = Encoder(model.family.text_encoder(model, self.execution.embed))
        conditioners = {False: Conditioner(model, encoder, lambda hidden: self.execution.keys(hidden, keys))}
        if self._adapted is not None and self.adapters is not None:
            conditioners[True] = AdaptedConditioner(self._adapted, self.adapters)
        self._builder = IterationBuilder(model, self.execution, conditioners, self._adapted, self.kernels)
        self.holdings = MemoryLedger(model, self.execution, keys.width, max_requests, memory_bytes, self.adapters)

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        wanted = request.parameters
        if not isinstance(wanted, ImageParameters):
            raise Invalid("parameters", f"must be ImageParameters, not {type(wanted).__name__}")
        check(wanted, ImageOffer(self.sizes, self.schedulers))
        try:
            name = wanted.scheduler or self.default_scheduler
            self.model.sampler_table(name, wanted.steps, (wanted.width, wanted.height), wanted.skipped)
        except ValueError as error:
            raise Invalid("scheduler", str(error)) from error
        if wanted.prompt_weighting and not self.model.family.weighting:
            raise Invalid("prompt_weighting", "is not supported by this model")
        if wanted.lora:
            check_loras(self.adapters, self.model, wanted.lora)
        self.holdings.check(wanted)

    def admit(self, request: Request) -> bool:
        name = request.parameters.scheduler or self.default_scheduler
        work = self.holdings.take(request.parameters, name)
        if work is None:
            return False
        request.work = work
        request.phase = ENCODE if request.parameters.edit is None else IMAGE
        return True

    def release(self, request: Request) -> None:
        work, request.work = request.work, None
        self.holdings.give(work)
        if self._adapted is not None and work.uses:
            self._adapted.clear_cache()
        if not self.held():
            self._builder.clear_cache()

    def held(self) -> int:
        return self.holdings.slots.taken

    def group(self, request: Request) -> BatchGroup:
        return self._group(request, request.phase)

    def _group(self, request: Request, phase: str) -> BatchGroup:
        wanted, mode = request.parameters, request.work.mode
        adapted = bool(wanted.lora) and phase in (ENCODE, *STEPS)
        if phase == ENCODE:
            return BatchGroup(ENCODE, (0, 0), mode, adapted)
        # On our own kernels bits do not depend on the batch: deterministic requests share it with all others.
        free = self.execution.programs and not adapted
        return BatchGroup(phase, (wanted.width, wanted.height), "" if free else mode, adapted)

    def rows(self, request: Request) -> int:
        return 1 if request.phase in (VAE, IMAGE) else request.work.rows

    def iterations(self, request: Request) -> int:
        return request.work.trajectory.left if request.phase in STEPS else 1

    def left_s(self, request: Request, rows: int) -> float:
        if request.phase not in STEPS:
            return self.cost(self.group(request), rows)
        work: ImageState = request.work
        left = Counter(work.phase(step) for step in range(work.step, len(work.plan)))
        return sum(count * self.cost(self._group(request, phase), rows) for phase, count in left.items())

    def next_group(self, request: Request) -> BatchGroup | None:
        work: ImageState = request.work
        if request.phase == VAE:
            return None
        if request.phase == IMAGE:
            return self._group(request, ENCODE)
        return self._group(request, work.phase(work.step + (request.phase in STEPS)))

    def limit(self, group: Hashable) -> int:
        assert isinstance(group, BatchGroup)
        phase, mode = group.phase, group.mode
        if phase in STEPS:
            return self.execution.deterministic_rows if mode else self._max_rows
        if phase == VAE:
            return 1 if mode else VAE_ROWS
        if phase == IMAGE:
            return 1  # alone: on torch the last bits of a row depend on the batch size
        return _ENCODE_ROWS

    def lane(self, group: Hashable) -> str:
        return "device"

    def cost(self, group: Hashable, rows: int) -> float:
        assert isinstance(group, BatchGroup)
        return self.execution.cheapest(group, rows).seconds

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        group = self.group(requests[0])
        compute, commit = self._builder.build(group, list(requests))

        def iteration() -> Any:
            made = translate_device_errors(compute)
            if self.execution.pending:
                self.recording.start()
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
        """`ImageExecution.prepare` at the native size, on the lane's thread; remaining graphs are recorded in the
        background.
        """
        self._lane.call(lambda: self.execution.prepare(measure_s=measure_s))
        if self.execution.pending:
            self.recording.start()

    def close(self) -> None:
        """Stop compiling and recording, and the lane if it is the runner's own."""
        self.recording.close()
        self.execution.close()
        if self._own_lane:
            self._lane.close()
