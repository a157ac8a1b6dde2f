"""What an admitted image request holds until its end: step, schedule, noise and features, and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch

from contract import plan as plans
from contract import students
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.picture_input import PictureInput
from core.batching.runner import NotYet
from core.batching.slots import Budget, Slots
from pipeline.backends.backend import LORA, MAIN, ImageBackend
from pipeline.backends.phases import DECODES, DEEP, SHALLOW
from pipeline.extensions import refining
from pipeline.extensions.adapters import AdapterCache, AdapterLease, ScaledAdapter
from pipeline.extensions.control import ControlFolder, ControlNetwork, RequestControls
from pipeline.extensions.image_prompts import ImagePromptFolder, RequestImagePrompt
from pipeline.extensions.refining import REFINER, Refinement
from pipeline.extensions.upscaling import Upscaler, Upscaling
from pipeline.pixels.edit import EncodedSource
from pipeline.sampling import denoise, sigmas
from pipeline.text.encode import RequestPrompts


@dataclass(slots=True, eq=False)
class ImageState:
    """The state of one admitted request."""

    slot: list[int]
    size_bytes: int
    row_bytes: int  # of these, for each of the most rows
    widths: tuple[int, ...]  # rows of each step: 2 with classifier-free guidance, else 1
    backend: str  # of its steps
    mode: str  # as this backend named it; "" unless the request is deterministic
    table: sigmas.SamplerTable
    generator: torch.Generator
    plan: tuple[bool, ...]  # which steps are deep
    depth: str  # of its shallow steps; "" without any
    prompts: RequestPrompts
    sampler: str
    decode: str  # the phase that decodes it
    features: list[torch.Tensor]  # [most rows, …] each: of the last deep step, for shallow ones; in its last rows
    x: torch.Tensor | None = None  # [1, C, h, w] fp32: the starting noise, drawn on the lane
    source: EncodedSource | None = None  # of an edit
    kept: denoise.InpaintMask | None = None
    trajectory: denoise.DenoisingState | None = None
    conditionings: dict[int, denoise.Conditioning] = field(default_factory=dict)  # by their rows
    noise: tuple[int, torch.Tensor] | None = None  # (step, its noise): a retry must not draw again
    warnings: list[str] = field(default_factory=list)
    taken: AdapterLease | None = None  # its LoRAs
    uses: tuple[ScaledAdapter, ...] = ()  # the same, once its prompts are encoded
    upscaler: Upscaler | None = None  # of its finished image
    upscaling: Upscaling | None = None  # its tiles, once it is finished
    networks: list[ControlNetwork] | None = None  # its control networks
    controls: RequestControls = RequestControls()  # noqa: RUF009  # once its prompts are encoded
    residual: torch.Tensor | None = None  # [rows, h, w, C]: the first of the last deep step, for shallow ones
    image_tokens: tuple[int, ...] = ()  # of each of its image prompts
    image_adapters: Sequence[object] = ()  # of its image prompts, kept in memory until these are encoded
    image_prompts: tuple[RequestImagePrompt, ...] = ()  # once its prompts are encoded
    refinement: Refinement | None = None  # of its last steps

    @property
    def step(self) -> int:
        """The step that comes next."""
        return 0 if self.trajectory is None else self.trajectory.step

    @property
    def rows(self) -> int:
        """Of the step that comes next."""
        return self.widths[min(self.step, len(self.widths) - 1)]

    @property
    def most_rows(self) -> int:
        return max(self.widths)

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """The digests of the files that it is drawn with, by the request's field and their names."""
        found = {
            "lora": {use.name: use.digest for use in self.uses},
            "control": {network.name: network.digest for network in self.networks or ()},
            "image_prompts": {prompt.name: prompt.digest for prompt in self.image_prompts},
            "embeddings": self.prompts.embeddings,
        }
        return {field: own for field, own in found.items() if own}

    def refines(self, step: int) -> bool:
        """Whether this step runs on the refiner."""
        return self.refinement is not None and step >= self.refinement.at

    def acts(self, given: PictureInput) -> tuple[bool, ...]:
        """In which steps it acts: in none of a refiner's."""
        return given.acts(len(self.plan), None if self.refinement is None else self.refinement.at)

    def backend_at(self, step: int) -> str:
        """The backend that takes this step."""
        return REFINER if self.refines(step) else self.backend

    def take_conditioning(
        self, conditioning: denoise.Conditioning, refined: denoise.Conditioning | None
    ) -> denoise.Conditioning:
        """Keep the conditioning of all rows, and of the refiner; returns that of the first step."""
        self.conditionings = {1: conditioning.unguided(), conditioning.rows: conditioning}
        if refined is not None and self.refinement is not None:
            self.refinement.conditionings = {1: refined.unguided(), refined.rows: refined}
        return self.conditionings[self.widths[0]]

    def with_conditioning(self, trajectory: denoise.DenoisingState) -> denoise.DenoisingState:
        """The same with the conditioning of the step that comes next: of two rows or of one, and of its model."""
        if not trajectory.left:
            return trajectory
        found = self.conditionings
        if self.refinement is not None and self.refines(trajectory.step):
            found = self.refinement.conditionings
        elif self.widths[trajectory.step] == trajectory.conditioning.rows:
            return trajectory
        return replace(trajectory, conditioning=found[self.widths[trajectory.step]])

    def begin(self, moved: denoise.DenoisingState) -> denoise.DenoisingState:
        """The state before the step that comes next: `Refinement.begin`, if it has a refiner."""
        return moved if self.refinement is None else self.refinement.begin(moved, self.generator)

    def narrows(self, step: int) -> bool:
        """Whether no step from this one on is guided, but the one before was; never of requests with a refiner."""
        if self.refinement is not None:
            return False
        return step < len(self.widths) and self.widths[step - 1] == 2 and max(self.widths[step:]) == 1

    def phase(self, step: int) -> str:
        """The phase before this step; after the last one latents are decoded."""
        if step == len(self.plan):
            return self.decode
        return DEEP if self.plan[step] else SHALLOW[self.depth]


class CheckedInputs(NamedTuple):
    """What a request's check read, for its admission, which is asked again and again on the engine's thread and reads
    no file of these. `refined` are the prompts as a refiner reads them.
    """

    prompts: RequestPrompts
    refined: RequestPrompts | None = None
    upscaler: Upscaler | None = None


@dataclass(slots=True)
class _RequestFiles:
    """The files that are reserved for one request."""

    loras: AdapterLease | None = None
    networks: list[ControlNetwork] | None = None
    image_adapters: Sequence[object] = ()


class MemoryLedger:
    """Accounts for the memory that all requests hold together."""

    def __init__(
        self,
        backends: Mapping[str, ImageBackend],
        max_requests: int,
        memory_bytes: int | None,
        adapters: AdapterCache | None = None,
        controls: ControlFolder | None = None,
        image_prompts: ImagePromptFolder | None = None,
    ) -> None:
        self.slots = Slots(max_requests)
        self.memory = Budget(2**63 if memory_bytes is None else memory_bytes)
        main = backends[MAIN]
        self._model = main.model
        self._denoiser = main.denoiser
        self._backends = backends
        self._row_bytes = cache(self._bytes_of_conditioning)
        self._tokens = main.model.family.text_encoder(main.model).tokens if controls is not None else 0
        self._adapters = adapters
        self._controls = controls
        self._image_prompts = image_prompts

    def check(self, wanted: ImageParameters, found: CheckedInputs) -> None:
        """Raise `Invalid` for a request that could never fit."""
        needed = self.size_bytes(wanted, found.prompts.chunks, found.upscaler)
        if needed > self.memory.capacity:
            raise Invalid("size", f"it needs {needed} bytes of memory, and requests have {self.memory.capacity}")

    def take(self, wanted: ImageParameters, scheduler: str, found: CheckedInputs) -> ImageState | NotYet:
        """Reserve all that the request will hold; `NotYet`: nothing is reserved."""
        files = _RequestFiles()
        try:
            refusal = self._take_files(wanted, files) or self._take_room(wanted, scheduler, found, files)
        except BaseException:
            self._give_files(files)
            raise
        if isinstance(refusal, NotYet):
            self._give_files(files, keep=not refusal.resource)  # only room is missing: it is the next to be admitted
        return refusal

    def _take_files(self, wanted: ImageParameters, files: _RequestFiles) -> NotYet | None:
        """Reserve the request's files, as far as there is room. First of all: `NotYet` names what they wait for."""
        wait = self.slots.taken > 0  # alone nothing is delayed by what is read again
        if wanted.lora:
            assert self._adapters is not None
            files.loras = self._adapters.take(wanted.lora, wait=wait)
            if files.loras is None:
                return NotYet("lora")
        if wanted.control:
            assert self._controls is not None
            files.networks = self._controls.take(wanted.control, wait=wait)
            if files.networks is None:
                return NotYet("control")
        if wanted.image_prompts:
            assert self._image_prompts is not None
            adapters = self._image_prompts.take(wanted.image_prompts, wait=wait)
            if adapters is None:
                return NotYet("image_prompts")
            files.image_adapters = adapters
        return None

    def _take_room(
        self, wanted: ImageParameters, scheduler: str, found: CheckedInputs, files: _RequestFiles
    ) -> ImageState | NotYet:
        """Reserve memory and a slot; the request's state with its `files`."""
        needed = self.size_bytes(wanted, found.prompts.chunks, found.upscaler)
        if not self.memory.take(needed):
            return NotYet()
        slot = self.slots.take()
        if slot is None:
            self.memory.give(needed)
            return NotYet()
        try:
            work = self._work(wanted, scheduler, found, slot, needed, files.loras)
            work.networks, work.image_adapters = files.networks, files.image_adapters
            if self._image_prompts is not None:
                work.image_tokens = self._image_prompts.tokens(wanted.image_prompts)
        except BaseException:
            self.slots.give(slot)
            self.memory.give(needed)
            raise
        return work

    def narrow(self, work: ImageState, narrowed: NarrowedState) -> None:
        """Give back the second row, and the copy's, after the last guided step."""
        work.conditionings, work.features = {1: narrowed.conditioning}, narrowed.features
        work.size_bytes -= 2 * work.row_bytes
        self.memory.give(2 * work.row_bytes)

    def give(self, work: ImageState) -> None:
        self.slots.give(work.slot)
        self.memory.give(work.size_bytes)
        self._give_files(_RequestFiles(work.taken, work.networks))

    def _give_files(self, files: _RequestFiles, *, keep: bool = False) -> None:
        if files.loras is not None:
            assert self._adapters is not None
            self._adapters.give(files.loras, keep=keep)
        if files.networks is not None:
            assert self._controls is not None
            self._controls.give(files.networks, keep=keep)

    def size_bytes(self, wanted: ImageParameters, chunks: int = 1, upscaler: Upscaler | None = None) -> int:
        """Its size at most: latents, its enlarged image, controls, image prompts, and each row's conditioning, with so
        many chunks of text, and features.

        Where guidance ends before the last step, one row more: what is kept is copied while both rows are still there.
        """
        scale, channels = self._model.vae_scale, self._model.latent_channels
        held = 3 if wanted.edit is None else 6  # an edit also holds its image, the starting noise and a mask
        held += wanted.edit is not None and wanted.refiner is not None  # and the noise of the refiner's steps
        latents = held * 4 * channels * (wanted.height // scale) * (wanted.width // scale)
        rows = self._rows(wanted)
        narrows = rows > 1 and not wanted.guidance.guided(wanted.made)[-1] and wanted.refiner is None
        enlarged = 0 if upscaler is None else upscaler.size_bytes(wanted.width, wanted.height)
        refined = 0 if wanted.refiner is None else rows * self._row_bytes(chunks, REFINER)
        beside = 0
        if wanted.control and self._controls is not None:
            tokens = self._tokens * chunks
            beside = self._controls.request_bytes(wanted.control, (wanted.width, wanted.height), rows, tokens)
        if wanted.image_prompts and self._image_prompts is not None:
            beside += self._image_prompts.request_bytes(wanted.image_prompts, rows, self._denoiser.text_width)
        return latents + enlarged + refined + beside + (rows + narrows) * self._bytes_of_row(wanted, chunks)

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
        taken: AdapterLease | None,
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
        # Steps of requests with LoRAs share forwards with all others where the same backend takes both.
        name = LORA if wanted.lora and self._backends[LORA] is not self._backends[MAIN] else MAIN
        decode = DECODES[wanted.vae]
        find = self._backends[name].deterministic_mode
        beside = (
            {"controlled": True} if wanted.added or wanted.lora else {}
        )  # backends of other packages may not know it
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
            generator, plan, depth, prompts, scheduler, decode, features, taken=taken, warnings=warnings,
            upscaler=found.upscaler,
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


class NarrowedState(NamedTuple):
    """What a request keeps of its conditioning and features after its last guided step, in memory of its own."""

    conditioning: denoise.Conditioning
    features: list[torch.Tensor]

    @classmethod
    def of(cls, work: ImageState) -> NarrowedState:
        """Computed on the lane; `MemoryLedger.narrow` then takes it."""
        one = work.conditionings[1]
        own = {name: tensor.clone() for name, tensor in one.tensors.items()}
        return cls(denoise.Conditioning(own, one.guidance_scale), [kept[-1:].clone() for kept in work.features])
