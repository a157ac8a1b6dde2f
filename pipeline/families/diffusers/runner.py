"""The image modality's Runner for a pipeline by diffusers' own loop: an iteration is one step of one request."""

from __future__ import annotations

import copy
import math
import re
import traceback
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.picture_input import Edit
from contract.pipeline_call import FIELD, IMAGE, MASK, TEXT
from core.batching.request import Outcome, Request
from core.batching.runner import Lane, LaneTicket, NotYet
from core.graphs import ExecutableKey
from core.pictures import hard, on_white
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import DEEP, ENCODE, VAE
from pipeline.backends.run_ahead import RunAhead
from pipeline.backends.timing import PhaseCosts
from pipeline.checkpoints.folder import first_line
from pipeline.families.diffusers import LOOP
from pipeline.families.diffusers.checkpoint import DiffusersModel
from pipeline.families.diffusers.loop import PipelineLoop, Position
from pipeline.families.diffusers.signature import ARGUMENTS
from pipeline.fingerprint import code_digest, fingerprint
from pipeline.memory_ledger import RequestCapacity
from pipeline.pixels import vae
from pipeline.pixels.picture import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

_CALLBACK = "callback_on_step_end"
_TEXT_BYTES = 32 * 2**20  # of a prompt's embeddings at most, in most pipelines
_PIXEL_BYTES = 8  # of latents and what samplers keep of them, for each pixel of the picture
_WARM_STEPS = 2


@dataclass(slots=True, eq=False)
class PipelineState:
    """The state of one admitted request. `loop` is None before its first iteration."""

    slot: list[int]
    size_bytes: int
    loop: PipelineLoop | None = None
    position: Position = field(default_factory=lambda: Position(0, 0))


class DiffusersRunner:
    """Generates images with one pipeline on one lane, one step of one request at a time.

    Requests never share a forward: in a batch a row's bits would depend on the batch. Under an offload one request
    runs at a time, since each step of another one would move all weights.
    """

    modality = "image"
    refiner = None
    reads_files = False
    shallow_steps = False

    def __init__(
        self,
        model: DiffusersModel,
        *,
        lane: Lane | None = None,
        max_requests: int = 32,
        patience_s: float = 20.0,
        memory_bytes: int | None = None,
        capacity: RequestCapacity | None = None,
    ) -> None:
        """Arguments are those of `ImageRunner`."""
        self.model = model
        self.patience_s = patience_s
        self.sizes = model.sizes
        self.schedulers = model.offer.schedulers
        self.default_scheduler = model.scheduler
        self.capacity = capacity or RequestCapacity(max_requests, memory_bytes)
        self.costs = PhaseCosts(skip_first=model.device.type == "cuda")
        self._lane = lane or Lane("image")
        self._own_lane = lane is None
        self._run_ahead = RunAhead(model.device)
        self._requests = 0
        self._previews: vae.LinearPreview | None = None
        code_digest()  # of the sources as they are now; they may change before an image is done

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        parameters = request.parameters
        if not isinstance(parameters, ImageParameters):
            raise Invalid("parameters", f"must be ImageParameters, not {type(parameters).__name__}")
        offer, edit = self.model.offer, parameters.edit
        masked, soft = edit is not None and edit.mask is not None, edit is not None and edit.soft_mask
        offer.check_source(edited=edit is not None, masked=masked, soft=soft)
        parameters.check(offer)
        self._check_read(parameters)
        pipeline, arguments = self._call(parameters)
        signature = self.model.signatures[_kind(parameters)]
        completed = signature.completed(pipeline.check_inputs, arguments) if hasattr(pipeline, "check_inputs") else None
        if completed is not None:
            try:
                pipeline.check_inputs(**completed)
            except ValueError as error:
                raise _refused(error, parameters, signature.options) from error
        if self._size_bytes(parameters) > self.capacity.memory.capacity:
            raise Invalid("size", f"needs more memory than requests have, {self.capacity.memory.capacity} bytes")

    def _check_read(self, parameters: ImageParameters) -> None:
        """Raise `Invalid` for what the pipeline of this kind of request does not read."""
        signature, defaults = self.model.signatures[_kind(parameters)], self.model.defaults
        usual = {"steps": defaults.steps, "guidance_scale": defaults.guidance_scale}
        for name in (name for name in ARGUMENTS if name != "strength"):
            if name not in signature.fields and getattr(parameters, name) not in (None, usual.get(name)):
                raise Invalid(name, "is not supported by this model: its pipeline has no such argument")
        soft = parameters.edit is not None and parameters.edit.soft_mask
        unread = {"soft_mask": soft, "guidance_interval": parameters.guidance_interval}
        unread |= {name: getattr(parameters, name) for name in ("guided_steps", "schedule_type", "timesteps", "sigmas")}
        for name, value in unread.items():
            if value:
                raise Invalid(name, "is not supported by this model, which runs by diffusers' own loop")
        for name in parameters.pipeline_options or ():
            if name not in signature:
                raise Invalid(f"{FIELD}.{name}", "is no argument of the pipeline of this kind of request")
        if parameters.image_prompts and not signature.takes_several:
            raise Invalid("image_prompts", "are not supported by the pipeline of this kind of request")
        for picture in parameters.image_prompts:
            if (picture.strength, picture.start, picture.end) != (1.0, 0.0, 1.0):
                raise Invalid("image_prompts.strength", "strength, start and end are not supported by this model")

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset()

    def admit(self, request: Request) -> NotYet | None:
        if self.model.offload != "off" and self._requests:
            return NotYet()
        needed = self._size_bytes(request.parameters)
        if not self.capacity.memory.take(needed):
            return NotYet()
        slot = self.capacity.slots.take()
        if slot is None:
            self.capacity.memory.give(needed)
            return NotYet()
        request.work, request.phase = PipelineState(slot, needed), ENCODE
        self._requests += 1
        return None

    def release(self, request: Request) -> None:
        state, request.work = request.work, None
        loop = state.loop
        state.loop, state.position = None, Position(0, 0)  # an error's frames may refer to the state
        if loop is not None and self.model.offload == "off":
            loop.cancel()
        elif loop is not None:  # moves networks: not on the engine's thread, but before the next iteration
            self._lane.start(loop.cancel, lambda _: {})
        self._requests -= 1
        self.capacity.slots.give(state.slot)
        self.capacity.memory.give(state.size_bytes)

    def held(self) -> int:
        return self._requests

    def group(self, request: Request) -> BatchGroup:
        return BatchGroup(request.phase, request.parameters.size)

    def rows(self, request: Request) -> int:
        return 1

    def iterations(self, request: Request) -> int:
        return max(1, _left(request)) if request.phase == DEEP else 1

    def left_s(self, request: Request, rows: int) -> float:
        return self.iterations(request) * self.cost(self.group(request), rows)

    def next_group(self, request: Request) -> BatchGroup | None:
        if request.phase == VAE:
            return None
        last = request.phase == DEEP and _left(request) <= 1
        return BatchGroup(VAE if last else DEEP, request.parameters.size)

    def limit(self, group: Hashable) -> int:
        return 1

    def lane_of(self, group: Hashable) -> str:
        return "device"

    def cost(self, group: Hashable, rows: int) -> float:
        """Seconds of an iteration; of a size that was not measured by area from one that was."""
        assert isinstance(group, BatchGroup)
        curve = self.costs.curve(group.phase, group.size, False)
        if curve.measured:
            return curve(1)
        measured = [size for phase, size, _ in self.costs.measured() if phase == group.phase]
        if not measured:
            return curve(1)
        size = min(measured, key=lambda size: abs(math.log(math.prod(size) / math.prod(group.size))))
        area: float = math.prod(group.size) / math.prod(size)
        return area * self.costs.curve(group.phase, size, False)(1)

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        (request,) = requests
        state: PipelineState = request.work
        group, parameters = self.group(request), request.parameters
        signature = self.model.signatures[_kind(parameters)]
        if state.loop is not None and state.loop.ended:  # one that failed begins anew, with the same noise
            state.loop.cancel()
            state.loop = None
        if state.loop is None:
            state.loop, state.position = self._loop(parameters), Position(0, 0)
        loop = state.loop

        def compute() -> tuple[Position, Any]:
            try:
                position = self._advance(loop, group)
            except ValueError as error:
                if group.phase == ENCODE and _is_a_check(error):
                    raise _refused(error, parameters, signature.options) from error
                raise
            drawn = getattr(position.image, "size", None)
            if position.image is not None and drawn != parameters.size:
                raise Invalid("size", f"is not what the pipeline draws: {drawn or type(position.image).__name__}")
            return position, self._preview(parameters, state.position, position)

        def commit(result: tuple[Position, Any]) -> Mapping[str, Outcome]:
            position, preview = result
            state.position = position
            if position.image is not None:
                done, picture = (parameters.made, parameters.made), self._picture(parameters, position.image)
                return {request.id: Outcome(progress=done, result=picture, finished=True)}
            request.phase = DEEP if position.done < position.total else VAE
            done = parameters.made * position.done // max(1, position.total), parameters.made
            return {request.id: Outcome(progress=done, preview=preview)}

        return self._lane.start(compute, commit)

    # -- called by whoever built it ---------------------------------------------------------------------------------

    def prepare(self, *, measure_s: float = 0.0) -> None:
        """Run a short request at the native size on a GPU, which compiles what is compiled and measures costs.

        On a CPU the first request does so: its steps may take minutes.
        """
        if self.model.device.type == "cuda" and measure_s:
            self._lane.call(self._warm)

    def _warm(self) -> None:
        side, steps = self.model.native, _WARM_STEPS
        edit = None
        if TEXT not in self.model.pipelines:
            pixels = side * side
            edit = Edit(bytes(3 * pixels), b"\xff" * pixels if IMAGE not in self.model.pipelines else None, 1.0)
        parameters = ImageParameters("a", 0, side, side, steps=steps, edit=edit, guidance_scale=self._guidance)
        for _ in range(2):  # of a first call nothing is counted
            loop, phase, position = self._loop(parameters), ENCODE, Position(0, 0)
            while position.image is None:
                position = self._advance(loop, BatchGroup(phase, (side, side)), warming=True)
                phase = DEEP if position.done < position.total else VAE

    @property
    def _guidance(self) -> float:
        return self.model.defaults.guidance_scale

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def held_files(self) -> set[str]:
        return set()

    def clear_caches(self) -> None:
        """Release nothing: nothing is kept for requests to come."""

    def close(self) -> None:
        if self._own_lane:
            self._lane.close()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _call(self, parameters: ImageParameters) -> tuple[Any, dict[str, Any]]:
        """Return the pipeline of a request, and the arguments that it is called with but for a generator."""
        kind = _kind(parameters)
        pipeline, signature = self.model.pipelines[kind], self.model.signatures[kind]
        arguments = signature.arguments(parameters)
        pictures = list(_pictures(parameters))
        if pictures:
            arguments["image"] = pictures[0] if len(pictures) == 1 else pictures
        if kind == MASK:
            arguments["mask_image"] = hard(_mask(parameters))
        return pipeline, arguments

    def _loop(self, parameters: ImageParameters) -> PipelineLoop:
        """Return a call of a copy of the pipeline, since a call keeps its state in the pipeline and its scheduler."""
        pipeline, arguments = self._call(parameters)
        signature = self.model.signatures[_kind(parameters)]
        if "generator" in signature:
            arguments["generator"] = torch.Generator("cpu").manual_seed(parameters.seed)
        name = f"{self.model.name} in {self.model.precision}"
        return PipelineLoop(_copied(pipeline), arguments, calls_back=_CALLBACK in signature, name=name)

    def _advance(self, loop: PipelineLoop, group: BatchGroup, *, warming: bool = False) -> Position:
        """Run one iteration of a call, on the lane's thread, and observe its cost; `warming`: before any request."""

        def observe(seconds: float) -> None:
            key = ExecutableKey(group.phase, 1, group.size)
            if warming:
                self.costs.measure(key, False, seconds)
            else:
                self.costs.observe(key, False, seconds)

        expected_s = math.inf if group.phase == VAE else self.cost(group, 1)
        with self._run_ahead.iteration(expected_s, observe):
            return loop.advance()

    def _size_bytes(self, parameters: ImageParameters) -> int:
        """Return an estimate of what a request holds between its steps: diffusers does not tell."""
        return _TEXT_BYTES + _PIXEL_BYTES * parameters.width * parameters.height

    def _preview(self, parameters: ImageParameters, before: Position, position: Position) -> Any:
        """Return a preview of the latents after a step, where they are maps that an AutoencoderKL decodes.

        It shows them with the noise that is left: the call does not hand out the sampler's estimate.
        """
        every, latents, decoder = parameters.preview_every, position.latents, self.model.vae
        if not every or position.done in (before.done, position.total) or position.done % every or latents is None:
            return None
        channels = getattr(getattr(decoder, "config", None), "latent_channels", None)
        plain = type(decoder).__name__ == "AutoencoderKL" and self.model.offload == "off"
        if not plain or latents.ndim != 4 or latents.shape[1] != channels:
            return None
        with torch.inference_mode():
            if self._previews is None:
                self._previews = vae.LinearPreview(self.model)
            return self._previews(latents.float())

    def _picture(self, parameters: ImageParameters, image: Image) -> Picture:
        from PIL.Image import composite

        if parameters.edit is not None and parameters.edit.mask is not None:
            shares = _mask(parameters).point(lambda value: min(2 * value, 255))  # as `edit.finish` has them
            image = composite(image, next(_pictures(parameters)), shares)
        executable = "compiled" if self._compiled else "eager"
        printed = fingerprint(self.model, executable=executable, bucket=1)
        printed |= {"loop": LOOP, "pipeline": type(self.model.pipelines[_kind(parameters)]).__name__}
        return Picture(on_white(image), parameters, printed, (), self.default_scheduler)

    @property
    def _compiled(self) -> bool:
        modules = (part for module in self.model.modules.values() for part in module.modules())
        return any(getattr(part, "_compiled_call_impl", None) is not None for part in modules)


def _copied(pipeline: Any) -> Any:
    """Return a copy with the same networks, and schedulers and guiders of its own: both keep the state of a call."""
    from diffusers import SchedulerMixin
    from diffusers.guiders import BaseGuidance

    copied = copy.copy(pipeline)
    for name, part in vars(pipeline).items():
        if isinstance(part, SchedulerMixin | BaseGuidance):
            setattr(copied, name, type(part).from_config(part.config))
    return copied


def _kind(parameters: ImageParameters) -> str:
    """Return the kind of a request, of those of `contract.pipeline_call`."""
    edit = parameters.edit
    return TEXT if edit is None else IMAGE if edit.mask is None else MASK


def _left(request: Request) -> int:
    position: Position = request.work.position
    return position.total - position.done


def _pictures(parameters: ImageParameters) -> Iterator[Image]:
    """Yield the source of an edit, and the pictures that come with it."""
    from PIL.Image import frombytes

    if parameters.edit is not None:
        assert isinstance(parameters.edit.image, bytes)
        yield frombytes("RGB", parameters.size, parameters.edit.image)
    for picture in parameters.image_prompts:
        yield frombytes("RGB", (picture.width, picture.height), picture.pixels)


def _mask(parameters: ImageParameters) -> Image:
    from PIL.Image import frombytes

    assert parameters.edit is not None and isinstance(parameters.edit.mask, bytes)
    return frombytes("L", parameters.size, parameters.edit.mask)


def _is_a_check(error: ValueError) -> bool:
    """Return whether diffusers itself raised the error, as it does for arguments that a pipeline does not take."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == "diffusers"


def _refused(error: ValueError, parameters: ImageParameters, options: Iterable[str]) -> Invalid:
    """Return the error of a request whose arguments a pipeline refuses with these words.

    Its field is the one that the message names in backquotes; else pictures, if it is about them, or the prompt.
    """
    fields = {argument: field for field, argument in ARGUMENTS.items()} | {"height": "size", "width": "size"}
    fields |= {name: f"{FIELD}.{name}" for name in options}
    message = str(error)
    pictures = "image" if parameters.edit is not None else "image_prompts" if parameters.image_prompts else "prompt"
    usual = pictures if re.search(r"\b(images?|aspect ratio)\b", message, re.IGNORECASE) else "prompt"
    names = re.findall(r"`(\w+)", message)
    return Invalid(next((fields[name] for name in names if name in fields), usual), first_line(error))
