"""Generates request traces: Poisson or bursty arrivals of a mix of image requests, from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from contract.image import ImageParameters
from contract.plan import DeepCache

T = TypeVar("T")
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WeightedChoice(Generic[T]):
    """A weighted random choice."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def shares(self) -> list[float]:
        return [weight / sum(self.weights) for weight in self.weights]

    def draw(self, rng: np.random.Generator, count: int) -> list[T]:
        return [self.values[index] for index in rng.choice(len(self.values), count, p=self.shares())]


def always(value: T) -> WeightedChoice[T]:
    return WeightedChoice((value,), (1.0,))


def parse(text: str, read: Callable[[str], T]) -> WeightedChoice[T]:
    """Parse values with weights: "20", or "20=3,30=1". Raises ValueError with a message for users."""
    values, weights = [], []
    for part in text.split(","):
        word, equals, weight = part.strip().partition("=")
        values.append(read(word))
        try:
            weights.append(float(weight) if equals else 1.0)
        except ValueError:
            raise ValueError(f"{part.strip()}: the weight must be a number") from None
        if not 0 < weights[-1] < math.inf:
            raise ValueError(f"{part.strip()}: the weight must be above 0")
    if len(set(values)) < len(values):
        raise ValueError("names a value twice")
    return WeightedChoice(tuple(values), tuple(weights))


Guidance = bool | tuple[float, float]
"""Of all steps, of none, or of this share of them."""


@dataclass(frozen=True)
class Mix:
    """The distribution of requests, with independent fields. `deadline_s` counts from the arrival."""

    size: WeightedChoice[tuple[int, int]]
    steps: WeightedChoice[int] = field(default_factory=lambda: always(20))
    guided: WeightedChoice[Guidance] = field(default_factory=lambda: always(True))
    deepcache: WeightedChoice[DeepCache | None] = field(default_factory=lambda: always(None))
    deadline_s: WeightedChoice[float] = field(default_factory=lambda: always(math.inf))
    priority: WeightedChoice[int] = field(default_factory=lambda: always(5))

    def kinds(self) -> list[tuple[ImageParameters, float]]:
        """Every possible request, with its probability."""
        return [
            (picture(size, steps, guided, deepcache), a * b * c * d)
            for size, a in zip(self.size.values, self.size.shares(), strict=True)
            for steps, b in zip(self.steps.values, self.steps.shares(), strict=True)
            for guided, c in zip(self.guided.values, self.guided.shares(), strict=True)
            for deepcache, d in zip(self.deepcache.values, self.deepcache.shares(), strict=True)
        ]


def picture(size: tuple[int, int], steps: int, guided: Guidance, deepcache: DeepCache | None) -> ImageParameters:
    scale, interval = 8.0 if guided else 1.0, guided if isinstance(guided, tuple) else None
    return ImageParameters(
        "any", 0, *size, steps=steps, guidance_scale=scale, deepcache=deepcache, guidance_interval=interval
    )


@dataclass(frozen=True)
class SimulatedJob:
    """One image request. `deadline` is a point in time; infinite without a deadline."""

    index: int
    arrival: float
    parameters: ImageParameters
    priority: int
    deadline: float


@dataclass(frozen=True)
class Bursts:
    """Alternating phases of traffic and silence, both of exponential length: a Poisson process switched by a Markov
    chain (Fischer and Meier-Hellstern, 1993, with no arrivals in one of the two states).
    """

    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        if not (0 < self.on_s < math.inf and 0 < self.off_s < math.inf):
            raise ValueError("bursts: both times must be above 0")


def arrivals(rng: np.random.Generator, count: int, rate: float, bursts: Bursts | None = None) -> Floats:
    """Return `count` arrival times at this mean rate; without bursts a Poisson process."""
    if bursts is None:
        return rng.exponential(1 / rate, count).cumsum()
    share = bursts.on_s / (bursts.on_s + bursts.off_s)
    on = rng.exponential(share / rate, count).cumsum()  # seconds of traffic until each arrival
    lengths: list[float] = []
    while sum(lengths) <= on[-1]:
        lengths += rng.exponential(bursts.on_s, 1 + int(on[-1] / bursts.on_s)).tolist()
    silences = rng.exponential(bursts.off_s, len(lengths))
    silences[0] *= rng.random() >= share  # it begins in either state, as often as it is in it
    moments: Floats = on + silences.cumsum()[np.searchsorted(np.cumsum(lengths), on)]
    return moments


def jobs(seed: int, count: int, rate: float, mix: Mix, bursts: Bursts | None = None) -> list[SimulatedJob]:
    """Return `count` jobs in order of arrival. Equal arguments give equal jobs; the rate affects only times."""
    clock, rng = np.random.default_rng(seed).spawn(2)
    when: Sequence[float] = arrivals(clock, count, rate, bursts).tolist()
    columns = [choice.draw(rng, count) for choice in (mix.size, mix.steps, mix.guided, mix.deepcache)]
    parameters_by_key: dict[Any, ImageParameters] = {}
    parameters = []
    for key in zip(*columns, strict=True):
        if key not in parameters_by_key:
            parameters_by_key[key] = picture(*key)
        parameters.append(parameters_by_key[key])
    priorities, deadlines = mix.priority.draw(rng, count), mix.deadline_s.draw(rng, count)
    return [
        SimulatedJob(index, arrival, request, priority, arrival + deadline_s)
        for index, (arrival, request, priority, deadline_s) in enumerate(
            zip(when, parameters, priorities, deadlines, strict=True)
        )
    ]
