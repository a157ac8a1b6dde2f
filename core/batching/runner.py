"""The interfaces of a modality to scheduler and engine: Runner and Ticket, and a lane for the CPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from core.batching.request import Outcome, Request
from core.failures import DeviceLost as DeviceLost
from core.failures import OutOfMemory as OutOfMemory
from core.failures import device_error
from core.threads import VitalThread

T = TypeVar("T")


class NotYet(NamedTuple):
    """A request cannot be admitted now: `resource`, one of its `resources`, has no room; "": what all requests share
    has none. `pending`: there will be room although nothing runs, since the runner is loading what it needs.
    """

    resource: str = ""
    pending: bool = False


class Ticket(Protocol):
    """One iteration under way. A transaction: nothing about a request changes before `outcome` is called."""

    def ready(self) -> bool:
        """Return whether the iteration has ended, without blocking."""
        ...

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, once the iteration has ended; at once if it has. Asked for once."""
        ...

    def outcome(self) -> Mapping[str, Outcome]:
        """Commit, and return what each request got, by id; or raise what the iteration raised, as `device_error`.

        Called once, after `ready`. It commits all of the batch or, where it raises, nothing.
        """
        ...


class Runner(Protocol):
    """One modality's way of working. All methods but `check` are called from the engine's thread only."""

    @property
    def modality(self) -> str: ...

    @property
    def patience_s(self) -> float:
        """The deadline that a request without one is ordered by: arrival plus this many seconds."""
        ...

    def check(self, request: Request) -> None:
        """Raise `Invalid`, naming the field, for what can never be served. On the submitting thread."""
        ...

    def resources(self, request: Request) -> frozenset[str]:
        """The names of what a request needs beside what all share, such as a cache of files. They never change.

        A request that waits for one of these delays only requests that need one of them too.
        """
        ...

    def admit(self, request: Request) -> NotYet | None:
        """Take all that the request will hold and set its phase; `NotYet`: nothing is held.

        Where several things have no room, one of its `resources` is named before what all requests share.
        """
        ...

    def release(self, request: Request) -> None:
        """Give everything back, however the request ended. Called once for each admitted request."""
        ...

    def held(self) -> int:
        """The number of slots and pages are taken by all requests. The engine checks that idle means none."""
        ...

    def group(self, request: Request) -> Hashable:
        """Requests of equal group may share one forward."""
        ...

    def rows(self, request: Request) -> int:
        """The number of rows the request brings into a forward."""
        ...

    def iterations(self, request: Request) -> int:
        """The number of iterations the request still needs before a phase of one shot: 1 in such a phase."""
        ...

    def left_s(self, request: Request, rows: int) -> float:
        """Seconds that these iterations take, each in a forward of so many rows."""
        ...

    def next_group(self, request: Request) -> Hashable:
        """The group after the next iteration; None where there is none, or where nobody can know."""
        ...

    def limit(self, group: Hashable) -> int:
        """The most rows that one forward of this group may have."""
        ...

    def lane_of(self, group: Hashable) -> str:
        """The queue of the device on which this group runs. Batches of different lanes overlap."""
        ...

    def cost(self, group: Hashable, rows: int) -> float:
        """Seconds that one iteration of so many rows takes, as measured so far."""
        ...

    def launch(self, requests: Sequence[Request]) -> Ticket:
        """Start one iteration for requests of one group."""
        ...


@runtime_checkable
class PreemptibleRunner(Runner, Protocol):
    """A runner whose requests tell something in every iteration, and come to hold more as they run.

    So that nobody waits long for the next word, its batches are as wide as `pace_s` allows, and so are others' beside
    them. And a request may have to wait again because others grew.
    """

    @property
    def pace_s(self) -> float:
        """The longest that one iteration should take."""
        ...

    @property
    def overlaps(self) -> bool:
        """Return whether its iterations run beside others' on the device, and not in turns with them.

        Then nobody's batches are held narrow for its pace.
        """
        ...

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Take what the next iteration of these requests needs beyond what they hold. False: there is too little."""
        ...

    def preempt(self, request: Request) -> None:
        """Give back all that a request holds that is not under way. Admitted anew it goes on from where it was."""
        ...


class Lane:
    """A thread that runs callables one after another: what a CUDA stream is to a GPU, on a CPU.

    Runners that share a processor share a Lane: their forwards take turns instead of fighting for cores. Whatever
    else computes in the process (loading, measuring) should run here too: OpenMP keeps a team of threads for each
    thread that ever computed in parallel, and with more threads than cores all of them wait asleep, which made small
    forwards twice as slow (GNU libgomp, OMP_WAIT_POLICY).
    """

    def __init__(self, name: str = "lane") -> None:
        self._queue: queue.SimpleQueue[LaneTicket | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = VitalThread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, compute: Callable[[], Any], commit: Callable[[Any], Mapping[str, Outcome]]) -> LaneTicket:
        """Run `compute` on the lane; `commit` turns its value into outcomes on the thread that asks."""
        if self._closed:
            raise RuntimeError("the lane is closed")
        ticket = LaneTicket(compute, commit)
        self._queue.put(ticket)
        return ticket

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the lane's thread and wait for it; raises what it raises."""
        value: list[T] = []
        self.start(lambda: value.append(function()), lambda _: {}).outcome()
        return value[0]

    def close(self) -> None:
        """Let what was started end, then stop the thread. Not while others may still start something."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            ticket.run()
            del ticket  # else its model would stay in memory until the next one


class LaneTicket:
    """The ticket of a callable on a `Lane`."""

    def __init__(self, compute: Callable[[], Any], commit: Callable[[Any], Mapping[str, Outcome]]) -> None:
        self._compute = compute
        self._commit = commit
        self._ended = threading.Event()
        self._wake: Callable[[], None] | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._compute()
        except BaseException as error:  # handed to whoever asks for the outcome
            self._error = device_error(error)
        finally:
            self._ended.set()
            if self._wake is not None:
                self._wake()

    def ready(self) -> bool:
        return self._ended.is_set()

    def notify(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._ended.is_set():
            wake()  # perhaps a second time: better than never

    def outcome(self) -> Mapping[str, Outcome]:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._commit(self._value)
