"""Parses the simulator's command line options into a plan. Every error names the option."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from contract.card import MAX_STEPS
from contract.plan import GuidanceSchedule, parse
from core.config import Settings
from lab.bench.harness.record import BenchError
from lab.simulation import traffic
from lab.simulation.costs import ANY, Costs, Size
from lab.simulation.runner import Device
from lab.simulation.simulate import Plan
from lab.simulation.traffic import Bursts, Guidance, Mix, WeightedChoice

T = TypeVar("T")


def plan(options: argparse.Namespace, settings: Settings, costs: Costs | None = None) -> Plan:
    """Values without an option come from the settings; the default size is the table's largest.

    Raises `BenchError`. Without costs the plan is only validated, before they are measured.
    """
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise BenchError("--name: must be letters, digits, dots and dashes")
    if options.seed < 0:
        raise BenchError("--seed: must be at least 0")
    mix = Mix(
        size=_mix("--sizes", options.sizes, _size) if options.sizes else traffic.always(_largest(costs)),
        steps=_mix("--steps", options.steps, _whole(1, MAX_STEPS)),
        guided=_mix("--guidance", options.guidance, _guidance),
        deepcache=_mix("--deepcache", options.schedules, parse),
        deadline_s=_mix("--deadlines", options.deadlines, _deadline),
        priority=_mix("--priorities", options.priorities, _whole(0, 9)),
    )
    return Plan(
        mix=mix,
        gpus=_list("--gpus", options.gpus, int, "whole numbers"),
        loads=_list("--load", options.load, float, "numbers"),
        bursts=_bursts(options.bursts),
        pictures=options.pictures,
        seed=options.seed,
        image_jobs=settings.image_jobs,
        device=Device(
            max_requests=settings.max_requests,
            max_rows=settings.max_rows,
            memory_bytes=settings.memory_mib * 2**20 or None,
            patience_s=settings.image_objective_s,
            starvation_s=settings.starvation_s,
        ),
    )


def sizes(text: str | None) -> tuple[Size, ...]:
    """The sizes of the option --sizes; none if it is not given."""
    return _mix("--sizes", text, _size).values if text else ()


def _mix(option: str, text: str, read: Callable[[str], T]) -> WeightedChoice[T]:
    try:
        return traffic.parse(text, read)
    except ValueError as error:
        raise BenchError(f"{option}: {error}") from error


def _list(option: str, text: str, read: Callable[[str], T], name: str) -> tuple[T, ...]:
    try:
        values = tuple(read(word) for word in text.split(","))
    except ValueError:
        raise BenchError(f"{option}: must be {name}, with commas between them") from None
    if list(values) != sorted(set(values)):  # type: ignore[type-var]
        raise BenchError(f"{option}: must rise")
    return values


def _bursts(text: str | None) -> Bursts | None:
    if text is None:
        return None
    try:
        on_s, off_s = (float(word) for word in text.split(","))
        return Bursts(on_s, off_s)
    except ValueError:
        raise BenchError("--bursts: must be two numbers above 0, such as 5,15") from None


def _largest(costs: Costs | None) -> Size:
    if costs is None:
        return ANY
    if not costs.sizes:
        raise BenchError(f"{costs.name}: has no size for which both deep and vae were measured")
    return max(costs.sizes, key=lambda size: (size[0] * size[1], size))


def _size(word: str) -> Size:
    if not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", word):
        raise ValueError(f"{word}: must be a size such as 1024x1024")
    width, height = word.split("x")
    return int(width), int(height)


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    def read(word: str) -> int:
        if not (re.fullmatch(r"[0-9]{1,6}", word) and minimum <= int(word) <= maximum):
            raise ValueError(f"{word}: must be a whole number between {minimum} and {maximum}")
        return int(word)

    return read


def _guidance(word: str) -> Guidance:
    if word in ("on", "off"):
        return word == "on"
    try:
        start, stop = map(float, word.split(":"))
        GuidanceSchedule((start, stop)).check(MAX_STEPS)
    except ValueError:
        raise ValueError(f"{word}: must be on, off, or a share of the steps such as 0:0.5") from None
    return start, stop


def _deadline(word: str) -> float:
    if word == "none":
        return math.inf
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{word}: must be seconds above 0, or none")
    return seconds
