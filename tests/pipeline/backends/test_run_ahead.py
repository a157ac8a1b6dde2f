"""Running ahead of the device: what is queued is bounded, nothing is lost, and the host's work overlaps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.backends.run_ahead import RunAhead

_BOUND_S = 0.025


@dataclass
class Device:
    """A device with a queue, and a host with a clock."""

    now: float = 0.0
    free_at: float = 0.0

    def submit(self, seconds: float) -> None:
        self.free_at = max(self.now, self.free_at) + seconds

    def event(self) -> Event:
        return Event(self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ahead(self, seconds: float = _BOUND_S) -> RunAhead:
        return RunAhead(torch.device("cpu"), seconds, event=self.event, clock=lambda: self.now, sleep=self.sleep)


@dataclass
class Event:
    device: Device
    at: float = field(default=math.nan)

    def record(self) -> None:
        self.at = max(self.device.now, self.device.free_at)

    def query(self) -> bool:
        return self.device.now >= self.at

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end_event: Event, /) -> float:
        assert self.query() and end_event.query()
        return 1e3 * (end_event.at - self.at)


def play(work: list[float], host_s: float, bound_s: float) -> tuple[Device, list[float], float]:
    """The device, what was observed of each iteration, and the most that was queued when one returned."""
    device, seen, most = Device(), [], 0.0
    ahead = device.ahead(bound_s)
    for seconds in work:
        device.now += host_s
        with ahead.iteration(seconds, seen.append):
            device.submit(seconds)
        most = max(most, device.free_at - device.now)
    with ahead.iteration(math.inf, lambda _: None):
        pass
    return device, seen, most


_WORK = st.lists(st.floats(1e-4, 0.2), min_size=1, max_size=30)


@given(_WORK, st.floats(0, 0.003))
@example([0.019, 0.0008] * 5, 0.0012)
def test_no_more_is_queued_than_the_bound_and_each_iteration_is_observed_in_order(
    work: list[float], host_s: float
) -> None:
    device, seen, most = play(work, host_s, _BOUND_S)
    assert most <= _BOUND_S + 1e-9
    assert device.now == pytest.approx(max(device.free_at, len(work) * host_s))
    assert len(seen) == len(work)
    for observed, seconds in zip(seen, work, strict=True):
        assert observed >= seconds - 1e-9
    waited, _, _ = play(work, host_s, 0.0)
    assert device.now <= waited.now + 1e-9


@pytest.mark.parametrize(("work", "host_s"), [([0.019, 0.0008] * 10, 0.0012), ([0.129] * 10, 0.020)])
def test_the_host_works_while_the_device_computes(work: list[float], host_s: float) -> None:
    """A single image with DeepCache, and long steps of a busy host."""
    waited, _, _ = play(work, host_s, 0.0)
    device, seen, _ = play(work, host_s, _BOUND_S)
    assert waited.now == pytest.approx(sum(work) + len(work) * host_s)
    assert device.now == pytest.approx(sum(work) + host_s)
    assert seen == pytest.approx(work)  # the device never waited


@given(st.lists(st.tuples(st.floats(1e-3, 0.2), st.floats(1e-3, 0.2)), min_size=1, max_size=20))
def test_wrong_expectations_lose_no_iteration_and_little_time(work: list[tuple[float, float]]) -> None:
    device, seen = Device(), list[float]()
    ahead = device.ahead()
    for seconds, expected in work:
        device.now += 0.001
        with ahead.iteration(expected, seen.append):
            device.submit(seconds)
    with ahead.iteration(math.inf, lambda _: None):
        pass
    waited = sum(seconds + 0.001 for seconds, _ in work)
    looks = len(work) * 0.002
    assert len(seen) == len(work)
    assert device.free_at <= device.now <= waited + looks + 1e-9


def test_an_iteration_whose_result_is_read_has_ended() -> None:
    device, seen = Device(), list[float]()
    ahead = device.ahead()
    for _ in range(2):
        with ahead.iteration(0.01, seen.append):
            device.submit(0.01)
    assert device.now == 0.0 and not seen
    with ahead.iteration(math.inf, seen.append):
        device.submit(0.03)
    assert device.now == pytest.approx(0.05)
    assert seen == pytest.approx([0.01, 0.01, 0.03])


def test_one_that_fails_is_not_observed() -> None:
    device, seen = Device(), list[float]()
    ahead = device.ahead()
    with pytest.raises(RuntimeError, match="too large"), ahead.iteration(0.01, seen.append):
        raise RuntimeError("too large")
    with ahead.iteration(math.inf, seen.append):
        device.submit(0.02)
    assert seen == pytest.approx([0.02])


def test_on_a_cpu_nothing_is_queued() -> None:
    seen: list[float] = []
    ahead = RunAhead(torch.device("cpu"))
    with ahead.iteration(0.001, seen.append):
        assert not seen
    assert len(seen) == 1 and seen[0] >= 0
    with pytest.raises(ValueError, match="x"), ahead.iteration(0.001, seen.append):
        raise ValueError("x")
    assert len(seen) == 1
