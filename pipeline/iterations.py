"""Builds the iterations of image requests, phase by phase: source image, prompts, denoising steps, decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from contract.card import TINY
from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Outcome, Request
from core.graphs import ExecutableKey
from core.transfers import to_device
from pipeline.backends.backend import MAIN, BatchGroup, ExecutionPlan, ImageBackend, executables
from pipeline.backends.phases import DECODES, DEEP, ENCODE, IMAGE, STEPS, UPSCALE, VAE, VAE_TINY
from pipeline.backends.run_ahead import RunAhead
from pipeline.extensions import costs
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.extensions.extension import Extension, Finish, StepBatch
from pipeline.extensions.refining import REFINER
from pipeline.fingerprint import fingerprint
from pipeline.memory_ledger import MemoryLedger
from pipeline.pixels import edit, tiling, vae
from pipeline.pixels.picture import Picture
from pipeline.request_state import ImageState, NarrowedState
from pipeline.sampling import denoise
from pipeline.sampling.kept_features import gather, keep
from pipeline.text.conditioning import Conditioner, Told
from pipeline.text.encode import MarkedPrompt
from unet_opt.inputs import DenoiserInputs

if TYPE_CHECKING:
    from PIL.Image import Image

_ENCODE_BUCKET = 2  # of deterministic requests: the negative and the positive prompt


_PREVIEW_SIDE = 256  # pixels of a preview at most, along one side


class Iteration(NamedTuple):
    """`compute` runs on the lane; `commit` then updates the requests, on the engine's thread."""

    compute: Callable[[], Any]
    commit: Callable[[Any], Mapping[str, Outcome]]


class IterationBuilder:
    """Turns a batch of requests of one group into an `Iteration`, which may be retried until it is committed."""

    def __init__(
        self,
        backends: Mapping[str, ImageBackend],
        conditioners: Mapping[str, Conditioner],
        ledger: MemoryLedger,
        extensions: Mapping[str, Extension[Any]],
    ) -> None:
        """Backends and conditioners by the names that groups have."""
        self._ledger = ledger
        self._main = backends[MAIN]
        self._model = self._main.model
        self._backends = backends
        self._run_ahead = RunAhead(self._model.device)
        self._conditioners = conditioners
        family = self._model.family
        lengths = family.longest if self._main.fixed_shapes else family.padded
        self._gatherer = denoise.BatchGatherer(self._model.dtype, lengths)
        self._extensions = extensions
        self._refined: denoise.BatchGatherer | None = None
        if (refiner := backends.get(REFINER)) is not None:
            self._refined = denoise.BatchGatherer(refiner.model.dtype, refiner.model.family.padded)
        self._previews: vae.LinearPreview | None = None
        self.fixed_latent: tuple[torch.Tensor, str] | None = None  # starting noise of all images, and its digest
        self.phases: Mapping[str, Callable[[BatchGroup, list[Request]], Iteration]] = {
            IMAGE: self.encode_image, ENCODE: self.encode_prompts, UPSCALE: self.upscale_tile,
            **dict.fromkeys(STEPS, self.denoise_step), **dict.fromkeys(DECODES.values(), self.decode_latents),
        }  # fmt: skip

    def clear_cache(self) -> None:
        """Release what is kept of the last batch."""
        self._gatherer.clear_cache()
        for extension in self._extensions.values():
            extension.clear_cache()
        if self._refined is not None:
            self._refined.clear_cache()

    # -- phases ----------------------------------------------------------------------------------------------------

    def encode_image(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """The latents of an edit's source image; one request at a time."""
        (request,) = requests
        wanted, work = request.parameters, request.work

        def compute() -> edit.EncodedSource:
            with self._run_ahead.iteration(math.inf, self._observer(group, 1, False)):
                return edit.encode(self._model, wanted, work.generator)  # one by one: a retry does not repeat it

        def commit(made: edit.EncodedSource) -> dict[str, Outcome]:
            work.source = made
            request.phase = ENCODE
            return {request.id: Outcome(progress=(0, work.table.steps))}

        return Iteration(compute, commit)

    def encode_prompts(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """Conditioning and starting latents of each request."""
        wanted = [request.parameters for request in requests]
        works: list[ImageState] = [request.work for request in requests]

        def compute() -> tuple[list[Told], list[denoise.Conditioning | None]]:
            conditioner = self._conditioners[group.backend]
            rows, before = sum(work.most_rows for work in works), conditioner.encoder.misses
            plain = self._encodes_alone(group, wanted, works)
            observe = self._observer(group, rows, False)
            expected_s = self._backends[group.backend].costs.curve(group.phase, group.size, False)(rows)

            def observe_new(seconds: float) -> None:
                if new and plain:  # cached prompts say nothing about the cost of encoding
                    observe(seconds)

            with self._run_ahead.iteration(expected_s, observe_new):
                made = conditioner(wanted, works, _ENCODE_BUCKET if group.mode else 0)
                refined = self._refined_conditions(wanted, works, _ENCODE_BUCKET if group.mode else 0)
                for w, work, told in zip(wanted, works, made, strict=True):
                    for field in work.extensions:
                        self._extensions[field].prepare(w, work, told.hidden)
                    if work.x is None:  # a retry must not draw again
                        work.x, work.kept = self._prepare_latents(w, work)
                new = conditioner.encoder.misses > before
            return made, refined

        def commit(made: tuple[list[Told], list[denoise.Conditioning | None]]) -> dict[str, Outcome]:
            outcomes = {}
            for request, work, told, refined in zip(requests, works, *made, strict=True):
                assert work.x is not None
                first = work.take_conditioning(told.conditioning, refined)
                work.trajectory = denoise.DenoisingState(
                    work.table,
                    0,
                    work.x,
                    torch.zeros_like(work.x),
                    first,
                    work.kept,
                    None if work.source is None else work.source.masked,
                )
                work.warnings += told.warnings
                request.phase = work.phase(0)
                outcomes[request.id] = Outcome(progress=(0, work.table.steps))
            return outcomes

        return Iteration(compute, commit)

    def denoise_step(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """One denoiser forward for all, then one step of each request's sampler."""
        works: list[ImageState] = [request.work for request in requests]
        riders = [work.trajectory for work in works]
        assert all(rider is not None for rider in riders)
        present: list[denoise.DenoisingState] = [rider for rider in riders if rider is not None]
        backend, gatherer = self._backends[group.backend], self._gatherer_of(group)
        owners = self._owners(group, works)

        def compute() -> tuple[list[denoise.DenoisingState], list[NarrowedState | None], list[Any]]:
            way = backend.plan(group, sum(rider.conditioning.rows for rider in present), live=True)
            added = costs.added(self._extensions.values(), backend, group, way, works)
            observe = added.observe or self._step_observer(group, way, works)
            iteration = self._run_ahead.iteration(way.seconds + added.seconds, observe)
            with torch.inference_mode(), backend.adapt(owners, apart=bool(group.mode)), iteration:
                inputs = gatherer.inputs(present, way.rows)
                output = self._forward(group, backend, way, works, inputs)
                noise = [self._step_noise(work, rider) for work, rider in zip(works, present, strict=True)]
                moved = denoise.advance(present, output, noise)
                moved = [work.begin(state) for work, state in zip(works, moved, strict=True)]
                narrowed = [NarrowedState.of(work) if work.narrows(work.step + 1) else None for work in works]
            with torch.inference_mode():
                previews = [self._preview(r.parameters, t) for r, t in zip(requests, moved, strict=True)]
            return moved, narrowed, previews

        def commit(
            made: tuple[list[denoise.DenoisingState], list[NarrowedState | None], list[Any]],
        ) -> dict[str, Outcome]:
            outcomes = {}
            for request, work, moved, narrowed, preview in zip(requests, works, *made, strict=True):
                if narrowed is not None:
                    self._ledger.narrow(work, narrowed)
                work.trajectory = work.with_conditioning(moved)
                request.phase = work.phase(moved.step)
                outcomes[request.id] = Outcome(progress=(moved.step, moved.table.steps), preview=preview)
            return outcomes

        return Iteration(compute, commit)

    def decode_latents(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """The finished pictures. One that is not finite fails alone."""
        latents = [request.work.trajectory.x for request in requests]

        def compute() -> tuple[torch.Tensor, list[bool]]:
            way = self._backends[group.backend].plan(group, len(latents), live=True)
            iteration = self._run_ahead.iteration(math.inf, self._observer(group, way.rows, way.compiled))
            with torch.inference_mode(), iteration:
                padded = torch.cat(latents + latents[:1] * (way.rows - len(latents)))
                pixels = vae.to_host(way.function(padded)[: len(latents)])
                finite: list[bool] = torch.isfinite(padded[: len(latents)]).flatten(1).all(1).tolist()
            return pixels, finite

        def commit(made: tuple[torch.Tensor, list[bool]]) -> dict[str, Outcome]:
            outcomes = {}
            for request, pixels, finite in zip(requests, *made, strict=True):
                work: ImageState = request.work
                if finite:
                    outcomes[request.id] = self._decoded(request, edit.finish(request.parameters, pixels))
                else:
                    nan = f"the {self._model.precision} UNet of {self._model.name} returned NaN"
                    field = next((field for field in work.extensions if self._extensions[field].steps), None)
                    error = FloatingPointError(nan) if field is None else Invalid(field, f"with it {nan}")
                    outcomes[request.id] = Outcome(error=error)
            return outcomes

        return Iteration(compute, commit)

    def upscale_tile(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """The next tile of an enlarged image; one request at a time."""
        (request,) = requests
        finish: Finish = request.work.finish

        def compute() -> Image | None:
            with self._run_ahead.iteration(math.inf, self._observer(group, 1, False)):
                finish.compute()
            return finish.image() if finish.left == 1 else None

        def commit(made: Image | None) -> dict[str, Outcome]:
            finish.done += 1
            result = None if made is None else self._picture(request, made)
            return {request.id: Outcome(result=result, finished=made is not None)}

        return Iteration(compute, commit)

    def _forward(
        self, group: BatchGroup, backend: ImageBackend, way: ExecutionPlan, works: list[ImageState],
        inputs: DenoiserInputs,
    ) -> torch.Tensor:  # fmt: skip
        """The denoiser's output [B, C, h, w] for all rows; features are kept. What control networks and image prompts
        add goes into phases that are launched directly.
        """
        output: torch.Tensor
        if group.phase == DEEP:
            added = self._evaluate(group, backend, works, inputs, way.rows)
            output, *features = backend.phases[DEEP](inputs, **added) if added else way.function(inputs)
            keep(backend.denoiser, features, works)
            for extension in self._extensions.values():
                extension.keep(works, added)
        else:
            added, features = self._evaluate_shallow(works, way.rows), gather(works, way.rows)
            direct = partial(backend.phases[group.phase], **added)
            (output,) = (direct if added else way.function)(inputs, features)
        return output

    def _evaluate(
        self, group: BatchGroup, backend: ImageBackend, works: list[ImageState], inputs: DenoiserInputs,
        rows: int,
    ) -> dict[str, Any]:  # fmt: skip
        """What extensions add to a deep step of these requests, over so many rows; empty if nothing acts in it. Options
        are lists, and those of one name are joined.
        """
        fixed = backend.widths.deterministic_rows if group.mode else None
        batch = StepBatch(group, works, inputs, rows, fixed)
        added: dict[str, list[Any]] = {}
        for extension in self._extensions.values():
            for name, values in extension.evaluate(batch).items():
                added[name] = [*added.get(name, ()), *values]
        return added

    def _evaluate_shallow(self, works: list[ImageState], rows: int) -> dict[str, Any]:
        added: dict[str, Any] = {}
        for extension in self._extensions.values():
            added |= extension.evaluate_shallow(works, rows)
        return added

    # -- parts -----------------------------------------------------------------------------------------------------

    def _prepare_latents(
        self, wanted: ImageParameters, work: ImageState
    ) -> tuple[torch.Tensor, denoise.InpaintMask | None]:
        """Starting noise, for an edit added to its image, and the kept region.

        Drawn on the CPU in fp32: a seed gives the same noise on every device and precision.
        """
        scale = self._model.vae_scale
        shape = (1, self._model.latent_channels, wanted.height // scale, wanted.width // scale)
        noise = torch.randn(shape, generator=work.generator) if self.fixed_latent is None else self.fixed_latent[0]
        if noise.shape != shape:
            raise ValueError(f"the fixed latent is {list(noise.shape)}, this size needs {list(shape)}")
        if work.source is None:
            return to_device(noise * work.table.init_noise_sigma, self._model.device), None
        return edit.begin(wanted, work.table, work.source, noise.to(self._model.device), work.generator)

    def _owners(self, group: BatchGroup, works: Sequence[ImageState]) -> list[tuple[ScaledAdapter, ...]]:
        """The low-rank branches of each row; none on a refiner, since they are the model's own."""
        if group.backend == REFINER:
            return [()] * sum(work.rows for work in works)
        return [
            tuple(use for field, lease in work.extensions.items() for use in self._extensions[field].low_rank(lease))
            for work in works for _ in range(work.rows)
        ]  # fmt: skip

    def _gatherer_of(self, group: BatchGroup) -> denoise.BatchGatherer:
        if group.backend != REFINER:
            return self._gatherer
        assert self._refined is not None
        return self._refined

    def _refined_conditions(
        self, wanted: list[ImageParameters], works: list[ImageState], bucket: int
    ) -> list[denoise.Conditioning | None]:
        """What the refiner reads of each request's prompts; None of those without one."""
        own = [(one, work.refinement.prompts) for one, work in zip(wanted, works, strict=True) if work.refinement]
        asked, read = [one for one, _ in own], [prompts for _, prompts in own]
        found = iter(self._conditioners[REFINER].conditions(asked, bucket, read) if own else ())
        return [next(found).conditioning if work.refinement else None for work in works]

    def _encodes_alone(
        self, group: BatchGroup, wanted: list[ImageParameters], works: list[ImageState]
    ) -> bool:  # fmt: skip
        """Whether the iteration encodes plain prompts and nothing else: no pictures, and none of a refiner or LoRAs."""
        adapted = group.backend != MAIN and self._backends[group.backend] is self._main
        more = any(one.added or one.refiner is not None for one in wanted)
        marked = any(isinstance(prompt, MarkedPrompt) for work in works for prompt in work.prompts.prompts)
        return not (adapted or more or marked)

    def _observer(self, group: BatchGroup, rows: int, compiled: bool) -> Callable[[float], None]:
        """Updates the costs of the group's backend with the seconds of an iteration."""
        key = ExecutableKey(group.phase, rows, group.size)
        return partial(self._backends[group.backend].costs.observe, key, compiled)

    def _step_observer(
        self, group: BatchGroup, way: ExecutionPlan, works: list[ImageState]
    ) -> Callable[[float], None]:  # fmt: skip
        """The same of a step to which nothing is added."""
        if way.compiled and any(extension.relaunches(works, group) for extension in self._extensions.values()):
            return lambda took_s: None  # other launches, in place of what was planned
        return self._observer(group, way.rows, way.compiled)

    def _step_noise(self, work: ImageState, rider: denoise.DenoisingState) -> torch.Tensor | None:
        """The noise that the sampler adds after this step, if any."""
        if not rider.table.noisy[rider.step]:
            return None
        if work.noise is None or work.noise[0] != rider.step:
            work.noise = (rider.step, to_device(torch.randn(rider.x.shape, generator=work.generator), rider.x.device))
        return work.noise[1]

    def _preview(self, wanted: ImageParameters, moved: denoise.DenoisingState) -> Any:
        if not wanted.preview_every or moved.step % wanted.preview_every or not moved.left:
            return None
        if (decode := self._main.phases.get(VAE_TINY)) is not None:
            return vae.reduced(decode(moved.x0), _PREVIEW_SIDE)
        if self._previews is None:
            self._previews = vae.LinearPreview(self._model, self._main.phases[VAE])
        return self._previews(moved.x0)

    def _decoded(self, request: Request, pixels: torch.Tensor) -> Outcome:
        """The end of a request with these pixels [H, W, 3], or the beginning of what remains."""
        from PIL.Image import fromarray

        work: ImageState = request.work
        done = (work.table.steps, work.table.steps)
        field = next((field for field in work.extensions if self._extensions[field].finishes), None)
        if field is None:
            return Outcome(progress=done, result=self._picture(request, fromarray(pixels.numpy())), finished=True)
        work.finish = self._extensions[field].finish(request.parameters, work.extensions[field], pixels)
        request.phase = UPSCALE
        return Outcome(progress=done)

    def _picture(self, request: Request, image: Image) -> Picture:
        work: ImageState = request.work
        backend = self._backends[work.backend]
        bucket = backend.widths.deterministic_rows if work.mode and not backend.batch_invariant else None
        told = executables(work.mode, (backend, self._main))
        printed = fingerprint(self._model, executable=told, bucket=bucket, kernels=self._main.kernels)
        for extension in self._extensions.values():
            if digests := extension.digests(work):
                printed[extension.printed_as or extension.field] = dict(digests)
        if request.parameters.vae == TINY and self._model.tiny_vae is not None:
            printed["vae-tiny"] = self._model.tiny_vae.digest
        if side := tiling.tile_side(self._model, (request.parameters.width, request.parameters.height)):
            printed["tiles"] = side
        if self.fixed_latent is not None:
            printed["latent"] = self.fixed_latent[1]
        if work.refinement is not None:
            second = self._backends[REFINER]
            told = executables(work.refinement.mode, (second,))
            printed["refiner"] = {
                "model": second.model.name, "weights": second.model.digest, "precision": second.model.precision,
                "executable": told,
            }  # fmt: skip
        return Picture(image, request.parameters, printed, tuple(work.warnings), work.sampler)
