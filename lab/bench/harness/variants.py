"""Finds how a pipeline draws fastest, by short trials of its variants."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from lab.bench.harness import record
from lab.bench.harness.processes import PREPARED_S, AnsweringProcess
from lab.bench.harness.turns import LeftOut

BATCHES = (4, 8, 16)  # of a pipeline that draws batches, beside single images
_GAIN = 1.03  # that a variant must bring to be taken


@dataclass(frozen=True)
class Variant:
    """A configuration of a pipeline: images at once, CPU threads, memory format, precision, compiler."""

    batch: int = 1
    threads: int = 1
    channels_last: bool = False
    bf16: bool = False
    compile: bool = False

    def side_by_side(self) -> Self:
        """Return the variant of one of several processes, each with one thread."""
        return replace(self, threads=1)


Start = Callable[[Variant, ExitStack], AnsweringProcess]
"""Starts a prepared process of a variant, which ends with the stack. Raises `LeftOut`."""


class BestVariant:
    """Finds how a pipeline draws fastest, by short trials: one change of its variant after the other, in this order."""

    def __init__(self, start: Start, changes: Sequence[Mapping[str, Any]], first: Variant) -> None:
        """`first` has all threads of the machine."""
        self._start = start
        self._changes = changes
        self._first = first
        self.trials: list[dict[str, Any]] = []
        self._number = 10**6

    def find(self, *, processes: bool = True, compile_limit_s: float = 0.0) -> tuple[Variant, int]:
        """The fastest variant, and in how many processes. Raises `LeftOut` if there is no such pipeline.

        Without `processes` it is one process with all threads, as one client has them for itself.
        """
        best, seen = self._first, {self._first}
        with ExitStack() as stack:
            process = self._start(best, stack)
            rate = self._tried([process], best)
            for change in self._changes:
                other = replace(best, **change)
                if other in seen:  # a change is repeated after others, which may have made it worth it
                    continue
                seen.add(other)
                limit_s = compile_limit_s if other.compile else PREPARED_S
                try:
                    best, rate = self._better(process, best, rate, other, limit_s)
                except LeftOut as error:
                    self._note({"variant": asdict(other), "left_out": str(error)})
                    stack.close()  # it has ended, or still works on that variant
                    process = self._start(best, stack)
        count = self._first.threads
        if count == 1 or not processes:
            return best, 1
        alone = best.side_by_side()
        with ExitStack() as stack:
            try:
                started = [self._start(alone, stack) for _ in range(count)]
                if self._tried(started, alone, compile_limit_s + PREPARED_S) > _GAIN * rate:
                    return alone, count
            except LeftOut as error:
                self._note({"variant": asdict(alone), "processes": count, "left_out": str(error)})
        return best, 1

    def _better(
        self, process: AnsweringProcess, best: Variant, rate: float, other: Variant, limit_s: float
    ) -> tuple[Variant, float]:
        process.ask({"variant": asdict(other)})
        tried = self._tried([process], other, limit_s)
        if tried > _GAIN * rate:
            return other, tried
        process.ask({"variant": asdict(best)})
        return best, rate

    def _tried(self, processes: Sequence[AnsweringProcess], variant: Variant, limit_s: float = PREPARED_S) -> float:
        """Images per second of one batch in each process, after one image that warms up."""
        warm, count = variant.batch if variant.compile else 1, max(4, variant.batch)
        for images in (warm, count):
            started = time.perf_counter()
            for process in processes:
                process.send({"first": self._number, "count": images})
                self._number += images
            for process in processes:
                process.answer(limit_s)
            seconds = time.perf_counter() - started
        rate = count * len(processes) / seconds
        self._note({"variant": asdict(variant), "processes": len(processes), "images_per_s": round(rate, 4)})
        return rate

    def _note(self, trial: dict[str, Any]) -> None:
        self.trials.append(trial)
        record.progress(f"trial: {json.dumps(trial)}")
