"""Runs tenants' work items on its own threads: time-limited, in round-robin order, isolated from each other.

Used for batches and webhooks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from core.threads import started

log = logging.getLogger(__name__)

_IDLE_S = 10.0  # after which an idle thread ends


class DeadlineExceeded(RuntimeError):
    """An error: an item's time limit is reached, or the pool stops."""


class Deadline:
    """An item's time limit. Blocking calls wait at most `left_s`, within `closing`."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.aborted = False
        self._lock = threading.Lock()
        self._close: Callable[[], None] | None = None

    def left_s(self) -> float:
        """Remaining seconds. Raises `DeadlineExceeded` if there are none."""
        left = self.until - time.monotonic()
        if self.aborted or left <= 0:
            raise DeadlineExceeded("the item's deadline has passed")
        return left

    @contextmanager
    def closing(self, close: Callable[[], None]) -> Iterator[None]:
        """Call `close` on another thread at the time limit: it interrupts a blocking call in this context."""
        with self._lock:
            self._close = close
        try:
            self.left_s()
            yield
        finally:
            with self._lock:
                self._close = None

    def abort(self) -> None:
        with self._lock:
            self.aborted = True
            if self._close is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._close()


@dataclass(eq=False)
class _Item:
    tenant: str
    lane: str
    id: str
    work: Callable[[Deadline], None]
    bound: Deadline = field(default_factory=lambda: Deadline(0.0))
    late: bool = False  # its thread hangs, and another replaces it


class TenantPool:
    """A pool of threads: at most `threads` items at once, `of_tenant` per tenant and `of_lane` per lane of a tenant; in
    turn.

    An exception ends its item, and is logged. An item may take `item_s`: then its bound is aborted, and if its thread
    still hangs another replaces it; there are at most `threads` replacements. Items with the same id never run side by
    side.
    """

    def __init__(self, name: str, threads: int, *, of_tenant: int, of_lane: int, item_s: float) -> None:
        self._name = name
        self._threads = threads
        self._of_tenant = of_tenant
        self._of_lane = of_lane
        self._item_s = item_s
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Item]]] = OrderedDict()
        self._running: set[_Item] = set()
        self._ids: set[str] = set()
        self._load_of: Counter[str] = Counter()  # waiting and running
        self._load_of_lane: Counter[tuple[str, str]] = Counter()
        self._runs_of: Counter[str] = Counter()
        self._runs_of_lane: Counter[tuple[str, str]] = Counter()
        self._alive: set[threading.Thread] = set()
        self._idle = 0
        self._keeper: threading.Thread | None = None
        self._stopping = False

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def room(self) -> int:
        """The number of further items that a thread is free for."""
        with self._changed:
            return max(0, self._threads - len(self._ids))

    def full(self) -> tuple[set[str], set[tuple[str, str]]]:
        """Tenants, and lanes, whose further items would only wait for their own."""
        with self._changed:
            return (
                {tenant for tenant, n in self._load_of.items() if n >= self._of_tenant},
                {lane for lane, n in self._load_of_lane.items() if n >= self._of_lane},
            )

    def submit(self, tenant: str, lane: str, id: str, work: Callable[[Deadline], None]) -> bool:
        """Queue an item for the tenant's turn. False: one with this id waits or runs, or the pool stops."""
        with self._changed:
            if self._stopping or id in self._ids:
                return False
            item = _Item(tenant, lane, id, work)
            self._ids.add(id)
            self._load_of[tenant] += 1
            self._load_of_lane[tenant, lane] += 1
            self._waiting.setdefault(tenant, OrderedDict()).setdefault(lane, deque()).append(item)
            self._changed.notify_all()
            self._staff()
            return True

    def stop(self, within_s: float = 2.0) -> None:
        """Drop waiting items, abort running ones, and return when they have ended, or after `within_s`."""
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            running = list(self._running)
            self._changed.notify_all()
        for item in running:
            item.bound.abort()
        until = time.monotonic() + within_s
        for thread in [*self._alive, *filter(None, [self._keeper])]:
            thread.join(max(0.0, until - time.monotonic()))

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _staff(self) -> None:
        """Start a thread if one is missing."""
        late = min(self._threads, sum(item.late for item in self._running))
        if self._idle == 0 and len(self._alive) < self._threads + late:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._alive)}", daemon=True)
            if started(thread):  # else the next item starts it
                self._alive.add(thread)
        if self._keeper is None:
            keeper = threading.Thread(target=self._keep_time, name=f"{self._name}-time", daemon=True)
            self._keeper = keeper if started(keeper) else None

    def _next(self) -> _Item | None:
        """The next item of the tenant, and of its lane, served longest ago. Both move to the end."""
        for tenant, lanes in self._waiting.items():
            if self._runs_of[tenant] >= self._of_tenant:
                continue
            for lane, items in lanes.items():
                if self._runs_of_lane[tenant, lane] >= self._of_lane:
                    continue
                item = items.popleft()
                lanes.move_to_end(lane)
                self._waiting.move_to_end(tenant)
                if not items:
                    del lanes[lane]
                if not lanes:
                    del self._waiting[tenant]
                return item
        return None

    def _begin(self, item: _Item) -> None:
        item.bound = Deadline(self._item_s)
        self._running.add(item)
        self._runs_of[item.tenant] += 1
        self._runs_of_lane[item.tenant, item.lane] += 1
        self._changed.notify_all()  # the timekeeper

    def _end(self, item: _Item) -> None:
        self._running.discard(item)
        self._ids.discard(item.id)
        for counter in (self._load_of, self._runs_of):
            counter[item.tenant] -= 1
            if not counter[item.tenant]:
                del counter[item.tenant]
        for by_lane in (self._load_of_lane, self._runs_of_lane):
            by_lane[item.tenant, item.lane] -= 1
            if not by_lane[item.tenant, item.lane]:
                del by_lane[item.tenant, item.lane]
        self._changed.notify_all()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                item = self._awaited()
                if item is None:
                    self._alive.discard(threading.current_thread())
                    return
                self._begin(item)
                if self._waiting:
                    self._staff()
            try:
                item.work(item.bound)
            except DeadlineExceeded as error:
                if not self._stopping:
                    log.warning(
                        "%s: item %s of key %s failed: %s", self._name, item.id, item.tenant or "(no key)", error
                    )
            except Exception:
                log.exception("%s: unexpected error in item %s", self._name, item.id)
            finally:
                with self._changed:
                    self._end(item)
                    if item.late:  # another thread replaces this one
                        self._alive.discard(threading.current_thread())
                        if self._waiting:
                            self._staff()
            late = item.late
            del item  # what it holds is not kept alive until the next one
            if late:
                return

    def _awaited(self) -> _Item | None:
        """Wait for the next item. None: this thread is no longer needed."""
        until = time.monotonic() + _IDLE_S
        while not self._stopping:
            item = self._next()
            if item is not None:
                return item
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._idle += 1
            try:
                self._changed.wait(left)
            finally:
                self._idle -= 1
        return None

    def _keep_time(self) -> None:
        """Abort items beyond their time limit."""
        while True:
            with self._changed:
                if self._stopping:
                    return
                now = time.monotonic()
                over = [item for item in self._running if item.bound.until <= now and not item.late]
                if not over:
                    nearest = min((item.bound.until for item in self._running if not item.late), default=None)
                    self._changed.wait(None if nearest is None else max(0.01, nearest - now))
                    continue
                for item in over:
                    item.late = True
                self._staff()
            for item in over:
                item.bound.abort()
