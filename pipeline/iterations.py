"""Builds the iterations of image requests, phase by phase: source image, prompts, denoising steps, decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from contract.card import TINY
from contract.image import ImageParameters
from core.batching.request import Outcome, Request
from core.failures import NotFinite, OutOfMemory, device_error
from core.graphs import ExecutableKey
from core.transfers import to_device
from pipeline.backends.backend import MAIN, BatchGroup, ExecutionPlan, ImageBackend, executables
from pipeline.backends.phases import DECODES, DEEP, ENCODE, IMAGE, STEPS, UPSCALE, VAE, VAE_TINY, decoder_in_fp32
from pipeline.backends.run_ahead import RunAhead
from pipeline.extensions import costs
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.extensions.extension import Extension, Finish, StepBatch
from pipeline.extensions.refining import REFINER
from pipeline.fingerprint import fingerprint
from pipeline.finite import NetworkEnd, all_finite, denoiser_label, dtype_name, first_errors, network_name
from pipeline.memory_ledger import MemoryLedger
from pipeline.pixels import edit, tiling, vae
from pipeline.pixels.picture import Picture
from pipeline.request_state import ImageState, NarrowedState
from pipeline.sampling import denoise, samplers
from pipeline.sampling.kept_features import gather, keep
from pipeline.text.conditioning import ConditionedRequest, Conditioner
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


class _Encoded(NamedTuple):
    """What was encoded for one request."""

    own: ConditionedRequest
    refined: denoise.Conditioning | None
    ends: list[NetworkEnd]


class _Decoded(NamedTuple):
    """A picture's pixels [H, W, 3] on the CPU; `error` if they are of what is not finite."""

    pixels: torch.Tensor
    error: Exception | None = None
    warning: str = ""


class _Step(NamedTuple):
    """The result of a step for one request."""

    moved: denoise.DenoisingState
    narrowed: NarrowedState | None
    preview: Any


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
        self._gatherers = {MAIN: denoise.BatchGatherer(self._model.dtype, lengths)}
        self._extensions = extensions
        self._steps = [kind.steps for kind in extensions.values() if kind.steps is not None]
        if (refiner := backends.get(REFINER)) is not None:
            self._gatherers[REFINER] = denoise.BatchGatherer(refiner.model.dtype, refiner.model.family.padded)
        self._previews: vae.LinearPreview | None = None
        self.fixed_latent: tuple[torch.Tensor, str] | None = None  # starting noise of all images, and its digest
        self.phases: Mapping[str, Callable[[BatchGroup, list[Request]], Iteration]] = {
            IMAGE: self.encode_image, ENCODE: self.encode_prompts, UPSCALE: self.upscale_tile,
            **dict.fromkeys(STEPS, self.denoise_step), **dict.fromkeys(DECODES.values(), self.decode_latents),
        }  # fmt: skip

    def clear_cache(self) -> None:
        """Release what is kept of the last batch."""
        for gatherer in self._gatherers.values():
            gatherer.clear_cache()
        for kind in self._steps:
            kind.clear_cache()

    # -- phases ----------------------------------------------------------------------------------------------------

    def encode_image(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """Encode the latents of an edit's source image; one request at a time."""
        (request,) = requests
        parameters, state = request.parameters, request.work

        def compute() -> tuple[edit.EncodedSource, NetworkEnd]:
            with self._run_ahead.iteration(math.inf, self._observer(group, 1, False)):
                # One by one: a retry does not repeat it.
                source = edit.encode(self._model, parameters, state.generator)
                values = [latents for latents in source if latents is not None]
                encoder = network_name("VAE's encoder", self._model, self._model.vae.dtype)
                return source, NetworkEnd(encoder, all_finite(values))

        def commit(encoded: tuple[edit.EncodedSource, NetworkEnd]) -> dict[str, Outcome]:
            state.source, end = encoded
            state.ends.append(end)
            request.phase = ENCODE
            return {request.id: Outcome(progress=(0, state.table.steps))}

        return Iteration(compute, commit)

    def encode_prompts(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """Compute the conditioning and starting latents of each request."""
        states: list[ImageState] = [request.work for request in requests]

        def compute() -> list[_Encoded]:
            conditioner, bucket = self._conditioners[group.backend], _ENCODE_BUCKET if group.mode else 0
            rows, before = sum(state.most_rows for state in states), conditioner.encoder.misses
            plain = self._encodes_alone(group, requests)
            observe = self._observer(group, rows, False)
            expected_s = self._backends[group.backend].costs.curve(group.phase, group.size, False)(rows)

            def observe_new(seconds: float) -> None:
                if new and plain:  # cached prompts say nothing about the cost of encoding
                    observe(seconds)

            with self._run_ahead.iteration(expected_s, observe_new):
                encoded = conditioner([request.parameters for request in requests], states, bucket)
                refined = self._refined_conditions(requests, bucket)
                ends = []
                for request, state, own, second in zip(requests, states, encoded, refined, strict=True):
                    ends.append(self._encoders_ends(state, own, second))
                    for field in state.extensions:
                        kind = self._extensions[field]
                        if outputs := list(kind.prepare(request.parameters, state, own.hidden)):
                            end = NetworkEnd(self._brought(kind), all_finite(outputs), kind.model_field or field)
                            ends[-1].append(end)
                    if state.x is None:  # a retry must not draw again
                        state.x, state.kept = self._prepare_latents(request.parameters, state)
                new = conditioner.encoder.misses > before
            return list(map(_Encoded, encoded, refined, ends))

        def commit(encoded: list[_Encoded]) -> dict[str, Outcome]:
            outcomes = {}
            for request, state, (own, refined, ends) in zip(requests, states, encoded, strict=True):
                assert state.x is not None
                state.ends += ends
                first = state.take_conditioning(own.conditioning, refined)
                masked = None if state.source is None else state.source.masked
                state.trajectory = denoise.DenoisingState(
                    state.table, 0, state.x, torch.zeros_like(state.x), first, state.kept, masked
                )
                state.warnings += own.warnings
                request.phase = state.phase(0)
                outcomes[request.id] = Outcome(progress=(0, state.table.steps))
            return outcomes

        return Iteration(compute, commit)

    def denoise_step(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """Run one denoiser forward for all, then one step of each request's sampler."""
        states: list[ImageState] = [request.work for request in requests]
        present = [state.trajectory for state in states if state.trajectory is not None]
        assert len(present) == len(states)
        backend = self._backends[group.backend]
        gatherer = self._gatherers[REFINER if group.backend == REFINER else MAIN]
        owners = self._owners(group, states)

        def compute() -> list[_Step]:
            plan = backend.plan(group, sum(trajectory.conditioning.rows for trajectory in present), live=True)
            added = costs.added(self._steps, backend, group, plan, states)
            observe = added.observe or self._step_observer(group, plan, states)
            iteration = self._run_ahead.iteration(plan.seconds + added.seconds, observe)
            with torch.inference_mode(), backend.adapt(owners, apart=bool(group.mode)), iteration:
                inputs = gatherer.inputs(present, plan.rows)
                output = self._forward(group, backend, plan, states, inputs)
                noise = [self._step_noise(state, t) for state, t in zip(states, present, strict=True)]
                moved = denoise.advance(present, output, noise)
                moved = [state.begin(t) for state, t in zip(states, moved, strict=True)]
                narrowed = [NarrowedState.of(state) if state.narrows(state.step + 1) else None for state in states]
            with torch.inference_mode():
                previews = [self._preview(r.parameters, t) for r, t in zip(requests, moved, strict=True)]
            return list(map(_Step, moved, narrowed, previews))

        def commit(steps: list[_Step]) -> dict[str, Outcome]:
            outcomes = {}
            for request, state, step in zip(requests, states, steps, strict=True):
                if step.narrowed is not None:
                    self._ledger.narrow(state, step.narrowed)
                state.trajectory = moved = state.with_conditioning(step.moved)
                request.phase = state.phase(moved.step)
                outcomes[request.id] = Outcome(progress=(moved.step, moved.table.steps), preview=step.preview)
            return outcomes

        return Iteration(compute, commit)

    def decode_latents(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """Decode the finished pictures. A request one of whose networks gave what is not finite fails alone; a picture
        that its decoder made so in fp16 is decoded again in fp32.
        """
        states: list[ImageState] = [request.work for request in requests]
        latents = [request.work.trajectory.x for request in requests]

        def compute() -> list[_Decoded]:
            plan = self._backends[group.backend].plan(group, len(latents), live=True)
            iteration = self._run_ahead.iteration(math.inf, self._observer(group, plan.rows, plan.compiled))
            with torch.inference_mode(), iteration:
                padded = torch.cat(latents + latents[:1] * (plan.rows - len(latents)))
                rows, flags = plan.function(padded)
                pixels, decoder = vae.to_host(rows[: len(latents)]), self._decoder_name(group.phase)
                ends = [[*s.ends, *self._step_ends(s)] for s in states]
                with_decoder = [[*own, NetworkEnd(decoder, flags[row])] for row, own in enumerate(ends)]
                errors = first_errors(with_decoder)
            decoded = list(map(_Decoded, pixels, errors))
            for row, error in enumerate(errors):
                if isinstance(error, NotFinite) and error.network == decoder:
                    with torch.inference_mode():
                        decoded[row] = self._decoded_again(group.phase, latents[row], error)
            return decoded

        def commit(decoded: list[_Decoded]) -> dict[str, Outcome]:
            outcomes = {}
            for request, (pixels, error, warning) in zip(requests, decoded, strict=True):
                if error is not None:
                    outcomes[request.id] = Outcome(error=error)
                    continue
                request.work.warnings += [warning] if warning else []
                outcomes[request.id] = self._decoded(request, edit.finish(request.parameters, pixels))
            return outcomes

        return Iteration(compute, commit)

    def upscale_tile(self, group: BatchGroup, requests: list[Request]) -> Iteration:
        """Compute the next tile of an enlarged image; one request at a time."""
        (request,) = requests
        finish: Finish = request.work.finish

        def compute() -> Image | None:
            with self._run_ahead.iteration(math.inf, self._observer(group, 1, False)):
                finish.compute()
            return finish.image() if finish.left == 1 else None

        def commit(image: Image | None) -> dict[str, Outcome]:
            finish.done += 1
            result = None if image is None else self._picture(request, image)
            return {request.id: Outcome(result=result, finished=image is not None)}

        return Iteration(compute, commit)

    def _forward(
        self, group: BatchGroup, backend: ImageBackend, plan: ExecutionPlan, states: list[ImageState],
        inputs: DenoiserInputs,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the denoiser's output [B, C, h, w] for all rows; features are kept. What control networks and image
        prompts add goes into phases that are launched directly.
        """
        output: torch.Tensor
        added: dict[str, Any] = {}
        if group.phase == DEEP:
            fixed = backend.widths.deterministic_rows if group.mode else None
            batch = StepBatch(group, states, inputs, plan.rows, fixed)
            for kind in self._steps:
                for name, values in kind.evaluate(batch).items():
                    added[name] = [*added.get(name, ()), *values]  # options are lists, and those of one name are joined
            output, *features = backend.phases[DEEP](inputs, **added) if added else plan.function(inputs)
            keep(backend.denoiser, features, states)
            for kind in self._steps:
                kind.keep(states, added)
        else:
            for kind in self._steps:
                added |= kind.evaluate_shallow(states, plan.rows)
            direct = partial(backend.phases[group.phase], **added)
            (output,) = (direct if added else plan.function)(inputs, gather(states, plan.rows))
        return output

    # -- parts -----------------------------------------------------------------------------------------------------

    def _prepare_latents(
        self, parameters: ImageParameters, state: ImageState
    ) -> tuple[torch.Tensor, denoise.InpaintMask | None]:
        """Draw the starting noise, for an edit added to its image, and the kept region.

        Drawn on the CPU in fp32: a seed gives the same noise on every device and precision.
        """
        scale = self._model.vae_scale
        shape = (1, self._model.latent_channels, parameters.height // scale, parameters.width // scale)
        noise = torch.randn(shape, generator=state.generator) if self.fixed_latent is None else self.fixed_latent[0]
        if noise.shape != shape:
            raise ValueError(f"the fixed latent is {list(noise.shape)}, this size needs {list(shape)}")
        if state.source is None:
            return to_device(noise * state.table.init_noise_sigma, self._model.device), None
        return edit.begin(parameters, state.table, state.source, noise.to(self._model.device), state.generator)

    def _owners(self, group: BatchGroup, states: Sequence[ImageState]) -> list[tuple[ScaledAdapter, ...]]:
        """Return the low-rank branches of each row; none on a refiner, since they are the model's own."""
        if group.backend == REFINER:
            return [()] * sum(state.rows for state in states)
        return [
            tuple(
                use for kind in self._steps if kind.field in state.extensions
                for use in kind.low_rank(state.extensions[kind.field])
            )
            for state in states for _ in range(state.rows)
        ]  # fmt: skip

    def _refined_conditions(self, requests: list[Request], bucket: int) -> list[denoise.Conditioning | None]:
        """Compute what the refiner reads of each request's prompts; None of those without one."""
        own = [request for request in requests if request.work.refinement]
        parameters, prompts = [r.parameters for r in own], [r.work.refinement.prompts for r in own]
        encoded = iter(self._conditioners[REFINER].conditions(parameters, bucket, prompts) if own else ())
        return [next(encoded).conditioning if request.work.refinement else None for request in requests]

    def _encodes_alone(self, group: BatchGroup, requests: list[Request]) -> bool:
        """Return whether the iteration encodes plain prompts and nothing else: no pictures, and none of a refiner or
        LoRAs.
        """
        adapted = group.backend != MAIN and self._backends[group.backend] is self._main
        more = any(request.parameters.added or request.work.refinement is not None for request in requests)
        marked = any(isinstance(prompt, MarkedPrompt) for r in requests for prompt in r.work.prompts.prompts)
        return not (adapted or more or marked)

    def _encoders_ends(
        self, state: ImageState, own: ConditionedRequest, refined: denoise.Conditioning | None
    ) -> list[NetworkEnd]:
        """Return the ends of the text encoders of a request."""
        adapted = next((field for field in state.extensions if self._extensions[field].conditioner is not None), "")
        tensors = [own.hidden, *own.conditioning.tensors.values()]
        ends = [NetworkEnd(network_name("text encoders", self._model), all_finite(tensors), adapted)]
        if refined is not None:
            encoders = network_name("text encoders", self._backends[REFINER].model)
            ends.append(NetworkEnd(encoders, all_finite(refined.tensors.values())))
        return ends

    def _step_ends(self, state: ImageState) -> list[NetworkEnd]:
        """Return the ends of the networks of a request's steps, after the last one."""
        assert state.trajectory is not None
        ends = [
            NetworkEnd(self._brought(kind), flag, kind.model_field or field)
            for field, lease in state.extensions.items()
            if (flag := (kind := self._extensions[field]).finite_steps(lease)) is not None
        ]
        brought = next((kind.field for kind in self._steps if kind.field in state.extensions), "")
        latents = all_finite([state.trajectory.x])
        model, handed_over = self._model, None if state.refinement is None else state.refinement.finite
        if handed_over is not None:
            ends.append(NetworkEnd(network_name(denoiser_label(model), model), handed_over, brought))
            model, brought = self._backends[REFINER].model, ""
        return [*ends, NetworkEnd(network_name(denoiser_label(model), model), latents, brought)]

    def _brought(self, kind: Extension[Any]) -> str:
        return f"the {dtype_name(self._model.dtype)} {kind.networks}"

    def _decoder_name(self, phase: str) -> str:
        tiny = self._model.tiny_vae if phase == VAE_TINY else None
        if tiny is not None:
            return network_name("tiny VAE", self._model, tiny.network.dtype)
        return network_name("VAE", self._model, self._model.vae.dtype)

    def _decoded_again(self, phase: str, latents: torch.Tensor, error: NotFinite) -> _Decoded:
        """Decode one picture [1, C, h, w] in fp32, if its decoder returned `error` in fp16."""
        try:
            decode = decoder_in_fp32(self._model, phase)
            if decode is None:
                return _Decoded(torch.empty(0), error)
            pixels, flags = decode(latents)
            (again,) = first_errors([[NetworkEnd(f"{error.network}, in fp32 too,", flags[0])]])
        except Exception as failure:
            if not isinstance(device_error(failure), OutOfMemory):
                raise
            return _Decoded(torch.empty(0), error)  # its companions' pictures are right
        return _Decoded(vae.to_host(pixels)[0], again, f"{error}: the picture was decoded again in fp32")

    def _observer(self, group: BatchGroup, rows: int, compiled: bool) -> Callable[[float], None]:
        """Return what updates the costs of the group's backend with the seconds of an iteration."""
        key = ExecutableKey(group.phase, rows, group.size)
        return partial(self._backends[group.backend].costs.observe, key, compiled)

    def _step_observer(
        self, group: BatchGroup, plan: ExecutionPlan, states: list[ImageState]
    ) -> Callable[[float], None]:  # fmt: skip
        """Return the same of a step to which nothing is added."""
        if plan.compiled and any(kind.relaunches(states, group) for kind in self._steps):
            return lambda took_s: None  # other launches, in place of what was planned
        return self._observer(group, plan.rows, plan.compiled)

    def _step_noise(self, state: ImageState, trajectory: denoise.DenoisingState) -> torch.Tensor | None:
        """Return the noise that the sampler adds after this step, if any."""
        if not trajectory.table.noisy[trajectory.step]:
            return None
        if state.noise is None or state.noise[0] != trajectory.step:
            state.noise = (
                trajectory.step,
                to_device(torch.randn(trajectory.x.shape, generator=state.generator), trajectory.x.device),
            )
        return state.noise[1]

    def _preview(self, parameters: ImageParameters, moved: denoise.DenoisingState) -> Any:
        if not parameters.preview_every or moved.step % parameters.preview_every or not moved.left:
            return None
        if (decode := self._main.phases.get(VAE_TINY)) is not None:
            pixels, finite = decode(moved.x0)
            preview = vae.reduced(pixels, _PREVIEW_SIDE)  # waits for the device
            return preview if bool(finite.all()) else None
        if self._previews is None:
            self._previews = vae.LinearPreview(self._model, self._main.phases[VAE])
        return self._previews(moved.x0)

    def _decoded(self, request: Request, pixels: torch.Tensor) -> Outcome:
        """Return the end of a request with these pixels [H, W, 3], or the beginning of what remains."""
        from PIL.Image import fromarray

        state: ImageState = request.work
        done = (state.table.steps, state.table.steps)
        field = next((field for field in state.extensions if self._extensions[field].finishes), None)
        if field is None:
            return Outcome(progress=done, result=self._picture(request, fromarray(pixels.numpy())), finished=True)
        state.finish = self._extensions[field].finish(request.parameters, state.extensions[field], pixels)
        request.phase = UPSCALE
        return Outcome(progress=done)

    def _picture(self, request: Request, image: Image) -> Picture:
        state: ImageState = request.work
        backend = self._backends[state.backend]
        bucket = backend.widths.deterministic_rows if state.mode and not backend.batch_invariant else None
        executable = executables(state.mode, (backend, self._main))
        printed = fingerprint(self._model, executable=executable, bucket=bucket, kernels=self._main.kernels)
        for kind in self._extensions.values():
            if digests := kind.digests(state):
                printed[kind.printed_as or kind.field] = dict(digests)
        if request.parameters.vae == TINY and self._model.tiny_vae is not None:
            printed["vae-tiny"] = self._model.tiny_vae.digest
        if side := tiling.tile_side(self._model, (request.parameters.width, request.parameters.height)):
            printed["tiles"] = side
        if self.fixed_latent is not None:
            printed["latent"] = self.fixed_latent[1]
        if state.refinement is not None:
            second = self._backends[REFINER]
            executable = executables(state.refinement.mode, (second,))
            printed["refiner"] = {
                "model": second.model.name, "weights": second.model.digest, "precision": second.model.precision,
                "executable": executable,
            }  # fmt: skip
        parameters = request.parameters
        own_type = samplers.schedule_type(self._model.scheduler_config, state.sampler, parameters.schedule)
        return Picture(image, parameters, printed, tuple(state.warnings), state.sampler, own_type)
