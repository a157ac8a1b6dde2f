"""A unit of work as the scheduler sees it, from submission to its one and only end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The state of a request. The last four are final: a request reaches exactly one of them, once."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        return self not in (State.WAITING, State.RUNNING)


@dataclass(slots=True)
class Outcome:
    """The result of one iteration for one request. Listeners receive it, too.

    `progress` is (steps done, steps in all) as a person counts them. `result` is set on the iteration
    that finishes the request; `error` on one that fails it alone.
    """

    progress: tuple[int, int] | None = None
    preview: Any = None
    token: Any = None
    result: Any = None
    error: BaseException | None = None
    finished: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One request. Times are seconds on the engine's clock.

    `priority` 0 is the most urgent (as in Celery). `deadline` is the moment after which the result is
    worthless: the request then ends `expired`. Without one, `deadline` is infinite and order falls back to
    arrival (which `add` sets). `modality` names the runner, and `model` which of its models, if it has several; `phase`
    and `work` belong to that runner alone. `tenant` names its owner: tenants share the device.
    """

    id: str
    modality: str
    parameters: Any
    priority: int = 0
    deadline: float = math.inf
    arrival: float = 0.0
    listener: Callable[[Request, Outcome], None] | None = None
    tenant: str = ""
    model: str = ""

    state: State = State.WAITING
    phase: str = ""
    checked: Any = None  # what the runner's `check` found out, for its `admit`
    work: Any = None
    result: Any = None
    error: BaseException | None = None
    started: float | None = None
    ended: float | None = None

    in_flight: bool = field(default=False, repr=False)
    alone: bool = field(default=False, repr=False)  # its batch failed: it is retried by itself
    stop: State | None = field(default=None, repr=False)  # the end that was asked for while it was in flight
    due: float = field(default=math.inf, repr=False)  # deadline, or the one that the runner's patience implies
    sequence: int = field(default=0, repr=False)
    aged: bool = field(default=False, repr=False)  # its tenant's oldest, and has waited longer than anything should

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 9:
            raise ValueError(f"priority must be between 0 (most urgent) and 9, not {self.priority}")
        if math.isnan(self.deadline) or math.isnan(self.arrival):
            raise ValueError("deadline and arrival must not be NaN")

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key: priority first, then deadline (given or implied), then order of submission."""
        return (self.priority, self.due, self.sequence)

    @property
    def turn(self) -> tuple[int, float, int]:
        """Sort key among one tenant's requests: aged ones first, the older before the younger, then by urgency."""
        return (-1, 0.0, self.sequence) if self.aged else (self.priority, self.due, self.sequence)
