"""Asynchronous scheduling: the host prepares an iteration while the device still computes the ones before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

AHEAD_S = 0.025


class DeviceEvent(Protocol):
    """A point in the device's work, as `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another; both have happened."""
        ...


class _Queued(NamedTuple):
    start_event: DeviceEvent
    end_event: DeviceEvent
    expected_s: float
    observe: Callable[[float], None]


class RunAhead:
    """Lets an iteration return before the device has ended it, while no more than `seconds` of work are queued.

    Scheduling, gathering rows and launching a graph take the host about a millisecond, in which the device would
    otherwise be idle: much beside a shallow step, or a step of one image. The price is that a request which arrives
    waits for what is queued. Long iterations are waited for as ever. Called by one thread, on one stream.
    """

    def __init__(
        self, device: torch.device, seconds: float = AHEAD_S, *, event: Callable[[], DeviceEvent] | None = None
    ) -> None:
        """`event` makes the device's events; default: CUDA's on a GPU. Elsewhere nothing is ever queued."""
        if event is None and device.type == "cuda":
            event = partial(torch.cuda.Event, enable_timing=True)
        self._event = event
        self._seconds = seconds
        self._queued: deque[_Queued] = deque()

    @contextmanager
    def iteration(self, expected_s: float, observe: Callable[[float], None]) -> Iterator[None]:
        """Enter an iteration whose work the body submits; infinite `expected_s`: it has ended when this returns.

        `observe` is called, now or in a later iteration, with the seconds that the device spent on it, which include
        those in which it waited for the host. Not if the body raises.
        """
        if self._event is None:
            started = time.perf_counter()
            yield
            return observe(time.perf_counter() - started)
        start_event, end_event = self._event(), self._event()
        start_event.record()
        yield
        end_event.record()
        self._queued.append(_Queued(start_event, end_event, expected_s, observe))
        while self._queued and (self._ahead_s > self._seconds or self._queued[0].end_event.query()):
            self._wait()

    @property
    def _ahead_s(self) -> float:
        return sum(queued.expected_s for queued in self._queued)

    def _wait(self) -> None:
        """Wait for the oldest iteration."""
        start_event, end_event, _, observe = self._queued.popleft()
        end_event.synchronize()
        observe(start_event.elapsed_time(end_event) / 1e3)
