"""Simulates the image runner: the same phases, groups, rows and limits, with iteration times from a cost table.

It implements the scheduler's interface as `pipeline.runner.ImageRunner` does, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from contract.image import ImageParameters
from contract.plan import rows_and_depths
from core.batching.request import Outcome, Request
from core.batching.runner import NotYet
from core.batching.slots import Budget, Slots
from lab.simulation.costs import ANY, DEEP, ENCODE, SHALLOW, STEPS, VAE, Costs, Size

_MOST_ROWS = {ENCODE: 32, VAE: 4}  # as ImageRunner bounds them; denoising steps have the settings' `max_rows`
LANE = "device"


@dataclass(frozen=True)
class Device:
    """The limits of one engine, as in the settings; `memory_bytes` None is no limit."""

    max_requests: int = 32
    max_rows: int = 32
    memory_bytes: int | None = None
    patience_s: float = 20.0
    starvation_s: float = 60.0


class Group(NamedTuple):
    phase: str
    size: Size


class IterationSpan(NamedTuple):
    """A finished iteration: lane, times, phase, width."""

    lane: str
    begins: float
    ends: float
    phase: str
    rows: int


def steps_of(parameters: ImageParameters) -> tuple[tuple[int, bool], ...]:
    """Each step's rows, and whether it is deep."""
    rows = 2 if parameters.guidance_scale > 1 else 1
    return rows_and_depths(parameters.deepcache, parameters.guidance, parameters.steps, rows)


@lru_cache(maxsize=4096)
def phases_of(parameters: ImageParameters) -> tuple[tuple[Group, int], ...]:
    """The image's iterations: the group of each, and its rows there."""
    size, steps = (parameters.width, parameters.height), steps_of(parameters)
    groups = ((Group(_phase(parameters, deep), size), rows) for rows, deep in steps)
    return ((Group(ENCODE, ANY), max(rows for rows, _ in steps)), *groups, (Group(VAE, size), 1))


def limit(costs: Costs, device: Device, group: Group) -> int:
    """The maximum rows of one forward: the runner's limit, and at most the widest measured."""
    allowed = device.max_rows if group.phase in STEPS else _MOST_ROWS[group.phase]
    return min(allowed, costs.widest(group.phase, group.size) or allowed)


def held_bytes(costs: Costs, parameters: ImageParameters) -> int:
    """An image's memory from its admission to its last guided step; 0 if the table does not contain it."""
    parts = costs.held_bytes.get((parameters.width, parameters.height), {})
    widths = [rows for rows, _ in steps_of(parameters)]
    narrows = max(widths) > widths[-1]  # what is kept is copied while both rows are still there
    return parts.get("request", 0) + (max(widths) + narrows) * _row_bytes(costs, parameters)


def _row_bytes(costs: Costs, parameters: ImageParameters) -> int:
    """The memory of each row of it."""
    parts = costs.held_bytes.get((parameters.width, parameters.height), {})
    cached = parameters.deepcache
    features = 0 if cached is None or all(cached.plan(parameters.steps)) else parts.get(SHALLOW[cached.depth], 0)
    return parts.get("row", 0) + features


@dataclass(slots=True, eq=False)
class _Work:
    slot: list[int]
    size_bytes: int
    life: tuple[tuple[Group, int], ...]
    at: int = 0  # how many of its iterations have ended

    @property
    def group(self) -> Group:
        return self.life[self.at][0]

    def narrows(self) -> bool:
        """Return whether no step from here on has two rows, but the one before had."""
        before, left = self.life[self.at - 1], self.life[self.at : -1]
        return bool(left) and before[0].phase in STEPS and before[1] == 2 and max(rows for _, rows in left) == 1


class SimulatedTicket:
    """One iteration on the virtual clock: ready from `ends` on."""

    def __init__(self, runner: SimulatedRunner, requests: Sequence[Request], ends: float) -> None:
        self.ends = ends
        self._runner = runner
        self._requests = list(requests)

    def ready(self) -> bool:
        return self._runner.clock() >= self.ends

    def notify(self, wake: Callable[[], None]) -> None:
        """Does nothing: no thread sleeps on a virtual clock."""

    def outcome(self) -> Mapping[str, Outcome]:
        return {request.id: self._runner.commit(request) for request in self._requests}


class SimulatedRunner:
    """One device. `on_launch` is called for every iteration."""

    modality = "image"

    def __init__(
        self,
        costs: Costs,
        device: Device,
        clock: Callable[[], float],
        on_launch: Callable[[IterationSpan], None] = lambda span: None,
    ) -> None:
        self.clock = clock
        self.patience_s = device.patience_s
        self.memory = Budget(2**63 if device.memory_bytes is None else device.memory_bytes)
        self._costs = costs
        self._device = device
        self._slots = Slots(device.max_requests)
        self._on_launch = on_launch
        self._free_at: dict[str, float] = {}
        self._limits: dict[Group, int] = {}

    # -- what the scheduler asks -----------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Does nothing: requests were checked against the table before the first arrival."""

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset()

    def admit(self, request: Request) -> NotYet | None:
        parameters: ImageParameters = request.parameters
        needed = held_bytes(self._costs, parameters)
        if not self.memory.take(needed):
            return NotYet()
        slot = self._slots.take()
        if slot is None:
            self.memory.give(needed)
            return NotYet()
        request.work = _Work(slot, needed, phases_of(parameters))
        request.phase = ENCODE
        return None

    def release(self, request: Request) -> None:
        work, request.work = request.work, None
        self._slots.give(work.slot)
        self.memory.give(work.size_bytes)

    def held(self) -> int:
        return self._slots.taken

    def group(self, request: Request) -> Group:
        group: Group = request.work.group
        return group

    def rows(self, request: Request) -> int:
        work: _Work = request.work
        return work.life[work.at][1]

    def iterations(self, request: Request) -> int:
        work: _Work = request.work
        return len(work.life) - 1 - work.at if request.phase in STEPS else 1

    def left_s(self, request: Request, rows: int) -> float:
        work: _Work = request.work
        to_come = work.life[work.at : work.at + self.iterations(request)]
        other_rows = rows - self.rows(request)
        return sum(self.cost(group, other_rows + steps if group.phase in STEPS else rows) for group, steps in to_come)

    def next_group(self, request: Request) -> Group | None:
        work: _Work = request.work
        return None if request.phase == VAE else work.life[work.at + 1][0]

    def limit(self, group: Hashable) -> int:
        assert isinstance(group, Group)
        rows = self._limits.get(group)
        if rows is None:
            rows = self._limits[group] = limit(self._costs, self._device, group)
        return rows

    def lane_of(self, group: Hashable) -> str:
        return LANE

    def cost(self, group: Hashable, rows: int) -> float:
        assert isinstance(group, Group)
        return self._costs(*group, rows)

    # -- one iteration ---------------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request]) -> SimulatedTicket:
        """Start after the lane's current iteration, if there is one."""
        group, rows = self.group(requests[0]), sum(self.rows(request) for request in requests)
        lane = self.lane_of(group)
        begins = max(self.clock(), self._free_at.get(lane, 0.0))
        ends = self._free_at[lane] = begins + self.cost(group, rows)
        self._on_launch(IterationSpan(lane, begins, ends, group.phase, rows))
        return SimulatedTicket(self, requests, ends)

    def commit(self, request: Request) -> Outcome:
        """Advance one request by one iteration."""
        work: _Work = request.work
        steps = len(work.life) - 2
        if request.phase == VAE:
            return Outcome((steps, steps), result=True, finished=True)
        progress = (work.at, steps)  # encoding is no step
        work.at += 1
        request.phase = work.group.phase
        if work.narrows():  # the second row, and the copy's
            size_bytes = 2 * _row_bytes(self._costs, request.parameters)
            work.size_bytes -= size_bytes
            self.memory.give(size_bytes)
        return Outcome(progress)


def _phase(parameters: ImageParameters, deep: bool) -> str:
    return DEEP if deep or parameters.deepcache is None else SHALLOW[parameters.deepcache.depth]
