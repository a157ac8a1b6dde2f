"""One reader of all events for a process: however many follow jobs, one connection waits for what comes.

It waits at the one stream of notices, `happened`, and reads the streams that those name and somebody follows: what an
event costs does not grow with how many follow others. Knows streams, positions and subscribers; knows nothing of
records, of HTTP, or of what the events tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import redis

from core.jobs import keys
from core.jobs.connection import RedisClient
from core.jobs.record import JobState, from_json
from core.jobs.unreadable import VERSION

PROGRESS = "progress"
_PAGE = 100  # entries of one stream that are read at once
_AT_ONCE = 256  # streams that are read at once: Redis answers nobody else meanwhile
_BLOCK_S = 5.0  # the longest that one read waits
_MISSED_S = 2.5  # after which all that is followed is read: a version before sends no notices, and some may be trimmed
_WAITING = 256  # events that wait for a slow subscriber before progress is dropped; more than a page
_PAUSE_S = 0.05, 1.0  # between tries while Redis is away: the first, and the longest

_ID = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
_FINAL = frozenset(state.value for state in JobState if state.final)
_STATES = frozenset(state.value for state in JobState)

_TOLD = 20  # kinds of entries that cannot be read, of which the log says so, once each
_unread: set[tuple[str, str]] = set()

_Position = tuple[int, int]
_Entry = tuple[str, dict[str, str]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's stream. `type` is a `JobState` value, or "progress". `id` grows along the stream.

    `data`: of queued, `reason` ("worker_lost", "handed_back") where it was running before; of running, `attempt`; of
    progress, what was reported; of failed and expired, `code` and `message`; else empty. The record tells the rest.
    `of` is the incarnation of its job; empty in an event of a version that had none.
    """

    id: str
    type: str
    data: dict[str, Any]
    of: str = field(default="", compare=False)

    @property
    def final(self) -> bool:
        """Whether it is the last of its job."""
        return self.type in _FINAL


@dataclass(eq=False, slots=True)
class _Follower:
    """One subscription: what came and is not fetched yet. `seen` is the last event that it was given."""

    seen: _Position
    of: str
    waiting: deque[Event] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: bool = False  # the id is another job's by now

    def give(self, event: Event) -> None:
        position = _position(event.id)
        if position <= self.seen or self.replaced:
            return
        self.seen = position
        if _others(event, self.of):
            self.replaced = _later(event, self.of)
            self.came.set()
            return
        if len(self.waiting) >= _WAITING:
            if event.type == PROGRESS and self.waiting[-1].type == PROGRESS:
                event = _merged(self.waiting.pop(), event)
            else:
                self._drop_progress()
        self.waiting.append(event)
        self.came.set()

    def _drop_progress(self) -> None:
        for event in self.waiting:
            if event.type == PROGRESS and "pieces" not in event.data:
                self.waiting.remove(event)
                return


class EventReader:
    """Belongs to the event loop that starts it. Survives Redis's restarts: it tries again until it is closed.

    Holds four connections at most: one waits for notices, one reads what they name, two read what lies in the past. Who
    joins first reads the past up to its end and then follows from there, so what is followed may have to be read from a
    little further back: its position in a stream is the least of its followers', and each passes over what it has seen.
    """

    def __init__(self, redis: RedisClient | str) -> None:
        client = RedisClient.at(redis)
        self._waiting = client.asyncio(connections=1, answer_s=2 * _BLOCK_S)
        self._reading = client.asyncio(connections=1, answer_s=_BLOCK_S)
        self._asking = client.asyncio(connections=2, answer_s=_BLOCK_S)
        self._notice = "$"
        self._followers: dict[str, set[_Follower]] = {}
        self._positions: dict[str, _Position] = {}  # all before it, and itself, was given to all followers
        self._due: set[str] = set()  # jobs that are followed, and whose streams may hold what was not given
        self._some_due = asyncio.Event()
        self._read_all = time.monotonic()  # when everything was read that is followed
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Begin to read."""
        self._begin(self._forever(self._wait))
        self._begin(self._forever(self._read))

    async def close(self) -> None:
        """End the reader; subscriptions that are still open end too."""
        self._closed = True
        for follower in [f for followers in self._followers.values() for f in followers]:
            follower.came.set()
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # and again: one that comes while redis-py connects may get lost
            await asyncio.wait(self._tasks, timeout=0.05)
        for client in (self._waiting, self._reading, self._asking):
            await client.aclose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def subscribe(self, job_id: str, after: str = "0", incarnation: str = "") -> AsyncGenerator[Event, None]:
        """The job's events after the one named, past ones first, up to and with the terminal one.

        Ends at once if the terminal event is not after the one named. Waits while the stream does not exist: look at
        the record first. With an `incarnation` only that job's events are told, and it ends where another has got the
        id. Whoever is slow misses progress, never another event and nothing of a text. Close it (`aclose`) to leave
        early. Raises ValueError if `after` is not the id of an event.
        """
        seen = _position(after)
        if incarnation:  # nothing of who had the id before
            at, sequence = _position(incarnation)
            seen = max(seen, (at, sequence - 1))
        return self._subscribe(job_id, seen, incarnation)

    async def _subscribe(self, job_id: str, after: _Position, of: str) -> AsyncGenerator[Event, None]:
        start, whole = after, False
        while not whole:
            past = await self._past(job_id, after)
            for event in past:
                after = _position(event.id)
                if _others(event, of):
                    if _later(event, of):
                        return
                    continue
                yield event
                if event.final:
                    return
            whole = len(past) < _PAGE
        if after == start and start > (0, 0) and await self._ended(job_id, start, of):
            return
        follower = _Follower(after, of)
        self._attach(job_id, follower)
        try:
            while True:
                follower.came.clear()
                while follower.waiting:
                    event = follower.waiting.popleft()
                    yield event
                    if event.final:
                        return
                if self._closed or follower.replaced:
                    return
                await follower.came.wait()
        finally:
            self._detach(job_id, follower)

    async def _past(self, job_id: str, after: _Position) -> list[Event]:
        """A page of what lies after a position; [] too if the reader is closed."""
        key = keys.events(job_id)
        answer = await self._ask(lambda: self._asking.xread({key: _id(after)}, count=_PAGE))
        return _events(answer[0][1]) if answer else []

    async def _ended(self, job_id: str, after: _Position, of: str) -> bool:
        """Whether the terminal event lies at a position or before it, or the id is another job's by now."""
        answer = await self._ask(lambda: self._asking.xrevrange(keys.events(job_id), count=1))
        return any(
            _later(event, of) if _others(event, of) else event.final and _position(event.id) <= after
            for event in _events(answer or [])
        )

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
        self._look_at(job_id)  # for what came since its past was read

    def _detach(self, job_id: str, follower: _Follower) -> None:
        followers = self._followers[job_id]
        followers.remove(follower)
        if not followers:
            del self._followers[job_id], self._positions[job_id]
            self._due.discard(job_id)

    def _look_at(self, *job_ids: str) -> None:
        self._due.update(job_ids)
        self._some_due.set()

    # -- the two tasks -----------------------------------------------------------------------------------------

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        pauses, away = _Pauses(), False
        while not self._closed:
            try:
                await work()
            except (redis.RedisError, OSError) as error:
                if not away:
                    log.warning("events: Redis is away, trying until it is back (%s)", type(error).__name__)
                away = True
                self._look_at(*self._followers)
                await pauses.wait()
            except Exception:
                log.exception("events: reading failed")
                await pauses.wait()
            else:
                if away:
                    log.info("events: Redis is back")
                pauses, away = _Pauses(), False

    async def _wait(self) -> None:
        """Wait for notices, once, and note which of what is followed they name."""
        if self._notice == "$":  # by its number: what comes between two reads would be missed by the name of the end
            last: Any = await self._waiting.xrevrange(keys.HAPPENED, count=1)
            self._notice = last[0][0] if last else "0"
        answer: Any = await self._waiting.xread({keys.HAPPENED: self._notice}, block=int(_BLOCK_S * 1000))
        for _, notices in answer:
            self._notice = notices[-1][0]
            named = {id for _, fields in notices for id in fields.get("jobs", "").split()}
            if not named.isdisjoint(self._followers):
                self._look_at(*named & self._followers.keys())

    async def _read(self) -> None:
        """Wait until there is something to read, and give it to who follows it."""
        left_s = self._read_all + _MISSED_S - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._some_due.wait(), max(0.0, left_s))
        if time.monotonic() >= self._read_all + _MISSED_S:
            self._read_all = time.monotonic()
            self._due.update(self._followers)
        self._some_due.clear()
        due = [job_id for job_id in self._due if job_id in self._followers]
        self._due.clear()
        try:
            while due:
                await self._read_some(due[:_AT_ONCE])
                del due[:_AT_ONCE]
        finally:
            self._look_at(*due)  # of an error's
            if not self._due:
                self._some_due.clear()

    async def _read_some(self, job_ids: list[str]) -> None:
        starts = {job_id: self._positions[job_id] for job_id in job_ids if job_id in self._positions}
        if not starts:
            return
        streams: dict[Any, Any] = {keys.events(job_id): _id(start) for job_id, start in starts.items()}
        answer: Any = await self._reading.xread(streams, count=_PAGE)
        came: dict[str, Any] = dict(answer)
        for job_id, start in starts.items():
            entries = came.get(keys.events(job_id))
            if not entries or job_id not in self._positions:
                continue
            # Somebody may have joined, or joined again, further back meanwhile: then it is read anew from there.
            if self._positions[job_id] == start:
                self._give(job_id, entries)
            if self._positions[job_id] < _position(entries[-1][0]) or len(entries) == _PAGE:
                self._look_at(job_id)

    def _give(self, job_id: str, entries: Sequence[_Entry]) -> None:
        self._positions[job_id] = _position(entries[-1][0])
        events = _events(entries)
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


def _events(entries: Iterable[_Entry]) -> list[Event]:
    """What can be read of a stream's entries: what another version wrote may be left out, never a change of state."""
    made = []
    for id, fields in entries:
        kind, version = fields.get("type", ""), fields.get("v", "0")
        try:
            if version.isdecimal() and int(version) <= VERSION:
                made.append(Event(id, kind, from_json(fields["data"]), fields.get("of", "")))
                continue
        except (KeyError, ValueError):
            pass
        if len(_unread) < _TOLD and (version, kind) not in _unread:
            _unread.add((version, kind))
            log.warning("events: entries of version %.20r cannot be read (%.20r)", version, kind)
        if kind in _STATES:
            made.append(Event(id, kind, {}, fields.get("of", "")))
    return made


def _others(event: Event, of: str) -> bool:
    """Whether it is no event of the job of this incarnation, but of one that has the same id."""
    return bool(of and event.of and event.of != of)


def _later(event: Event, of: str) -> bool:
    return _position(event.of) > _position(of)


def _merged(first: Event, second: Event) -> Event:
    """One progress event for two: the later one, with the pieces of both."""
    if "pieces" not in first.data:
        return second
    pieces = [*first.data["pieces"], *second.data.get("pieces", [])]
    return replace(second, data={**second.data, "pieces": pieces})


def _position(id: str) -> _Position:
    found = _ID.fullmatch(id)
    if found is None:
        raise ValueError("after: is not the id of an event")
    return int(found[1]), int(found[2] or 0)


def _id(position: _Position) -> str:
    return f"{position[0]}-{position[1]}"
