"""Runs batches: launches them on their runners, and reports what came of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.batching.batcher import Batch
from core.batching.request import Outcome, Request
from core.batching.runner import DeviceLost, Ticket
from core.batching.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tick:
    """The record of a batch that ended, passed to observers.

    `seconds` are those from its launch to its outcome. Where iterations run ahead of the device, a short one's outcome
    comes before its end, and a later one waits for both.
    """

    modality: str
    group: Any
    rows: int
    requests: int
    seconds: float
    error: BaseException | None


class BatchExecutor:
    """Keeps batches from launch to outcome, in `flying`: each with its ticket and when it was launched.

    The scheduler gets their outcomes, listeners each request's, `on_tick` a record of each batch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        wake: Callable[[], None],
        on_tick: Callable[[Tick], None] | None,
    ) -> None:
        """`wake` is called, on any thread, when a batch has ended."""
        self._scheduler = scheduler
        self._clock = clock
        self._wake = wake
        self._on_tick = on_tick
        self.flying: list[tuple[Batch, Ticket, float]] = []

    def launch(self, batch: Batch) -> bool:
        """Start a batch. False: it failed at once."""
        started = self._clock()
        try:
            ticket = batch.runner.launch(batch.requests)
        except Exception as error:
            self._failed(batch, error, started)
            return False
        self.flying.append((batch, ticket, started))
        ticket.notify(self._wake)
        return True

    def land(self) -> bool:
        """Commit what is ready, and tell listeners. Returns whether anything was."""
        ready = [entry for entry in self.flying if entry[1].ready()]
        for entry in ready:
            self.flying.remove(entry)
            batch, ticket, started = entry
            try:
                outcomes = ticket.outcome()
            except Exception as error:
                self._failed(batch, error, started)
                continue
            now = self._clock()
            self._observe(batch, now - started, None)
            self._scheduler.finish(batch, outcomes, now)
            for request in batch.requests:
                if request.stop is None and request.id in outcomes:
                    self._tell(request, outcomes[request.id])
        return bool(ready)

    def _failed(self, batch: Batch, error: Exception, started: float) -> None:
        if isinstance(error, DeviceLost):
            raise error
        now = self._clock()
        self._observe(batch, now - started, error)
        rows = self._scheduler.fail(batch, error, now)
        if len(batch.requests) == 1:
            answer = "it fails"
        elif rows is not None:
            answer = f"from now on at most {rows} rows"
        else:
            answer = "retried one request at a time"
        log.warning(
            "%s batch of %d rows, group %s, failed (%s: %s): %s",
            batch.runner.modality, batch.rows, batch.group, type(error).__name__, error, answer,
        )  # fmt: skip

    def _observe(self, batch: Batch, seconds: float, error: BaseException | None) -> None:
        if self._on_tick is not None:
            modality, requests = batch.runner.modality, len(batch.requests)
            try:
                self._on_tick(Tick(modality, batch.group, batch.rows, requests, seconds, error))
            except Exception:
                log.exception("the observer of ticks failed")

    def _tell(self, request: Request, outcome: Outcome) -> None:
        if request.listener is not None:
            try:
                request.listener(request, outcome)
            except Exception:
                log.exception("the listener of request %s failed", request.id)
