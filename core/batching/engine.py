"""One thread that turns submitted requests into results: it asks the scheduler, launches and commits.

Threads and clocks live here; the scheduler makes every decision, and the runners do all work.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from core.batching.request import Outcome, Request, State
from core.batching.runner import DeviceLost, OutOfMemory, Runner, Ticket
from core.batching.scheduler import Batch, Scheduler

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5  # the longest the thread sleeps: `last_tick` tells others that it lives
_POLL_S = 0.001  # how often a caller looks whether the thread has answered


class Aborted(RuntimeError):
    """The request was aborted before it was done."""


class Expired(RuntimeError):
    """The request's deadline passed before it was done."""


class Closed(RuntimeError):
    """The engine takes no more requests, or stopped before this one was done."""


@dataclass(frozen=True, slots=True)
class Tick:
    """What an observer is told about each batch that ended."""

    modality: str
    group: Any
    rows: int
    requests: int
    seconds: float
    error: BaseException | None


def end_process(error: BaseException) -> None:
    """The default answer to a device error that sticks: log, and end without running any more code on it."""
    log.critical("the device is lost, the process ends: %s", error)
    logging.shutdown()
    os._exit(70)


class Engine:
    """Owns a scheduler and its thread. Thread-safe: `submit`, `abort`, `drain`, `close`."""

    def __init__(
        self,
        runners: Sequence[Runner],
        *,
        depth: int = 1,
        starvation_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        on_device_lost: Callable[[BaseException], None] = end_process,
        on_tick: Callable[[Tick], None] | None = None,
    ) -> None:
        self.clock = clock
        self.ticks = 0
        self.last_tick = clock()
        self._runners = {runner.modality: runner for runner in runners}
        self._scheduler = Scheduler(runners, depth=depth, starvation_s=starvation_s)
        self._depth = depth
        self._on_device_lost = on_device_lost
        self._on_tick = on_tick
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Any]] = {}
        self._tickets: list[tuple[Batch, Ticket, float]] = []
        self._accepting = True
        self._stopping = False
        self._error: BaseException | None = None
        self._checked = True
        self._look = True  # whether the scheduler may decide otherwise than when it was last asked
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Future[Any]:
        """Take a request in. Its future gets its result, or `Aborted`, `Expired`, `Closed` or its error.

        Raises `Invalid` (the runner's check), ValueError for a live id or an unknown modality, and `Closed`.
        """
        runner = self._runners.get(request.modality)
        if runner is None:
            served = ", ".join(self._runners)
            raise ValueError(f"modality {request.modality!r} is not served here; served: {served}")
        if request.state is not State.WAITING or request.sequence:
            raise ValueError(f"request {request.id!r} was submitted before")
        runner.check(request)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it is `abort` that stops a request and gives its slots back
        with self._lock:
            if not self._accepting:
                raise Closed("the engine takes no more requests") from self._error
            if request.id in self._futures:
                raise ValueError(f"id {request.id!r} is already in use by a live request")
            self._futures[request.id] = future
            self._inbox.append(("add", request))
        self._wake.set()
        return future

    def abort(self, request_id: str) -> None:
        """End a request early. It takes effect at the next iteration; an id that is not live is ignored."""
        self._inbox.append(("abort", request_id))
        self._wake.set()

    def drain(self, timeout_s: float = math.inf) -> list[Request]:
        """Take no more requests, hand back those that have not started, finish those that have.

        What still runs after `timeout_s` is aborted. Returns every request that was not finished, the
        unstarted ones first; their futures raise `Closed` and `Aborted`. Not to be called by a listener or a
        future's callback.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("drain waits for the engine's thread and cannot be called on it")
        with self._lock:
            self._accepting = False
        unstarted = self._ask("hand back")
        until = self.clock() + timeout_s
        while self._futures and self.alive and self.clock() < until:
            time.sleep(_POLL_S)
        unfinished = self._ask("give up")
        while self._futures and self.alive:
            time.sleep(_POLL_S)
        return unstarted + [r for r in unfinished if r.state is not State.DONE]

    def _ask(self, what: str) -> list[Request]:
        answer: Future[list[Request]] = Future()
        self._inbox.append((what, answer))
        self._wake.set()
        while not answer.done() and self.alive:
            time.sleep(_POLL_S)
        return answer.result() if answer.done() else []

    def close(self) -> None:
        """End what is live (futures raise `Closed`) and the thread, once the iterations under way ended."""
        with self._lock:
            self._accepting = False
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counts(self) -> dict[str, tuple[int, int]]:
        """(waiting, running) by modality."""
        return self._scheduler.counts()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_since(self) -> float | None:
        """When the oldest iteration under way was launched, on the engine's clock. None: nothing is under way."""
        return min((started for _, _, started in tuple(self._tickets)), default=None)

    # -- the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping and not self._tickets):
                self._tick()
            self._take_inbox()
            self._abort_live()
            self._tell_ended()
            self._end_all(Closed("the engine was closed"))
        except BaseException as error:
            self._error = error
            log.exception("the engine's thread ends")
            try:
                if isinstance(error, DeviceLost):
                    self._on_device_lost(error)
            finally:
                self._end_all(error)

    def _tick(self) -> None:
        self.last_tick = self.clock()
        self.ticks += 1
        came = self._take_inbox()
        landed = self._land()
        now = self.clock()
        if self._stopping:
            self._abort_live()
            self._look = False
        elif came or landed or self._look or now >= self._scheduler.next_deadline():
            batches = self._scheduler.schedule(now)
            launched = [self._launch(batch) for batch in batches]
            # a lane with a second place may take another batch; what failed to launch is ready again
            self._look = not all(launched) or (bool(batches) and self._depth > 1)
        self._tell_ended()
        if not landed and not self._look:
            self._sleep()

    def _sleep(self) -> None:
        """Until there is something to do: a ticket is ready, a request has come, a deadline passes."""
        if not self._tickets:
            if self._scheduler.idle and not self._checked:
                self._scheduler.check_idle()
                self._checked = True
            until_s = min(_HEARTBEAT_S, max(0.0, self._scheduler.next_deadline() - self.clock()))
            self._look = not self._wake.wait(until_s) and not self._scheduler.idle
            self._wake.clear()
            return
        until_s = min(_HEARTBEAT_S, max(0.0, self._scheduler.next_deadline() - self.clock()))
        self._wake.wait(until_s)
        self._wake.clear()

    def _take_inbox(self) -> bool:
        came = len(self._inbox)
        for _ in range(came):  # and no more: whoever keeps talking must not keep the engine from working
            what, value = self._inbox.popleft()
            if what == "add":
                self._checked = False
                self._scheduler.add(value, self.clock())
            elif what == "abort":
                self._scheduler.abort(value, self.clock())
            elif what == "hand back":
                handed = self._scheduler.hand_back()
                for request in handed:
                    self._resolve(request, Closed("handed back: the engine is draining"))
                value.set_result(handed)
            else:
                live = list(self._scheduler.live.values())
                self._abort_live()
                value.set_result(live)
        return came > 0

    def _abort_live(self) -> None:
        for request_id in list(self._scheduler.live):
            self._scheduler.abort(request_id, self.clock())

    def _launch(self, batch: Batch) -> bool:
        started = self.clock()
        try:
            ticket = batch.runner.launch(batch.requests)
        except Exception as error:
            self._failed(batch, error, started)
            return False
        self._tickets.append((batch, ticket, started))
        ticket.notify(self._wake.set)
        return True

    def _land(self) -> bool:
        ready = [entry for entry in self._tickets if entry[1].ready()]
        for entry in ready:
            self._tickets.remove(entry)
            batch, ticket, started = entry
            try:
                outcomes = ticket.outcome()
            except Exception as error:
                self._failed(batch, error, started)
                continue
            now = self.clock()
            self._observe(batch, now - started, None)
            self._scheduler.finish(batch, outcomes, now)
            for request in batch.requests:
                if request.stop is None and request.id in outcomes:
                    self._tell(request, outcomes[request.id])
        return bool(ready)

    def _failed(self, batch: Batch, error: Exception, started: float) -> None:
        if isinstance(error, DeviceLost):
            raise error
        now = self.clock()
        self._observe(batch, now - started, error)
        self._scheduler.fail(batch, error, now)
        if len(batch.requests) == 1:
            answer = "it fails"
        elif isinstance(error, OutOfMemory):
            rows = self._scheduler.caps.get((batch.runner.modality, batch.group), batch.rows)
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

    def _tell_ended(self) -> None:
        for request in self._scheduler.take_ended():
            match request.state:
                case State.DONE:
                    self._resolve(request, None)
                case State.ABORTED if self._stopping:
                    self._resolve(request, Closed(f"request {request.id} was not done when the engine closed"))
                case State.ABORTED:
                    self._resolve(request, Aborted(f"request {request.id} was aborted"))
                case State.EXPIRED:
                    self._resolve(request, Expired(f"request {request.id} was not done by its deadline"))
                case _:
                    self._resolve(request, request.error or RuntimeError("failed"))

    def _resolve(self, request: Request, error: BaseException | None) -> None:
        with self._lock:
            future = self._futures.pop(request.id, None)
        if future is None:
            return
        if error is None:
            future.set_result(request.result)
        else:
            future.set_exception(error)

    def _end_all(self, error: BaseException) -> None:
        """Nobody is left waiting for a result that no longer comes."""
        self._tell_ended()
        with self._lock:
            self._accepting = False
            futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(error)
        while self._inbox:  # whoever puts in something later also looks whether the thread lives
            _, value = self._inbox.popleft()
            if isinstance(value, Future):
                value.set_result([])
