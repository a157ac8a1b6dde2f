"""Measures contenders in turns: a shared machine's speed changes from minute to minute, and so meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

C = TypeVar("C")
M = TypeVar("M")


class LeftOut(RuntimeError):
    """A contender cannot be measured here. The message has the reason."""


class Contender(Protocol):
    """What draws images when it is asked to, and uses no processor meanwhile."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Return what it is, as results have it."""

    @property
    def processes(self) -> int:
        """Return the number of processes that draw at once."""

    @property
    def imported(self) -> set[str]:
        """Return the files of this project that have drawn so far, for provenance."""

    def draw(self, first: int, count: int) -> tuple[float, list[list[float]]]:
        """Draw the images with the numbers from `first` on.

        Returns the seconds, and the ends of images of each of its processes, in seconds from its start.
        """


def alternate(
    contenders: Mapping[str, C], turns: int, measure: Callable[[str, C, int], M], left_out: dict[str, str] | None = None
) -> dict[str, list[M]]:
    """Return what `measure` gives for each contender in each turn, which are counted from 0; each turn has all of them.

    A contender for which it raises `LeftOut` is measured no more, and noted in `left_out` with the reason; without
    `left_out` that is raised.
    """
    measured: dict[str, list[M]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name, contender in contenders.items():
            if name not in measured:
                continue
            try:
                measured[name].append(measure(name, contender, turn))
            except LeftOut as error:
                if left_out is None:
                    raise
                left_out[name] = str(error)
                del measured[name]
    return measured
