"""Job handlers, one per modality: turn a job into engine requests, and their outputs into the job's result.

Imports neither torch at module level, because the worker imports it before torch, nor what the base install lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from contract.card import ModelCard
from contract.image import ImageJob
from contract.text import TextJob
from core.batching.request import Outcome

if TYPE_CHECKING:
    from workers.artifact_writer import ArtifactWriter
    from workers.text.stream_buffer import StreamBuffer


@dataclass(frozen=True, slots=True)
class Output:
    """The `value` that the engine made of a request, and the `facts` that the result tells of it. A `refused` one is
    not shown.
    """

    value: Any
    facts: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False


class JobProgress(Protocol):
    """One job's progress, and its texts so far, if it generates text."""

    @property
    def written(self) -> StreamBuffer | None: ...

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """The progress to report after an iteration of the request with this index, on the engine's thread. None:
        nothing.
        """
        ...


class JobHandler(Protocol):
    """A modality of jobs. Thread-safe."""

    @property
    def modality(self) -> str:
        """The queue of its jobs."""
        ...

    @property
    def name(self) -> str:
        """The model's name, as jobs name it."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds that the model would take to load; 0: it is in memory."""
        ...

    @property
    def expansion_instruction(self) -> str:
        """The system message that the model was trained to expand prompts by; "" where it was not."""
        ...

    def card(self) -> ModelCard:
        """The model's card, with the costs measured so far.

        Raises KeyError or RuntimeError if they change during the call: call again.
        """
        ...

    @property
    def reads_files(self) -> bool:
        """Whether jobs may name files that are read for them."""
        ...

    def files(self, job: Any) -> set[str]:
        """The files that a job needs in memory. Raises `Invalid` for one that cannot be named."""
        ...

    def held_files(self) -> Iterable[str]:
        """The files in memory, each as `files` names it."""
        ...

    def read(self, parameters: Mapping[str, Any]) -> ImageJob | TextJob:
        """Parse a job's parameters from its record. Raises `Invalid`."""
        ...

    def requests(self, job: Any) -> list[Any]:
        """The parameters of the job's engine requests. Raises `Invalid`."""
        ...

    def tally(self, requests: Sequence[Any]) -> JobProgress: ...

    def build_result(self, job: Any, outputs: Sequence[Output], artifact_writer: ArtifactWriter) -> dict[str, Any]:
        """Return the result, from its requests' outputs; artifacts are stored before. Raises `ArtifactError`."""
        ...
