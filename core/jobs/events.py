"""Reads all job events for a process over one connection, however many jobs are followed.

It blocks on one stream of notices, `happened`, and reads only the streams that a notice names and somebody follows, so
the cost of an event does not grow with the number of other followers. Event data is opaque here.
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
_PAGE = 100  # entries read at once from one stream
_PAST_PAGE = 16  # the same of past ones, which a subscriber gets one by one: some have many log probabilities
_AT_ONCE = 256  # streams read at once; Redis serves nobody else meanwhile
_BLOCK_S = 5.0  # the longest that one read blocks
_MISSED_S = 2.5  # interval of reads of all followed streams: older versions send no notices, some get trimmed
_WAITING = 256  # events buffered for a slow subscriber before progress is dropped; more than a page
_PAUSE_S = 0.05, 1.0  # between retries while Redis is down: the first, and the longest

_ID = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
_FINAL = frozenset(state.value for state in JobState if state.final)
_STATES = frozenset(state.value for state in JobState)

_TOLD = 20  # kinds of unreadable entries that are logged, once each
_unread: set[tuple[str, str]] = set()

_Position = tuple[int, int]
_Entry = tuple[str, dict[str, str]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of a job's stream. `type` is a `JobState` value, or "progress". `id` increases along the stream.

    `data`: of queued, `reason` ("worker_lost", "handed_back") if the job was running before; of running, `attempt`; of
    progress, the report; of failed and expired, `code` and `message`; else empty. Everything else is in the record.
    `of` is the job's incarnation; empty in events of versions without incarnations.
    """

    id: str
    type: str
    data: dict[str, Any]
    of: str = field(default="", compare=False)

    @property
    def final(self) -> bool:
        """Whether this is the job's last event."""
        return self.type in _FINAL


@dataclass(eq=False, slots=True)
class _Follower:
    """One subscription and its unfetched events. `seen` is the last event delivered to it."""

    seen: _Position
    of: str
    waiting: deque[Event] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: bool = False  # the id now belongs to another job

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


class _EventHistory:
    """Reads the past events of single jobs, on two connections of its own. Retries while Redis is down."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client.asyncio(connections=2, answer_s=_BLOCK_S)
        self._closed = False

    async def close(self) -> None:
        """Release the connections; calls in progress end with their next retry."""
        self._closed = True
        await self._client.aclose()

    async def page(self, job_id: str, after: _Position) -> list[Event]:
        """One page of events after a position; [] also once closed."""
        key = keys.events(job_id)
        answer = await self._ask(lambda: self._client.xread({key: _id(after)}, count=_PAST_PAGE))
        return _events(answer[0][1]) if answer else []

    async def ended(self, job_id: str, after: _Position, of: str) -> bool:
        """Return whether the terminal event is at or before a position, or the id now belongs to another job."""
        answer = await self._ask(lambda: self._client.xrevrange(keys.events(job_id), count=1))
        return any(
            _later(event, of) if _others(event, of) else event.final and _position(event.id) <= after
            for event in _events(answer or [])
        )

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command, retrying while Redis is down; None once closed."""
        pauses = _Backoff()
        while not self._closed:
            try:
                return await command()
            except (redis.RedisError, OSError):
                await pauses.wait()
        return None


class EventReader:
    """Reads events for the event loop that starts it. Retries through Redis restarts until it is closed.

    Uses at most four connections: one waits for notices, one reads the streams they name, two read past events. A new
    subscriber first reads past events up to the end, then follows. A job's read position is the lowest of its
    followers' positions, so that an entry may be read twice; each follower skips what it has seen.
    """

    def __init__(self, redis: RedisClient | str) -> None:
        client = RedisClient.at(redis)
        self._waiting = client.asyncio(connections=1, answer_s=2 * _BLOCK_S)
        self._reading = client.asyncio(connections=1, answer_s=_BLOCK_S)
        self._history = _EventHistory(client)
        self._notice = "$"
        self._followers: dict[str, set[_Follower]] = {}
        self._positions: dict[str, _Position] = {}  # everything up to and including it was delivered to all followers
        self._due: set[str] = set()  # followed jobs whose streams may hold undelivered events
        self._some_due = asyncio.Event()
        self._read_all = time.monotonic()  # time of the last read of all followed streams
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start reading."""
        self._begin(self._forever(self._wait))
        self._begin(self._forever(self._read))

    async def close(self) -> None:
        """Stop the reader; open subscriptions end too."""
        self._closed = True
        for follower in [f for followers in self._followers.values() for f in followers]:
            follower.came.set()
        await self._history.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # repeated: a cancellation while redis-py connects may get lost
            await asyncio.wait(self._tasks, timeout=0.05)
        for client in (self._waiting, self._reading):
            await client.aclose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def subscribe(self, job_id: str, after: str = "0", incarnation: str = "") -> AsyncGenerator[Event, None]:
        """Yield the job's events after the given one, past ones first, through the terminal event.

        Ends at once if the terminal event is not after the given one. Waits while the stream does not exist: check the
        record first. With an `incarnation` only that job's events are delivered, and the iteration ends if another job
        gets the id. A slow consumer misses progress events, never other events or pieces of text. Close it (`aclose`)
        to leave early. Raises ValueError if `after` is not an event id.
        """
        seen = _position(after)
        if incarnation:  # events of a former job with this id
            at, sequence = _position(incarnation)
            seen = max(seen, (at, sequence - 1))
        return self._subscribe(job_id, seen, incarnation)

    async def _subscribe(self, job_id: str, after: _Position, of: str) -> AsyncGenerator[Event, None]:
        start, complete = after, False
        while not complete:
            past = await self._history.page(job_id, after)
            for event in past:
                after = _position(event.id)
                if _others(event, of):
                    if _later(event, of):
                        return
                    continue
                yield event
                if event.final:
                    return
            complete = len(past) < _PAST_PAGE
        if after == start and start > (0, 0) and await self._history.ended(job_id, start, of):
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

    def _attach(self, job_id: str, follower: _Follower) -> None:
        self._followers.setdefault(job_id, set()).add(follower)
        self._positions[job_id] = min(follower.seen, self._positions.get(job_id, follower.seen))
        self._look_at(job_id)  # for events since its past was read

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
        pauses, away = _Backoff(), False
        while not self._closed:
            try:
                await work()
            except (redis.RedisError, OSError) as error:
                if not away:
                    log.warning("events: Redis is unavailable, retrying (%s)", type(error).__name__)
                away = True
                self._look_at(*self._followers)
                await pauses.wait()
            except Exception:
                log.exception("events: reading failed")
                await pauses.wait()
            else:
                if away:
                    log.info("events: Redis is available again")
                pauses, away = _Backoff(), False

    async def _wait(self) -> None:
        """Wait once for notices, and mark the followed jobs that they name."""
        if self._notice == "$":  # as an entry id: reading from "$" would miss notices between two reads
            last: Any = await self._waiting.xrevrange(keys.HAPPENED, count=1)
            self._notice = last[0][0] if last else "0"
        answer: Any = await self._waiting.xread({keys.HAPPENED: self._notice}, block=int(_BLOCK_S * 1000))
        for _, notices in answer:
            self._notice = notices[-1][0]
            named = {id for _, fields in notices for id in fields.get("jobs", "").split()}
            if not named.isdisjoint(self._followers):
                self._look_at(*named & self._followers.keys())

    async def _read(self) -> None:
        """Wait until a stream is due, read it, and deliver its events to the followers."""
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
            self._look_at(*due)  # those of a failed read
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
            # A follower may have joined further back meanwhile: then the stream is read again from there.
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


class _Backoff:
    """Delays between retries, each twice the one before."""

    def __init__(self) -> None:
        self._next_s, self._longest_s = _PAUSE_S

    async def wait(self) -> None:
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


def _events(entries: Iterable[_Entry]) -> list[Event]:
    """Parse a stream's entries. Unreadable ones (of another version) may be skipped, but never a state change."""
    events = []
    for id, fields in entries:
        kind, version = fields.get("type", ""), fields.get("v", "0")
        try:
            if version.isdecimal() and int(version) <= VERSION:
                events.append(Event(id, kind, from_json(fields["data"]), fields.get("of", "")))
                continue
        except (KeyError, ValueError):
            pass
        if len(_unread) < _TOLD and (version, kind) not in _unread:
            _unread.add((version, kind))
            log.warning("events: entries of version %.20r cannot be read (%.20r)", version, kind)
        if kind in _STATES:
            events.append(Event(id, kind, {}, fields.get("of", "")))
    return events


def _others(event: Event, of: str) -> bool:
    """Return whether an event belongs to another job that has the same id."""
    return bool(of and event.of and event.of != of)


def _later(event: Event, of: str) -> bool:
    return _position(event.of) > _position(of)


def _merged(first: Event, second: Event) -> Event:
    """Merge two progress events: the later one, with the text pieces of both."""
    if "pieces" not in first.data:
        return second
    pieces = [*first.data["pieces"], *second.data.get("pieces", [])]
    return replace(second, data={**second.data, "pieces": pieces})


def _position(id: str) -> _Position:
    match = _ID.fullmatch(id)
    if match is None:
        raise ValueError("after: is not the id of an event")
    return int(match[1]), int(match[2] or 0)


def _id(position: _Position) -> str:
    return f"{position[0]}-{position[1]}"
