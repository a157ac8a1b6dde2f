"""One thread that turns submitted requests into results: it asks the scheduler, launches and commits.

Threads and clocks live here; the scheduler makes every decision, the executor keeps what is under way, and the runners
do all work.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

from core import threads
from core.batching.executor import BatchExecutor, Tick
from core.batching.pending import Aborted, Closed, Expired, PendingResults
from core.batching.request import Request, State
from core.batching.runner import DeviceLost, Runner
from core.batching.scheduler import Scheduler

__all__ = ["Aborted", "Closed", "Engine", "Expired", "Tick", "end_process"]

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5  # the longest the thread sleeps: `last_tick` tells others that it lives
_POLL_S = 0.001  # how often a caller looks whether the thread has answered


def end_process(error: BaseException) -> None:
    """The default answer to a device error that sticks: log, and end without running any more code on it."""
    threads.end_process(70, "device lost, exiting: %s", error)


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
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Event()
        self._pending = PendingResults()
        self._executor = BatchExecutor(self._scheduler, clock, wake=self._wake.set, on_tick=on_tick)
        self._stopping = False
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
        future = self._pending.accept(request, lambda: self._inbox.append(("add", request)))
        self._wake.set()
        return future

    def retry_admission(self) -> None:
        """Ask runners again whether waiting requests can be admitted. On any thread."""
        self._inbox.append(("retry admission", None))
        self._wake.set()

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
        self._pending.refuse()
        unstarted = self._ask("hand back")
        until = self.clock() + timeout_s
        while self._pending.futures and self.alive and self.clock() < until:
            time.sleep(_POLL_S)
        unfinished = self._ask("give up")
        while self._pending.futures and self.alive:
            time.sleep(_POLL_S)
        return unstarted + [r for r in unfinished if r.state is not State.DONE]

    def _ask(self, operation: str) -> list[Request]:
        answer: Future[list[Request]] = Future()
        self._inbox.append((operation, answer))
        self._wake.set()
        while not answer.done() and self.alive:
            time.sleep(_POLL_S)
        return answer.result() if answer.done() else []

    def close(self) -> None:
        """End what is live (futures raise `Closed`) and the thread, once the iterations under way ended."""
        self._pending.refuse()
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
        """The launch time of the oldest iteration under way, on the engine's clock. None: nothing is under way."""
        return min((started for _, _, started in tuple(self._executor.flying)), default=None)

    # -- the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping and not self._executor.flying):
                self._tick()
            self._take_inbox()
            self._abort_live()
            self._end_all(Closed("the engine was closed"))
        except BaseException as error:
            try:
                log.exception("the engine thread failed")
                if isinstance(error, DeviceLost):
                    self._on_device_lost(error)
            finally:
                self._end_all(error)

    def _tick(self) -> None:
        self.last_tick = self.clock()
        self.ticks += 1
        came = self._take_inbox()
        landed = self._executor.land()
        now = self.clock()
        if self._stopping:
            self._abort_live()
            self._look = False
        elif came or landed or self._look or now >= self._scheduler.next_deadline():
            batches = self._scheduler.schedule(now)
            launched = [self._executor.launch(batch) for batch in batches]
            # a lane with a second place may take another batch; what failed to launch is ready again
            self._look = not all(launched) or (bool(batches) and self._depth > 1)
        self._tell_ended()
        if not landed and not self._look:
            self._sleep()

    def _sleep(self) -> None:
        """Wait until there is something to do: a ticket is ready, a request has come, a deadline passes."""
        if not self._executor.flying:
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
            message, value = self._inbox.popleft()
            if message == "add":
                self._checked = False
                self._scheduler.add(value, self.clock())
            elif message == "abort":
                self._scheduler.abort(value, self.clock())
            elif message == "retry admission":
                continue
            elif message == "hand back":
                handed = self._scheduler.hand_back()
                for request in handed:
                    self._pending.resolve(request, Closed("handed back: the engine is draining"))
                value.set_result(handed)
            else:
                live = list(self._scheduler.live.values())
                self._abort_live()
                value.set_result(live)
        return came > 0

    def _abort_live(self) -> None:
        for request_id in list(self._scheduler.live):
            self._scheduler.abort(request_id, self.clock())

    def _tell_ended(self) -> None:
        for request in self._scheduler.take_ended():
            self._pending.end(request, closing=self._stopping)

    def _end_all(self, error: BaseException) -> None:
        """Nobody is left waiting for a result that no longer comes."""
        self._tell_ended()
        self._pending.fail_all(error)
        while self._inbox:  # whoever puts in something later also looks whether the thread lives
            _, value = self._inbox.popleft()
            if isinstance(value, Future):
                value.set_result([])
