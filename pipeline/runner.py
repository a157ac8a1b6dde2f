"""The image modality's Runner for the engine. The scheduler decides order and width."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters, check
from core.batching.request import Outcome, Request
from core.batching.runner import Lane, LaneTicket
from core.cuda_graphs import Recorder
from core.failures import translate_device_errors
from pipeline import denoise, edit, sigmas, vae
from pipeline.adapted import AdaptedModel
from pipeline.adapters import AdapterCache, check_loras, named, refused
from pipeline.conditioning import AdaptedConditioner, Conditioner, Told
from pipeline.encode import Encoder
from pipeline.execution import BatchGroup, ImageExecution
from pipeline.fingerprint import KernelIdentity, code_digest, fingerprint
from pipeline.load import ImageModel
from pipeline.phases import DEEP, ENCODE, IMAGE, KERNELS, STEPS, VAE, VAE_ROWS
from pipeline.picture import Picture
from pipeline.recording import BackgroundRecorder
from pipeline.request_state import ImageState, MemoryLedger, gather, keep
from pipeline.sizes import sizes

_ENCODE_ROWS = 32
_ENCODE_BUCKET = 2  # of deterministic requests: the negative and the positive prompt


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
        kernels (core.quant.kernels.cpu) to use instead of torch's; `fused`, `frugal` and `recorder` as for
        `ImageExecution`.
        `adapters` are the LoRAs that requests may use; they need an unquantized model.
        """
        if deterministic_rows < 2 or max_rows < 2:
            raise ValueError("max_rows and deterministic_rows must be at least 2: guidance brings two rows")
        self.model = model
        self.patience_s = patience_s
        self.sizes = sizes(model.native, model.multiple)
        self.schedulers = sigmas.SCHEDULERS
        self.default_scheduler = sigmas.default_name(model.scheduler_config)
        self._lane = lane or Lane("image")
        self._own_lane = lane is None
        self._max_rows = max_rows
        keys = denoise.PackedKeys(model.unet)
        self.adapters = None if refused(model) else adapters
        self._adapted = None if self.adapters is None else AdaptedModel(model)
        self._gatherer = denoise.BatchGatherer(model.dtype)
        self._preview: vae.Preview | None = None
        self._latent: tuple[torch.Tensor, str] | None = None
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
        encoder = Encoder(model, compute=self.execution.embed)
        self._conditioners = {False: Conditioner(model, encoder, lambda hidden: self.execution.keys(hidden, keys))}
        if self._adapted is not None and self.adapters is not None:
            self._conditioners[True] = AdaptedConditioner(self._adapted, self.adapters)
        self.holdings = MemoryLedger(model, self.execution, keys.width, max_requests, memory_bytes, self.adapters)

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        wanted = request.parameters
        if not isinstance(wanted, ImageParameters):
            raise Invalid("parameters", f"must be ImageParameters, not {type(wanted).__name__}")
        check(wanted, ImageOffer(self.sizes, self.schedulers))
        try:
            name = wanted.scheduler or self.default_scheduler
            sigmas.table(self.model.scheduler_config, name, wanted.steps, wanted.skipped)
        except ValueError as error:
            raise Invalid("scheduler", str(error)) from error
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
            self._adapted.forget()
        if not self.held():
            self._gatherer.forget()

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

    # -- one iteration ---------------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        group = self.group(requests[0])
        run = {IMAGE: self._look_at, ENCODE: self._encode, VAE: self._finish}.get(group.phase, self._step)
        compute, commit = run(group, list(requests))

        def iteration() -> Any:
            made = translate_device_errors(compute)
            if self.execution.pending:
                self.recording.start()
            return made

        return self._lane.start(iteration, commit)

    def _look_at(self, group: BatchGroup, requests: list[Request]) -> _Iteration:
        (request,) = requests
        wanted, work = request.parameters, request.work

        def compute() -> torch.Tensor:
            started = time.perf_counter()
            made = edit.latents(self.model, wanted, work.generator)  # one by one, so that a retry does not repeat it
            self.execution.observe(group, 1, False, time.perf_counter() - started)
            return made

        def commit(made: torch.Tensor) -> dict[str, Outcome]:
            work.image = made
            request.phase = ENCODE
            return {request.id: Outcome(progress=(0, work.table.steps))}

        return _Iteration(compute, commit)

    def _encode(self, group: BatchGroup, requests: list[Request]) -> _Iteration:
        wanted = [request.parameters for request in requests]
        works: list[ImageState] = [request.work for request in requests]

        def compute() -> list[Told]:
            conditioner = self._conditioners[group.adapted]
            started, before = time.perf_counter(), conditioner.encoder.misses
            made = named(lambda: conditioner(wanted, works, _ENCODE_BUCKET if group.mode else 0))
            for w, work in zip(wanted, works, strict=True):
                if work.x is None:  # a retry must not draw again
                    work.x, work.kept = self._start(w, work)
            self.execution.synchronize()
            weighted = any(w.prompt_weighting for w in wanted)
            # Cached prompts say nothing about the cost of encoding.
            if conditioner.encoder.misses > before and not weighted:
                rows = sum(work.rows for work in works)
                self.execution.observe(group, rows, False, time.perf_counter() - started)
            return made

        def commit(made: list[Told]) -> dict[str, Outcome]:
            outcomes = {}
            for request, work, (conditioning, warnings) in zip(requests, works, made, strict=True):
                scale = request.parameters.guidance_scale
                assert work.x is not None
                work.trajectory = denoise.Trajectory(
                    work.table, 0, work.x, torch.zeros_like(work.x), scale, conditioning, work.kept
                )
                work.warnings += warnings
                request.phase = work.phase(0)
                outcomes[request.id] = Outcome(progress=(0, work.table.steps))
            return outcomes

        return _Iteration(compute, commit)

    def _step(self, group: BatchGroup, requests: list[Request]) -> _Iteration:
        works: list[ImageState] = [request.work for request in requests]
        riders = [work.trajectory for work in works]
        assert all(rider is not None for rider in riders)
        present: list[denoise.Trajectory] = [rider for rider in riders if rider is not None]

        def compute() -> tuple[list[denoise.Trajectory], list[Any]]:
            started = time.perf_counter()
            way = self.execution.choose(group, sum(rider.conditioning.rows for rider in present))
            with torch.inference_mode(), self._own_rows(group, works):
                inputs = self._gatherer.inputs(present, way.rows)
                if group.phase == DEEP:
                    output, *features = inputs.run(way.function)
                    keep(features, works)
                else:
                    (output,) = inputs.run(way.function, gather(works, way.rows))
                noise = [self._noise(work, rider) for work, rider in zip(works, present, strict=True)]
                moved = denoise.advance(present, output, noise)
                previews = [self._look(r.parameters, t) for r, t in zip(requests, moved, strict=True)]
            self.execution.synchronize()
            self.execution.observe(group, way.rows, way.compiled, time.perf_counter() - started)
            return moved, previews

        def commit(made: tuple[list[denoise.Trajectory], list[Any]]) -> dict[str, Outcome]:
            outcomes = {}
            for request, work, moved, preview in zip(requests, works, *made, strict=True):
                work.trajectory = moved
                request.phase = work.phase(moved.step)
                outcomes[request.id] = Outcome(progress=(moved.step, moved.table.steps), preview=preview)
            return outcomes

        return _Iteration(compute, commit)

    def _finish(self, group: BatchGroup, requests: list[Request]) -> _Iteration:
        latents = [request.work.trajectory.x for request in requests]

        def compute() -> tuple[torch.Tensor, list[bool]]:
            started = time.perf_counter()
            way = self.execution.choose(group, len(latents))
            with torch.inference_mode():
                padded = torch.cat(latents + latents[:1] * (way.rows - len(latents)))
                pixels = vae.to_host(way.function(padded)[: len(latents)])
                finite: list[bool] = torch.isfinite(padded[: len(latents)]).flatten(1).all(1).tolist()
            self.execution.observe(group, way.rows, way.compiled, time.perf_counter() - started)
            return pixels, finite

        def commit(made: tuple[torch.Tensor, list[bool]]) -> dict[str, Outcome]:
            from PIL import Image

            pixels, finite = made
            outcomes = {}
            for index, request in enumerate(requests):
                work: ImageState = request.work
                if not finite[index]:
                    nan = f"the {self.model.precision} UNet of {self.model.name} returned NaN"
                    error = Invalid("lora", f"with it {nan}") if work.uses else FloatingPointError(nan)
                    outcomes[request.id] = Outcome(error=error)
                    continue
                bucket = None if work.mode in ("", KERNELS) else self.execution.deterministic_rows
                told = self.execution.metadata(work.mode, adapted=bool(work.uses))
                printed = fingerprint(self.model, executable=told, bucket=bucket, kernels=self.kernels)
                if work.uses:
                    printed["lora"] = {use.name: use.digest for use in work.uses}
                if self._latent is not None:
                    printed["latent"] = self._latent[1]
                image = Image.fromarray(edit.finish(request.parameters, pixels[index]).numpy())
                picture = Picture(image, request.parameters, printed, tuple(work.warnings))
                steps = work.table.steps
                outcomes[request.id] = Outcome(progress=(steps, steps), result=picture, finished=True)
            return outcomes

        return _Iteration(compute, commit)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _own_rows(self, group: BatchGroup, works: Sequence[ImageState]) -> AbstractContextManager[None]:
        """Context: each row of a forward gets its request's LoRAs."""
        if not group.adapted:
            return nullcontext()
        assert self._adapted is not None
        return self._adapted.rows([work.uses for work in works for _ in range(work.rows)], apart=bool(group.mode))

    def _start(self, wanted: ImageParameters, work: ImageState) -> tuple[torch.Tensor, denoise.InpaintMask | None]:
        """Starting noise, for an edit added to its image, and the kept region.

        Drawn on the CPU in fp32: a seed gives the same noise on every device and precision.
        """
        scale = self.model.vae_scale
        shape = (1, self.model.unet.config.in_channels, wanted.height // scale, wanted.width // scale)
        noise = torch.randn(shape, generator=work.generator) if self._latent is None else self._latent[0]
        if noise.shape != shape:
            raise ValueError(f"the fixed latent is {list(noise.shape)}, this size needs {list(shape)}")
        if work.image is None:
            return (noise * work.table.init_noise_sigma).to(self.model.device), None
        return edit.begin(wanted, work.table, work.image, noise.to(self.model.device), work.generator)

    def fix_noise(self, latent: torch.Tensor) -> None:
        """Start every image from this latent, fp32 [1, C, h, w] of unit variance, whatever its seed.

        MLPerf's text-to-image test uses one for all prompts. The latent is named in fingerprints; noise that samplers
        add later still comes from seeds. Not to be called while the engine has requests.
        """
        self._latent = (latent, hashlib.sha256(latent.contiguous().numpy().tobytes()).hexdigest()[:12])

    def _noise(self, work: ImageState, rider: denoise.Trajectory) -> torch.Tensor | None:
        if not rider.table.noisy[rider.step]:
            return None
        if work.noise is None or work.noise[0] != rider.step:
            work.noise = (rider.step, torch.randn(rider.x.shape, generator=work.generator).to(rider.x.device))
        return work.noise[1]

    def _look(self, wanted: ImageParameters, moved: denoise.Trajectory) -> Any:
        if not wanted.preview_every or moved.step % wanted.preview_every or not moved.left:
            return None
        if self._preview is None:
            self._preview = vae.Preview(self.model, self.execution.decode)
        return self._preview(moved.x0)

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


class _Iteration(NamedTuple):
    compute: Callable[[], Any]
    commit: Callable[[Any], Mapping[str, Outcome]]
