"""Stores batches in OpenAI's form: which lines are in progress, and the result of each finished line.

It does not read what a line asks for. Every write is fenced by the batch's current position, so that two processes that
work on the same batch do nothing twice.

    batch:{id}, batches:{owner}    hash: `BatchRecord`'s fields; zset of ids by time
    every_batch                    zset: id → creation time, of all owners
    batches                        zset: batches in progress → start time
    batch_jobs:{id}                hash: line → its live job
    batch_done:{id}                hash: line → its output line, or error line
    batch_turn                     the process that works on batches now
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from core.config import Settings
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.files import KEPT_S, File, KeyRequired, ShareFull
from core.jobs.keys import PREFIX
from core.jobs.lists import ListPage, ListReader
from core.jobs.record import milliseconds, pairs, to_json

LIVE = ("in_progress", "cancelling")
_PORTION = 100  # results, or batches, per round trip
_HELD_MS = 3 * 86_400_000  # a batch holds its input until it has ended, which takes a day and a few hours at most


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch's record.

    `key` is its input's artifact, which outlives the file's record; `base` is the URL that the links in its output
    begin with; `errors` are those of an input file that cannot be used. `secret` derives the ids of its lines' jobs, so
    that they cannot be guessed; `place` is the byte offset of the next line in the file, None if it was not recorded.
    """

    id: str
    owner: str
    endpoint: str
    input_file: str
    key: str
    status: str
    created: int
    ended: int | None
    total: int
    next: int
    completed: int
    failed: int
    base: str
    metadata: dict[str, str] | None
    errors: list[dict[str, Any]] | None
    output_file: str | None
    error_file: str | None
    secret: str = ""
    place: int | None = None

    @classmethod
    def of(cls, id: str, fields: Mapping[str, str]) -> Self:
        line, _, place = fields.get("place", "").partition(":")
        return cls(
            id=id,
            owner=fields["owner"],
            endpoint=fields["endpoint"],
            input_file=fields["input_file"],
            key=fields["key"],
            status=fields["status"],
            created=int(fields["created"]),
            ended=int(fields["ended"]) if fields.get("ended") else None,
            total=int(fields["total"]),
            next=int(fields["next"]),
            completed=int(fields["completed"]),
            failed=int(fields["failed"]),
            base=fields["base"],
            metadata=json.loads(fields["metadata"]),
            errors=json.loads(fields["errors"]),
            output_file=fields.get("output_file") or None,
            error_file=fields.get("error_file") or None,
            secret=fields.get("secret", ""),
            # An API of a version that records no offsets may have continued the batch in between.
            place=int(place) if place and line == fields["next"] else None,
        )


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The current state of a batch: its lines in progress, by job, and which of those jobs have ended.

    `lost` holds jobs that are gone or that no longer belong to the line (the id was used again).
    """

    batch: BatchRecord
    under_way: dict[int, str]
    ended: list[int]
    lost: list[int]


class BatchStore(RedisStore):
    """The batches' records.

    `retention_s`: how long the record of an ended job is kept after its batch has stored the result.
    """

    def __init__(self, redis: RedisClient | str, *, retention_s: float = 86_400.0) -> None:
        super().__init__(redis)
        self._add = self._client.script("batches/add")
        self._active = self._client.script("batches/active")
        self._look = self._client.script("batches/look")
        self._advance = self._client.script("batches/advance")
        self._note = self._client.script("batches/note")
        self._turn = self._client.script("batches/turn")
        self._lists = ListReader(self._client, "batch", BatchRecord.of)
        self._retention_ms = milliseconds(retention_s)

    @classmethod
    def of(cls, settings: Settings, redis: RedisClient | None = None) -> Self:
        return cls(redis or settings.redis_url, retention_s=settings.retention_s)

    def add(
        self,
        owner: str,
        endpoint: str,
        file: File,
        total: int,
        base: str,
        metadata: dict[str, str] | None,
        errors: list[dict[str, Any]],
        *,
        keyless: bool = False,
        stored: int | None = None,
    ) -> BatchRecord:
        """Create a batch of a file. A batch with `errors` is created as failed.

        Room for the records of all its lines is reserved. Raises `ShareFull` if the owner's records would take more
        bytes of Redis than `stored` (None: no limit), and `KeyRequired` for a `keyless` request if keys are required by
        now.
        """
        id = f"batch_{secrets.token_hex(12)}"
        fields: dict[str, str | int] = {
            "owner": owner, "endpoint": endpoint, "input_file": file.id, "key": file.key, "total": total, "next": 0,
            "completed": 0, "failed": 0, "base": base, "metadata": to_json(metadata), "errors": to_json(errors or None),
            "status": "failed" if errors else "in_progress", "ended": "", "secret": secrets.token_hex(16),
            "place": "0:0",
        }  # fmt: skip
        flat = [value for pair in fields.items() for value in pair]
        flag = "1" if keyless else ""
        room = "" if stored is None else stored
        created = self._add(id, owner, file.id, int(not errors), KEPT_S * 1000, _HELD_MS, flag, room, *flat)
        if int(created) < 0:
            raise ShareFull
        if not int(created):
            raise KeyRequired
        initial = {"created": created, "ended": created if errors else ""}
        return BatchRecord.of(id, {name: str(value) for name, value in {**fields, **initial}.items()})

    def batch(self, id: str) -> BatchRecord | None:
        fields: Any = self._client.hgetall(f"{PREFIX}batch:{id}")
        return BatchRecord.of(id, fields) if fields else None

    def batches(self, owner: str | None, *, after: str = "", limit: int = 1000) -> ListPage[BatchRecord] | None:
        """List an owner's batches, or all (owner None), newest first, after the given one. None: that one does not
        exist.
        """
        if owner is None:
            self._index_all()
        return self._lists.page("every_batch" if owner is None else f"batches:{owner}", after=after, limit=limit)

    def _index_all(self) -> None:
        """Add batches that were made before the index of all batches existed. Runs once."""
        if self._client.exists(f"{PREFIX}every_batch_indexed"):
            return
        for key in self._client.scan_iter(f"{PREFIX}batch:*", count=1000):
            created: Any = self._client.hget(key, "created")
            if created is not None:
                self._client.zadd(f"{PREFIX}every_batch", {key.removeprefix(f"{PREFIX}batch:"): created}, nx=True)
        self._client.set(f"{PREFIX}every_batch_indexed", "1")

    def active(self) -> list[tuple[str, str, str]]:
        """List the batches in progress, oldest first: id, owner, endpoint."""
        rows: list[tuple[str, str, str]] = []
        while True:
            flat = self._active(len(rows), _PORTION)
            rows += zip(flat[::3], flat[1::3], flat[2::3], strict=True)
            if len(flat) < 3 * _PORTION:
                return rows

    def progress(self, ids: Sequence[str]) -> list[BatchProgress]:
        """Read the current state of these batches; those no longer in progress are left out."""
        rows: list[BatchProgress] = []
        for at in range(0, len(ids), _PORTION):
            portion = ids[at : at + _PORTION]
            flat = self._look(*portion)
            for id, fields, lines in zip(portion, flat[::2], flat[1::2], strict=True):
                batch = BatchRecord.of(id, pairs(fields)) if fields else None
                if batch is not None and batch.status in LIVE:
                    rows.append(_looked(batch, lines))
        return rows

    def drop(self, id: str) -> None:
        """Stop working on a batch whose record is gone or that has ended."""
        if self._client.hget(f"{PREFIX}batch:{id}", "status") not in LIVE:
            self._client.zrem(f"{PREFIX}batches", id)

    def under_way(self, id: str) -> dict[int, str]:
        """The live jobs, by line."""
        reply: Any = self._client.hgetall(f"{PREFIX}batch_jobs:{id}")
        return {int(line): job for line, job in reply.items()}

    def results(self, id: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the result of each finished line, in order. Reads in portions, because together they may be large."""
        keys: Any = self._client.hkeys(f"{PREFIX}batch_done:{id}")
        lines = sorted(map(int, keys))
        for at in range(0, len(lines), _PORTION):
            portion = lines[at : at + _PORTION]
            reply: Any = self._client.hmget(f"{PREFIX}batch_done:{id}", [str(line) for line in portion])
            yield from ((line, json.loads(text)) for line, text in zip(portion, reply, strict=True) if text)

    def begin(self, id: str, line: int, job: str, place: int | None = None) -> bool:
        """Record that this job runs the batch's next line, and that the line after it begins at `place`.

        False: the line is not the next one, or the batch begins no more lines.
        """
        return bool(self._advance(id, line, job, "", "", _place(line, place)))

    def refuse(self, id: str, line: int, result: dict[str, Any], place: int | None = None) -> bool:
        """Record that the batch's next line cannot be run. False: as for `begin`."""
        return bool(self._advance(id, line, "", to_json(result), "failed", _place(line, place)))

    def note(self, id: str, line: int, result: dict[str, Any], kind: Literal["completed", "failed", ""]) -> bool:
        """Record the result of a line in progress, counted as `kind`; "": it was cancelled before it finished, and is
        not counted. False: the line was not in progress.
        """
        return bool(self._note(id, line, to_json(result), kind, self._retention_ms))

    def turn(self, batch: BatchRecord, status: str, **fields: str | int) -> bool:
        """Change a batch's status, if it still has the status of this reading. False: it has changed."""
        flat = [value for pair in {"status": status, **fields}.items() for value in pair]
        return bool(self._turn(batch.id, batch.status, *flat))


class FeederLease(RedisStore):
    """The lease of the one process that runs batches. Each instance is a holder of its own."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._take_turn = self._client.script("batches/take_turn")
        self._token = secrets.token_hex(8)

    def acquire(self, ttl_s: float) -> bool:
        """Take or renew the lease for `ttl_s` from now. False: another process holds it."""
        return bool(self._take_turn(self._token, round(1000 * ttl_s)))

    def release(self) -> None:
        """Let the lease expire at once, if this process holds it or nobody does."""
        self.acquire(0.001)


def _place(line: int, place: int | None) -> str:
    """Encode the offset with its line number, because an older version continues without updating the offset."""
    return "" if place is None else f"{line + 1}:{place}"


def _looked(batch: BatchRecord, lines: Sequence[str]) -> BatchProgress:
    entries = list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))
    of = {state: sorted(int(line) for line, _, entry in entries if entry == state) for state in ("ended", "lost")}
    return BatchProgress(batch, {int(line): job for line, job, _ in entries}, of["ended"], of["lost"])
