"""Runs one round of a fault scenario: submits jobs, injects the fault, and checks every job at the end.

The checks hold for every accepted job, whatever the fault.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
from PIL import Image

from core.jobs import keys
from core.jobs.broker import PRIORITY_STEPS, QUEUES
from core.jobs.connection import StoreError
from core.jobs.record import QueueBacklog
from tests.faults.client import PATIENCE_S, Client, Order, Refused, patiently
from tests.faults.parts import Part, wait_for
from tests.faults.stack import FINAL, Entry, Stack

KEPT = 1000  # of a long stream the first entries are dropped, and at least so many stay
END_S = 180.0  # for all jobs of a round to end: far beyond what is needed, since it only decides that one is lost


@dataclass
class Outcome:
    """What a round came to. `recovery_s`: from the fault until the last job that it touched went on."""

    jobs: int = 0
    lost: int = 0
    twice: int = 0
    recovery_s: float | None = None
    problems: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Gallery:
    """What each order brings when nothing disturbs it."""

    def __init__(self) -> None:
        self.pictures: dict[Order, list[bytes]] = {}

    def draw(self, stack: Stack, orders: Iterable[Order]) -> None:
        """Generate missing reference images, then empty the store, so that every later image is written again."""
        missing = [order for order in orders if order not in self.pictures]
        for order, id in [(order, patiently(partial(stack.client.submit, order))) for order in missing]:
            wait_for("an undisturbed job has ended", lambda id=id: stack.states([id])[id][0] in FINAL, END_S)  # type: ignore[misc]
            assert stack.client.look(id)["status"] == "succeeded", stack.client.look(id)
            self.pictures[order] = [stack.client.picture(id, k) for k in range(order.n)]
        clear(stack)


def clear(stack: Stack) -> None:
    """Empty the store of artifacts."""
    for folder in (stack.data / "artifacts").glob("*"):
        shutil.rmtree(folder)


class Round:
    """The jobs of one round, on a stack that was ready when it began."""

    def __init__(self, stack: Stack, gallery: Gallery) -> None:
        self.stack = stack
        self.outcome = Outcome()
        self._gallery = gallery
        self._accepted: dict[str, Order | None] = {}
        self._expected: dict[str, str] = {}
        self._touched: list[str] = []
        self._fault_at = 0.0
        self._followers: list[Follower] = []

    # -- before the fault ------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[str]:
        return list(self._accepted)

    def submit(self, order: Order, expected: str = "succeeded") -> str:
        """Have a job accepted. Its final state will have to be `expected`. Raises `client.Refused`."""
        id = patiently(lambda: self.stack.client.submit(order))
        self.accepted(id, order, expected)
        return id

    def accepted(self, id: str, order: Order | None, expected: str = "succeeded") -> None:
        """Count a job that was accepted by another way. Without an order it brings no pictures."""
        self._accepted[id] = order
        if expected != "succeeded":
            self._expected[id] = expected

    def load(self, orders: Iterable[Order]) -> None:
        """Have several accepted, and follow the first one's events as a client does."""
        orders = list(orders)
        assert all(order in self._gallery.pictures for order in orders), "drawn undisturbed before"
        ids = [self.submit(order) for order in orders]
        self._followers.append(Follower(self.stack.client, ids[0]))

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float = END_S) -> None:
        """Wait while whatever ends is started again."""

        def tended() -> object:
            self.stack.tend()
            return condition()

        wait_for(what, tended, timeout_s)

    def busy(self, at_least: int = 1) -> Part:
        """A worker that runs that many of the jobs and has reported progress of one: it is within a batch."""
        found: list[Part] = []

        def look() -> bool:
            for part in self.stack.crew:
                running = self.stack.running_on(part, self.ids)
                if len(running) >= at_least and any(
                    self.stack.keys.hexists(keys.job(id), "progress") for id in running
                ):
                    found.append(part)
            return bool(found)

        self.wait(f"a worker is amid {at_least} jobs", look)
        return found[0]

    def fault(self, touched: Iterable[str], at: float | None = None) -> None:
        """Something breaks now (or did `at`), and touches these jobs: from now on it counts when they go on."""
        self._touched = list(touched)
        self._fault_at = time.time() if at is None else at

    # -- after it --------------------------------------------------------------------------------------------------

    def problem(self, text: str) -> None:
        self.outcome.problems.append(text)

    def end(self, timeout_s: float = END_S) -> None:
        """Wait until every job has ended; who has not in so long is lost."""

        def ended() -> bool:
            return all(state in FINAL for state, _ in self.stack.states(self.ids).values())

        try:
            self.wait("all jobs have ended", ended, timeout_s)
        except AssertionError as error:
            self.problem(str(error))

    def judge(self) -> Outcome:
        """Look at every job, at the counters, and at what followers saw."""
        outcome = self.outcome
        outcome.jobs = len(self._accepted)
        for id, order in self._accepted.items():
            stream = self.stack.stream(id)
            terminal = [entry.type for entry in stream if entry.type in FINAL]
            outcome.lost += not terminal
            outcome.twice += len(terminal) > 1
            for problem in (*history(stream), *self._record(id, order, terminal)):
                self.problem(f"{id}: {problem}: {[entry.type for entry in stream if entry.type != 'progress']}")
        outcome.problems += counters(self.stack)
        for follower in self._followers:
            outcome.problems += follower.problems(self.stack)
        went_on = [self._next(id) for id in self._touched]
        if went_on:
            outcome.recovery_s = max(went_on) - self._fault_at
        return outcome

    def _record(self, id: str, order: Order | None, terminal: list[str]) -> Iterable[str]:
        expected = self._expected.get(id, "succeeded")
        try:
            seen = self.stack.client.look(id)
        except Refused as refused:
            yield f"it cannot be looked at ({refused.status})"
            return
        if seen["status"] != expected:
            yield f"it is {seen['status']} and should be {expected} ({seen['error']})"
        if terminal != [seen["status"]]:
            yield "its stream and its record tell different ends"
        if seen["status"] == "succeeded" and order is not None:
            yield from self._pictures(id, order)

    def _pictures(self, id: str, order: Order) -> Iterable[str]:
        known = self._gallery.pictures.get(order)
        for k in range(order.n):
            try:
                data = self.stack.client.picture(id, k)
            except Refused as refused:
                yield f"picture {k} cannot be fetched ({refused.status})"
                continue
            if not whole(data):
                yield f"picture {k} is not whole"
            if order.deterministic and known is not None and data != known[k]:
                yield f"picture {k} differs from the undisturbed one"

    def _next(self, id: str) -> float:
        """When the job went on after the fault."""
        later = [e.at for e in self.stack.stream(id) if e.at > self._fault_at and e.type != "queued"]
        return min(later, default=float("inf"))

    def attempts(self) -> dict[str, tuple[int, int]]:
        """(attempt, lost) of each job, from its record."""
        with self.stack.keys.pipeline(transaction=False) as pipeline:
            for id in self.ids:
                pipeline.hmget(keys.job(id), "attempt", "lost")
            counted = pipeline.execute()
        return {id: (int(attempt), int(lost)) for id, (attempt, lost) in zip(self.ids, counted, strict=True)}


class Follower:
    """A client that follows a job's events and comes back with the id of the last one when it is cut off."""

    def __init__(self, client: Client, id: str) -> None:
        self.id = id
        self.seen: list[tuple[str, str]] = []  # (event id, type)
        self.cuts = 0
        self._url = str(client.get("/healthz").request.url.copy_with(path=f"/v1/jobs/{id}/events"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set() and not (self.seen and self.seen[-1][1] in FINAL):
            with contextlib.suppress(httpx2.TransportError):
                self._follow()
            self.cuts += 1
            self._over.wait(0.1)

    def _follow(self) -> None:
        last = {"Last-Event-ID": self.seen[-1][0]} if self.seen else {}
        timeout = httpx2.Timeout(10, read=60)
        with httpx2.stream("GET", self._url, headers=last, timeout=timeout, trust_env=False, verify=False) as response:
            if response.status_code != 200:
                return
            id = type = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    id = value
                elif name == "event":
                    type = value
                elif not line and type:
                    self.seen.append((id, type))
                    type = ""

    def problems(self, stack: Stack) -> Iterable[str]:
        """The end came once, at the end, and what was seen before is a part of the stream, in order."""
        self._thread.join(60)
        self._over.set()
        if self._thread.is_alive() or not self.seen:
            yield f"{self.id}: who followed its events saw no end"
            return
        told = {at: fields["type"] for at, fields in stack.keys.xrange(keys.events(self.id))}
        ids = [id for id, _ in self.seen]
        if len(set(ids)) != len(ids) or ids != sorted(ids, key=_position):
            yield f"{self.id}: events came twice or out of order: {self.seen}"
        if any(told.get(id) != type for id, type in self.seen):
            yield f"{self.id}: events came that its stream does not hold: {self.seen}"
        if [type for _, type in self.seen if type in FINAL] != [self.seen[-1][1]]:
            yield f"{self.id}: the end was not told once, and last: {self.seen}"
        if missed := [at for at, type in told.items() if type != "progress" and at not in ids]:
            yield f"{self.id}: changes of state were not told: {missed}"


def _position(id: str) -> tuple[int, ...]:
    return tuple(map(int, id.split("-")))


def whole(data: bytes) -> bool:
    """Whether these bytes are a complete PNG that can be decoded."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return image.format == "PNG" and data.endswith(b"IEND\xae\x42\x60\x82")
    except (OSError, SyntaxError):
        return False


def history(stream: list[Entry]) -> Iterable[str]:
    """What is wrong with the order of a job's events."""
    types = [entry.type for entry in stream]
    trimmed = len(stream) >= KEPT and types[0] != "queued"
    if types[:1] != ["queued"] and not trimmed:
        yield "its stream does not begin with queued"
    ends = [type for type in types if type in FINAL]
    if not ends:
        yield "it never ended"
    elif len(ends) > 1:
        yield "it ended more than once"
    elif types[-1] not in FINAL:
        yield "something was said after its end"
    attempts = [entry.data["attempt"] for entry in stream if entry.type == "running"]
    if attempts != sorted(set(attempts)):
        yield f"attempts are not counted up: {attempts}"
    running, steps = trimmed, 0
    for entry in stream:
        if entry.type == "progress":
            if not running or entry.data["steps_done"] < steps:
                yield "progress was told by who did not run it"
                break
            steps = entry.data["steps_done"]
        else:
            running, steps = entry.type == "running", 0


def counters(stack: Stack) -> list[str]:
    """Counters that are not zero although every job has ended. Jobs without a known id may still have to end."""
    left: list[str] = []

    def zero() -> bool:
        left[:] = _left(stack)
        return not left

    with contextlib.suppress(AssertionError):
        wait_for("the counters are at zero", zero, PATIENCE_S)
    return left


def _left(stack: Stack) -> Iterable[str]:
    try:
        for queue in QUEUES:
            if (backlog := stack.store.backlog(queue)) != QueueBacklog(0, 0, 0, 0):
                yield f"the {queue} queue's counters are not zero: {backlog}"
    except StoreError as error:
        yield f"the counters cannot be read: {error}"
    sets: list[Any] = [f"{keys.PREFIX}{name}" for name in ("leases", "deadlines")]
    sets += [f"{keys.PREFIX}sent:{queue}:{level}" for queue in QUEUES for level in PRIORITY_STEPS]
    for name in sets:
        if left := stack.keys.zcard(name):
            yield f"{name} still holds {left}"
