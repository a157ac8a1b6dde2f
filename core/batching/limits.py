"""Limits the rows of a batch where memory has run out: halved at once, doubled after long good conduct."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from core.batching.runner import Runner

_TRIAL = 64  # batches at a lowered limit before twice as much is tried; doubled whenever memory runs out


@dataclass(slots=True)
class _Cap:
    """A limit of `rows` rows, until `trial` batches of about that width have succeeded."""

    runner: Runner
    rows: int
    trial: int = _TRIAL
    succeeded: int = 0


class Limits:
    """The runners' limits, lowered by (modality, group) where memory ran out.

    One bad moment (another process, a neighbour on another lane) must not slow a worker for ever, so a
    lowered limit is tried again; where it fails again it is tried ever more rarely, so that a true limit
    costs next to nothing.
    """

    def __init__(self) -> None:
        self._caps: dict[tuple[str, Hashable], _Cap] = {}

    def of(self, runner: Runner, group: Hashable) -> int:
        """The most rows that one forward of this group may have now."""
        cap = self._caps.get((runner.modality, group))
        return runner.limit(group) if cap is None else min(runner.limit(group), cap.rows)

    def lower(self, runner: Runner, group: Hashable, rows: int) -> int:
        """A batch of so many rows did not fit: half of it from now on. Returns the new limit."""
        cap = self._caps.get((runner.modality, group))
        if cap is None:
            cap = self._caps[runner.modality, group] = _Cap(runner, rows)
        else:
            cap.trial *= 2
        cap.rows, cap.succeeded = max(1, rows // 2), 0
        return cap.rows

    def fitted(self, runner: Runner, group: Hashable, rows: int) -> None:
        """A batch of so many rows fitted."""
        cap = self._caps.get((runner.modality, group))
        if cap is None or 2 * rows <= cap.rows:
            return
        cap.succeeded += 1
        if cap.succeeded >= cap.trial:
            cap.rows, cap.succeeded = min(2 * cap.rows, runner.limit(group)), 0

    def lowered(self) -> Mapping[tuple[str, Hashable], int]:
        """The limits in rows that are lower than their runner's own, by (modality, group)."""
        return {key: cap.rows for key, cap in self._caps.items() if cap.rows < cap.runner.limit(key[1])}
