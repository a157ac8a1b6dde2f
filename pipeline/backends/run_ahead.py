"""Asynchronous scheduling: the host prepares an iteration while the device still computes the ones before it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

AHEAD_S = 0.025
_LOOK_S, _LEAST_S = 0.002, 1e-5  # of one sleep at most, and at least


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
    """Lets an iteration return `seconds` before the device is expected to have ended all that is queued.

    Committing, scheduling, gathering rows and launching a graph take the host about a millisecond, and several times
    that while other threads store finished images; the device would otherwise be idle in it. The price is that a
    request which arrives in the meantime waits for what is queued. Called by one thread, on one stream.
    """

    def __init__(
        self, device: torch.device, seconds: float = AHEAD_S, *, event: Callable[[], DeviceEvent] | None = None,
        clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """`event` makes the device's events; default: CUDA's on a GPU. Elsewhere nothing is ever queued."""
        if event is None and device.type == "cuda":
            event = partial(torch.cuda.Event, enable_timing=True)
        self._event = event
        self._seconds = seconds
        self._clock, self._sleep = clock, sleep
        self._queued: deque[_Queued] = deque()
        self._begun = 0.0  # when the device began the oldest, at the latest

    @contextmanager
    def iteration(self, expected_s: float, observe: Callable[[float], None]) -> Iterator[None]:
        """Enter an iteration whose work the body submits; infinite `expected_s`: it has ended when this returns.

        `observe` is called, now or in a later iteration, with the seconds that the device spent on it, which include
        those in which it waited for the host. Not if the body raises.
        """
        if self._event is None:
            started = self._clock()
            yield
            return observe(self._clock() - started)
        start_event, end_event = self._event(), self._event()
        start_event.record()
        yield
        end_event.record()
        if not self._queued:
            self._begun = self._clock()
        self._queued.append(_Queued(start_event, end_event, expected_s, observe))
        while self._queued:
            oldest, left_s = self._queued[0], self._left_s - self._seconds
            if oldest.end_event.query():
                self._end_oldest()
            elif left_s <= 0:
                return
            elif math.isinf(left_s):
                oldest.end_event.synchronize()
            else:  # the device may end sooner than expected
                self._sleep(max(_LEAST_S, min(left_s, _LOOK_S)))

    @property
    def _left_s(self) -> float:
        """Seconds until the device is expected to have ended all that is queued."""
        oldest, *others = (queued.expected_s for queued in self._queued)
        return max(0.0, oldest - (self._clock() - self._begun)) + sum(others)

    def _end_oldest(self) -> None:
        start_event, end_event, _, observe = self._queued.popleft()
        self._begun = self._clock()
        observe(start_event.elapsed_time(end_event) / 1e3)
