"""The protocol that the image runner needs of a backend, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from core.cuda_graphs import GraphCache
from core.ops.branches import LowRank, PackedAdapter
from core.ops.reference import TorchLowering
from pipeline.backends.phases import Phases
from pipeline.backends.timing import PhaseCosts
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.families.family import ImageModel, Network
from pipeline.fingerprint import KernelIdentity
from pipeline.recording import BackgroundRecorder, GraphSet

if TYPE_CHECKING:
    from core.ops.ops import Lowering

MAIN = ""  # the backend of all requests


class BatchGroup(NamedTuple):
    """Requests that may share a forward."""

    phase: str
    size: tuple[int, int]  # (width, height) in pixels; (0, 0) where irrelevant
    mode: str = ""  # of deterministic requests, as their backend named it
    backend: str = MAIN
    chunks: int = 1  # of each row's text, in steps; 1 also where rows of all lengths share a forward
    extensions: tuple[tuple[str, tuple[int, ...]], ...] = ()  # `Extension.group` by field, where bits depend on these


class ExecutionPlan(NamedTuple):
    """A plan of an iteration: `rows` includes padding, `seconds` is the expected time."""

    function: Callable[..., Any]
    compiled: bool  # or recorded: timed separately from the same phase without
    rows: int
    seconds: float


@dataclass(frozen=True)
class Widths:
    """Numbers of rows of a backend's step forwards. Raises ValueError for fewer than guidance needs."""

    max_rows: int = 32  # of one forward
    deterministic_rows: int = 8  # of every forward of deterministic requests, where bits depend on it
    buckets: tuple[int, ...] = (2, 4, 8, 16, 32)  # to be compiled, recorded or timed

    def __post_init__(self) -> None:
        if self.deterministic_rows < 2 or self.max_rows < 2:
            raise ValueError("max_rows and deterministic_rows must be at least 2: guidance brings two rows")

    @property
    def descending(self) -> list[int]:
        """All widths that are prepared, the widest first."""
        allowed = (rows for rows in self.buckets if rows <= self.max_rows)
        return sorted({*allowed, self.deterministic_rows}, reverse=True)


NO_GRAPHS = GraphSet(GraphCache({}, None), {}, lambda key, run: None)
"""The graphs of a backend that records none."""


class ImageBackend(Protocol):
    """Runs the phases of one image model.

    `plan` and properties may be used on any thread; phases run on one, the lane's.
    """

    model: ImageModel
    denoiser: Network
    phases: Phases  # launched directly at any number of rows; the next call of any may overwrite what one returned
    kernels: KernelIdentity
    costs: PhaseCosts
    widths: Widths
    graphs: GraphSet = NO_GRAPHS
    fixed_shapes: bool = False  # every input of a width and size has one shape: texts are padded to the longest
    packs: bool = False  # whether steps of requests with LoRAs run here too, beside all others, on packed branches
    recording: BackgroundRecorder | None = None  # of the graphs, if other models' are the same ones
    shared_parts: frozenset[str] = frozenset()  # of the model, which another one's are too
    batch_invariant: bool = False  # a row's bits do not depend on others: how many they are, how long their texts

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        """Return the cheapest plan of running so many rows of a group whose phase is in `phases`. For a mode, always
        the same bucket and executable. `live`: the iteration runs now, and what it lacks is built next.
        """
        ...

    def deterministic_mode(
        self, size: tuple[int, int], depth: str, decode: str, chunks: int = 1, *, controlled: bool = False
    ) -> str:
        """Return the mode for a deterministic request that begins now, which it keeps to its end; not empty.

        `depth` is that of its shallow steps; "" without any. `decode` is the phase that decodes it, `chunks` are those
        of its text. `controlled`: its steps are launched directly, with what control networks, image prompts or LoRAs
        add.
        """
        ...

    def lowering_for(self, network: Any) -> Lowering:
        """Return a lowering like the denoiser's, for a network that runs beside it."""
        return TorchLowering(self.model.dtype)

    def executable(self, mode: str) -> str:
        """Return what a request of this mode may have run on, for its fingerprint."""
        ...

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        """Request executables at a size (default: the native one), and time what runs now, for at most `measure_s`
        seconds, the most likely widths first. Not to be called while the engine runs.
        """
        ...

    def adapt(self, owners: Sequence[tuple[ScaledAdapter, ...]], *, apart: bool) -> AbstractContextManager[None]:
        """Enter a context in which row i of every forward gets the LoRAs `owners[i]`. `apart`: its bits depend on
        nothing but the row.

        A backend that neither packs adapters nor is that of LoRAs has requests without LoRAs only.
        """
        return nullcontext()

    def pack_adapter(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        """Pack a LoRA's factors of the denoiser, by its layers' names, for `adapt`. On any thread, where `packs`.

        Raises ValueError, naming the layer, for factors that do not fit.
        """
        raise TypeError(f"{type(self).__name__} packs no adapters")

    def forget_adapters(self) -> None:
        """Let go of the LoRAs of the last forward."""
        return

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of what it holds beside the model's own weights, by name, as far as it knows them."""
        return {}

    def offload(self, *, back: bool = False) -> bool:
        """Move its own weights to the host's memory, or `back`; False: it cannot. On any thread, while no request runs
        on it.
        """
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all requested executables are compiled or have failed; False after `timeout_s`."""
        return True

    def close(self) -> None:
        """Drop what is still to be compiled."""
        return


def planned(
    backend: ImageBackend, group: BatchGroup, rows: int, function: Callable[..., Any], compiled: bool = False
) -> ExecutionPlan:
    """Return the plan of running so many rows with this function, with the seconds that it is known to take."""
    return ExecutionPlan(function, compiled, rows, backend.costs.curve(group.phase, group.size, compiled)(rows))


def executables(mode: str, backends: Iterable[ImageBackend]) -> str:
    """Return what a request of this mode that ran on all of these backends may have run on; names that another one
    contains are left out.
    """
    names = [*dict.fromkeys(backend.executable(mode) for backend in backends)]
    return " and ".join(name for name in names if not any(name != other and name in other for other in names))
