"""The state that an admitted image request holds until its end: step, schedule, noise and features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from contract.image import ImageParameters
from contract.picture_input import PictureInput
from pipeline.backends.backend import MAIN
from pipeline.backends.phases import DEEP, SHALLOW
from pipeline.extensions.refining import REFINER, Refinement
from pipeline.finite import NetworkEnd
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
    extensions: dict[str, Any] = field(default_factory=dict)  # leases of what it brings along, by field
    finish: Any = None  # what remains of its decoded picture: an `extension.Finish`
    encoder: str = MAIN  # the backend whose conditioner encodes its prompts
    refinement: Refinement | None = None  # of its last steps
    ends: list[NetworkEnd] = field(default_factory=list)  # of networks that have run for it, in order

    @property
    def step(self) -> int:
        """Number of the step that comes next."""
        return 0 if self.trajectory is None else self.trajectory.step

    @property
    def rows(self) -> int:
        """Number of rows of the step that comes next."""
        return self.widths[min(self.step, len(self.widths) - 1)]

    @property
    def most_rows(self) -> int:
        return max(self.widths)

    def refines(self, step: int) -> bool:
        """Return whether this step runs on the refiner."""
        return self.refinement is not None and step >= self.refinement.at

    def acts(self, picture: PictureInput) -> tuple[bool, ...]:
        """Return in which steps the picture acts: in none of a refiner's."""
        return picture.acts(len(self.plan), None if self.refinement is None else self.refinement.at)

    def backend_at(self, step: int) -> str:
        """Return the backend that takes this step."""
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
        """Return it with the conditioning of the step that comes next: of two rows or of one, and of its model."""
        if not trajectory.left:
            return trajectory
        conditionings = self.conditionings
        if self.refinement is not None and self.refines(trajectory.step):
            conditionings = self.refinement.conditionings
        elif self.widths[trajectory.step] == trajectory.conditioning.rows:
            return trajectory
        return replace(trajectory, conditioning=conditionings[self.widths[trajectory.step]])

    def begin(self, moved: denoise.DenoisingState) -> denoise.DenoisingState:
        """Return the state before the step that comes next: `Refinement.begin`, if it has a refiner."""
        return moved if self.refinement is None else self.refinement.begin(moved, self.generator)

    def narrows(self, step: int) -> bool:
        """Return whether no step from this on is guided, but the one before was; never of requests with a refiner."""
        if self.refinement is not None:
            return False
        return step < len(self.widths) and self.widths[step - 1] == 2 and max(self.widths[step:]) == 1

    def phase(self, step: int) -> str:
        """Return the phase before this step; after the last one latents are decoded."""
        if step == len(self.plan):
            return self.decode
        return DEEP if self.plan[step] else SHALLOW[self.depth]


class CheckedInputs(NamedTuple):
    """The results of a request's check, for its admission, which is asked again and again on the engine's thread and
    reads no file of these. `refined` are the prompts as a refiner reads them, `extensions` what these read, by field.
    """

    parameters: ImageParameters
    prompts: RequestPrompts
    refined: RequestPrompts | None = None
    extensions: Mapping[str, Any] = {}


class NarrowedState(NamedTuple):
    """The conditioning and features that a request keeps after its last guided step, in memory of its own."""

    conditioning: denoise.Conditioning
    features: list[torch.Tensor]

    @classmethod
    def of(cls, state: ImageState) -> NarrowedState:
        """Copy it, on the lane; `MemoryLedger.narrow` then takes it."""
        row = state.conditionings[1]
        own = {name: tensor.clone() for name, tensor in row.tensors.items()}
        return cls(denoise.Conditioning(own, row.guidance_scale), [kept[-1:].clone() for kept in state.features])
