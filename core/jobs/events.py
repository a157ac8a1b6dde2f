"""One reader of all events for a process: however many follow jobs, one connection waits for what comes.

Knows streams, positions and subscribers; knows nothing of records, of HTTP, or of what the events tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import redis

from core.jobs import keys, scripts
from core.jobs.connection import connect_asyncio
from core.jobs.record import JobState, from_json

PROGRESS = "progress"
_PAGE = 100  # entries of one stream that are read at once
_BLOCK_S = 5.0  # the longest that one read waits: a wake that got lost costs no more
_WAITING = 256  # events that wait for a slow subscriber before progress is dropped; more than a page
_PAUSE_S = 0.05, 1.0  # between tries while Redis is away: the first, and the longest

_ID = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
_FINAL = frozenset(state.value for state in JobState if state.final)

_Position = tuple[int, int]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's stream. `type` is a `JobState` value, or "progress". `id` grows along the stream.

    `data`: of queued, `reason` ("worker_lost", "handed_back") where it was running before; of running, `attempt`; of
    progress, what was reported; of failed and expired, `code` and `message`; else empty. The record tells the rest.
    """

    id: str
    type: str
    data: dict[str, Any]

    @property
    def final(self) -> bool:
        """Whether it is the last of its job."""
        return self.type in _FINAL


@dataclass(eq=False, slots=True)
class _Follower:
    """One subscription: what came and is not fetched yet. `seen` is the last event that it was given."""

    seen: _Position
    waiting: deque[Event] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def give(self, event: Event) -> None:
        position = _position(event.id)
        if position <= self.seen:
            return
        self.seen = position
        if len(self.waiting) >= _WAITING:
            if event.type == PROGRESS and self.waiting[-1].type == PROGRESS:
                self.waiting.pop()
            else:
                self._drop_progress()
        self.waiting.append(event)
        self.came.set()

    def _drop_progress(self) -> None:
        for event in self.waiting:
            if event.type == PROGRESS:
                self.waiting.remove(event)
                return


class EventReader:
    """Belongs to the event loop that starts it. Survives Redis's restarts: it tries again until it is closed.

    Holds three connections at most: one waits for all that is followed, two read what lies in the past. Who joins
    first reads the past up to its end and then follows from there, so the one reader may have to go back a little:
    its position in a stream is the least of its followers', and each of them passes over what it has seen.
    """

    def __init__(self, url: str) -> None:
        self._reading = connect_asyncio(url, connections=1, answer_s=2 * _BLOCK_S)
        self._asking = connect_asyncio(url, connections=2, answer_s=_BLOCK_S)
        self._wake_key = keys.wake(secrets.token_hex(8))
        self._wake_id = "0"
        self._woken = False  # since the reader last looked at whom it serves
        self._followers: dict[str, set[_Follower]] = {}
        self._positions: dict[str, _Position] = {}  # all before it, and itself, was given to all followers
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Begin to read."""
        self._begin(self._run())

    async def close(self) -> None:
        """End the reader; subscriptions that are still open end too."""
        self._closed = True
        for follower in [f for followers in self._followers.values() for f in followers]:
            follower.came.set()
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # and again: one that comes while redis-py connects may get lost
            await asyncio.wait(self._tasks, timeout=0.05)
        await self._reading.aclose()
        await self._asking.aclose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def subscribe(self, job_id: str, after: str = "0") -> AsyncGenerator[Event, None]:
        """The job's events after the one named, past ones first, up to and with the terminal one.

        Ends at once if the terminal event is not after the one named. Waits while the stream does not exist: look at
        the record first. Whoever is slow misses progress, never another event. Close it (`aclose`) to leave early.
        Raises ValueError if `after` is not the id of an event.
        """
        return self._subscribe(job_id, _position(after))

    async def _subscribe(self, job_id: str, after: _Position) -> AsyncGenerator[Event, None]:
        start, whole = after, False
        while not whole:
            past = await self._past(job_id, after)
            for event in past:
                after = _position(event.id)
                yield event
                if event.final:
                    return
            whole = len(past) < _PAGE
        if after == start and start > (0, 0) and await self._ended(job_id, start):
            return
        follower = _Follower(after)
        self._attach(job_id, follower)
        try:
            while True:
                follower.came.clear()
                while follower.waiting:
                    event = follower.waiting.popleft()
                    yield event
                    if event.final:
                        return
                if self._closed:
                    return
                await follower.came.wait()
        finally:
            self._detach(job_id, follower)

    async def _past(self, job_id: str, after: _Position) -> list[Event]:
        """A page of what lies after a position; [] too if the reader is closed."""
        key = keys.events(job_id)
        answer = await self._ask(lambda: self._asking.xread({key: _id(after)}, count=_PAGE))
        return _events(answer[0][1]) if answer else []

    async def _ended(self, job_id: str, after: _Position) -> bool:
        """Whether the terminal event lies at a position or before it."""
        answer = await self._ask(lambda: self._asking.xrevrange(keys.events(job_id), count=1))
        return any(event.final and _position(event.id) <= after for event in _events(answer or []))

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Its answer, however long Redis is away; None if the reader is closed."""
        pauses = _Pauses()
        while not self._closed:
            try:
                return await command()
            except (redis.RedisError, OSError):
                await pauses.wait()
        return None

    def _attach(self, job_id: str, follower: _Follower) -> None:
        self._followers.setdefault(job_id, set()).add(follower)
        self._positions[job_id] = min(follower.seen, self._positions.get(job_id, follower.seen))
        if not self._woken and not self._closed:
            self._woken = True
            # A task of its own: others who join now rely on it, whatever becomes of this subscription.
            self._begin(self._wake())

    def _detach(self, job_id: str, follower: _Follower) -> None:
        followers = self._followers[job_id]
        followers.remove(follower)
        if not followers:
            del self._followers[job_id], self._positions[job_id]

    async def _wake(self) -> None:
        """Interrupt the reader's wait, so that it looks anew at whom it serves."""
        # While Redis is away the reader does not wait in it, and looks anyway.
        with contextlib.suppress(redis.RedisError, OSError):
            ttl_ms = int(4 * _BLOCK_S * 1000)
            await self._asking.eval(scripts.WAKE, 0, keys.PREFIX, self._wake_key, ttl_ms)

    # -- the one task that waits -----------------------------------------------------------------------------

    async def _run(self) -> None:
        pauses, away = _Pauses(), False
        while not self._closed:
            try:
                await self._read()
            except (redis.RedisError, OSError) as error:
                if not away:
                    log.warning("events: Redis is away, trying until it is back (%s)", type(error).__name__)
                away = True
                await pauses.wait()
            except Exception:
                log.exception("events: reading failed")
                await pauses.wait()
            else:
                if away:
                    log.info("events: Redis is back")
                pauses, away = _Pauses(), False

    async def _read(self) -> None:
        """Wait for what comes to anybody, once, and give it."""
        self._woken = False
        starts = dict(self._positions)
        streams: dict[Any, Any] = {self._wake_key: self._wake_id}
        streams.update((keys.events(job_id), _id(start)) for job_id, start in starts.items())
        answer: Any = await self._reading.xread(streams, count=_PAGE, block=int(_BLOCK_S * 1000))
        came: dict[str, Any] = dict(answer)
        if self._wake_key in came:
            self._wake_id = came[self._wake_key][-1][0]
        for job_id, start in starts.items():
            entries = came.get(keys.events(job_id))
            # Somebody may have joined, or joined again, further back meanwhile: then it is read anew from there.
            if entries and self._positions.get(job_id) == start:
                self._give(job_id, _events(entries))

    def _give(self, job_id: str, events: list[Event]) -> None:
        self._positions[job_id] = _position(events[-1].id)
        for follower in self._followers[job_id]:
            for event in events:
                follower.give(event)


class _Pauses:
    """Waits between tries, each twice as long as the one before."""

    def __init__(self) -> None:
        self._next_s, self._longest_s = _PAUSE_S

    async def wait(self) -> None:
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


def _events(entries: Iterable[tuple[str, dict[str, str]]]) -> list[Event]:
    return [Event(id, fields["type"], from_json(fields["data"])) for id, fields in entries]


def _position(id: str) -> _Position:
    found = _ID.fullmatch(id)
    if found is None:
        raise ValueError("after: is not the id of an event")
    return int(found[1]), int(found[2] or 0)


def _id(position: _Position) -> str:
    return f"{position[0]}-{position[1]}"
