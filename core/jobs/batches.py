"""Files and batches as OpenAI has them: what was handed in, which of its lines are under way, what came of each.

Knows records, cursors and results; knows nothing of HTTP, and nothing of what a line asks for. Every step is fenced by
where the batch stands, so that two who work at one do nothing twice.

    file:{id}, files:{owner}       hash: name, purpose, size, key of its artifact; zset of ids by time
    batch:{id}, batches:{owner}    hash: `record.Batch`'s fields; zset of ids by time
    batches                        zset: those that are worked at → since when
    batch_jobs:{id}                hash: line → job under way
    batch_done:{id}                hash: line → its line of output, or of errors
    batch_turn                     who works at them
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar

from core.config import Settings
from core.jobs.connection import Script, connect, translated
from core.jobs.keys import PREFIX
from core.jobs.record import milliseconds, to_json

T = TypeVar("T")

KEPT_S = 30 * 86_400  # files and batches
LIVE = ("in_progress", "cancelling")
_PORTION = 100  # results, or records of a list, of one round trip

# batch, line that must be the next, job or '', line's result or '', kind of result ('completed', 'failed')
# → whether it was the next, of a batch whose lines are still begun
_ADVANCE = """
local P, id = ARGV[1], ARGV[2]
local key = P .. 'batch:' .. id
local v = redis.call('HMGET', key, 'next', 'status')
if v[1] ~= ARGV[3] or v[2] ~= 'in_progress' then return 0 end
redis.call('HINCRBY', key, 'next', 1)
if ARGV[4] ~= '' then
  redis.call('HSET', P .. 'batch_jobs:' .. id, ARGV[3], ARGV[4])
else
  redis.call('HSET', P .. 'batch_done:' .. id, ARGV[3], ARGV[5])
  redis.call('HINCRBY', key, ARGV[6], 1)
end
return 1
"""

# batch, line, result, kind ('': it did not run), retention_ms → whether it was under way
# A text's record was kept until it is noted, and goes as others from then on. A picture's still names that picture.
_NOTE = """
local P, id = ARGV[1], ARGV[2]
local job = redis.call('HGET', P .. 'batch_jobs:' .. id, ARGV[3])
if not job then return 0 end
local v = redis.call('HMGET', P .. 'job:' .. job, 'modality', 'ended', 'owner')
if v[1] == 'text' and v[2] then
  redis.call('PEXPIREAT', P .. 'job:' .. job, v[2] + ARGV[6])
  redis.call('ZADD', P .. 'ended', 'XX', v[2] + ARGV[6], (v[3] or '') .. '|' .. job)
end
redis.call('HDEL', P .. 'batch_jobs:' .. id, ARGV[3])
redis.call('HSET', P .. 'batch_done:' .. id, ARGV[3], ARGV[4])
if ARGV[5] ~= '' then redis.call('HINCRBY', P .. 'batch:' .. id, ARGV[5], 1) end
return 1
"""

# batch, status that it must have, field, value, … → whether it had
_TURN = """
local P, key = ARGV[1], ARGV[1] .. 'batch:' .. ARGV[2]
if redis.call('HGET', key, 'status') ~= ARGV[3] then return 0 end
redis.call('HSET', key, unpack(ARGV, 4))
local status = redis.call('HGET', key, 'status')
if status ~= 'in_progress' and status ~= 'cancelling' then
  redis.call('ZREM', P .. 'batches', ARGV[2])
  redis.call('DEL', P .. 'batch_jobs:' .. ARGV[2], P .. 'batch_done:' .. ARGV[2])
end
return 1
"""

# token, ttl_ms → whether it is this one's turn to work
_TAKE_TURN = """
local key = ARGV[1] .. 'batch_turn'
local who = redis.call('GET', key)
if who and who ~= ARGV[2] then return 0 end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was handed in, or made. `key` is its artifact's; times are seconds since the epoch."""

    id: str
    owner: str
    name: str
    purpose: str
    size: int
    key: str
    created: int

    @classmethod
    def of(cls, id: str, fields: Mapping[str, str]) -> Self:
        return cls(
            id, fields["owner"], fields["name"], fields["purpose"], int(fields["size"]), fields["key"],
            int(fields["created"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch's record. `key` is its input's artifact, whatever becomes of the file; `base` is what links in its output
    begin with; `errors` are those of a file of no use.
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

    @classmethod
    def of(cls, id: str, fields: Mapping[str, str]) -> Self:
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
        )


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """One page of a list; `more` says whether there is another."""

    items: list[T]
    more: bool


class BatchStore:
    """Thread-safe; connects at its first command. Every method raises `StoreDown` or `StoreFull`.

    `retention_s`: how long the record of a job that ended is kept, once its batch has noted what came of it.
    """

    def __init__(self, url: str, *, retention_s: float = 86_400.0) -> None:
        self._client = connect(url)
        self._advance = Script(self._client, _ADVANCE)
        self._note = Script(self._client, _NOTE)
        self._turn = Script(self._client, _TURN)
        self._take_turn = Script(self._client, _TAKE_TURN)
        self._retention_ms = milliseconds(retention_s)
        self._token = secrets.token_hex(8)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.redis_url, retention_s=settings.retention_s)

    def close(self) -> None:
        """Give the connections back. A later call would open new ones."""
        self._client.close()

    # -- files -------------------------------------------------------------------------------------------------------

    def add_file(self, owner: str, name: str, purpose: str, size: int, key: str) -> File:
        file = File(f"file-{secrets.token_hex(12)}", owner, name, purpose, size, key, int(time.time()))
        fields: dict[str, str | int] = {
            "owner": owner,
            "name": name,
            "purpose": purpose,
            "size": size,
            "key": key,
            "created": file.created,
        }
        self._put("file", file.id, owner, fields)
        return file

    @translated()
    def file(self, id: str) -> File | None:
        fields: Any = self._client.hgetall(f"{PREFIX}file:{id}")
        return File.of(id, fields) if fields else None

    def files(
        self, owner: str, *, purpose: str | None = None, oldest: bool = False, after: str = "", limit: int = 10_000
    ) -> Listed[File] | None:
        """Of an owner's files those with this purpose, newest first unless `oldest`, after the one named. None: that
        one is not there.
        """
        wanted = lambda file: purpose in (None, file.purpose)  # noqa: E731
        return self._listed(f"{PREFIX}files:{owner}", "file", File.of, wanted, oldest, after, limit)

    @translated()
    def forget_file(self, file: File) -> None:
        """The record; the artifact goes when its time is over."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.delete(f"{PREFIX}file:{file.id}")
            pipe.zrem(f"{PREFIX}files:{file.owner}", file.id)
            pipe.execute()

    # -- batches -----------------------------------------------------------------------------------------------------

    def add(
        self,
        owner: str,
        endpoint: str,
        file: File,
        total: int,
        base: str,
        metadata: dict[str, str] | None,
        errors: list[dict[str, Any]],
    ) -> Batch:
        """Make a batch of a file. One with `errors` has failed already."""
        id, now = f"batch_{secrets.token_hex(12)}", int(time.time())
        fields: dict[str, str | int] = {
            "owner": owner, "endpoint": endpoint, "input_file": file.id, "key": file.key, "created": now,
            "total": total, "next": 0, "completed": 0, "failed": 0, "base": base, "metadata": to_json(metadata),
            "errors": to_json(errors or None), "status": "failed" if errors else "in_progress",
            "ended": now if errors else "",
        }  # fmt: skip
        self._put("batch", id, owner, fields)
        if not errors:
            with translated():
                self._client.zadd(f"{PREFIX}batches", {id: now})
        return Batch.of(id, {name: str(value) for name, value in fields.items()})

    @translated()
    def batch(self, id: str) -> Batch | None:
        fields: Any = self._client.hgetall(f"{PREFIX}batch:{id}")
        return Batch.of(id, fields) if fields else None

    def batches(self, owner: str, *, after: str = "", limit: int = 1000) -> Listed[Batch] | None:
        """An owner's batches, newest first, after the one named. None: that one is not there."""
        return self._listed(f"{PREFIX}batches:{owner}", "batch", Batch.of, lambda _: True, False, after, limit)

    def active(self) -> list[Batch]:
        """Those that are worked at, oldest first."""
        with translated():
            ids: Any = self._client.zrange(f"{PREFIX}batches", 0, -1)
        return [batch for id in ids if (batch := self.batch(id)) is not None and batch.status in LIVE]

    def my_turn(self, ttl_s: float) -> bool:
        """Whether this process works at batches, for `ttl_s` from now."""
        return bool(self._take_turn(self._token, round(1000 * ttl_s)))

    @translated()
    def under_way(self, id: str) -> dict[int, str]:
        """Job by line."""
        found: Any = self._client.hgetall(f"{PREFIX}batch_jobs:{id}")
        return {int(line): job for line, job in found.items()}

    def results(self, id: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """What came of each line that is done, in their order. Read in portions: all of them may be much."""
        with translated():
            keys: Any = self._client.hkeys(f"{PREFIX}batch_done:{id}")
        lines = sorted(map(int, keys))
        for at in range(0, len(lines), _PORTION):
            portion = lines[at : at + _PORTION]
            with translated():
                found: Any = self._client.hmget(f"{PREFIX}batch_done:{id}", [str(line) for line in portion])
            yield from ((line, json.loads(text)) for line, text in zip(portion, found, strict=True) if text)

    def begin(self, id: str, line: int, job: str) -> bool:
        """This job does the batch's next line. False: it is not the next, or no more lines are begun."""
        return bool(self._advance(id, line, job, "", ""))

    def refuse(self, id: str, line: int, result: dict[str, Any]) -> bool:
        """The batch's next line cannot be done. False: as above."""
        return bool(self._advance(id, line, "", to_json(result), "failed"))

    def note(self, id: str, line: int, result: dict[str, Any], kind: Literal["completed", "failed", ""]) -> bool:
        """What came of a line that was under way, counted as `kind`; "": it was ended before it was done, and is not
        counted. False: it was not under way.
        """
        return bool(self._note(id, line, to_json(result), kind, self._retention_ms))

    def turn(self, batch: Batch, status: str, **fields: str | int) -> bool:
        """Change a batch's status from what it is in this reading. False: it is another by now."""
        flat = [value for pair in {"status": status, **fields}.items() for value in pair]
        return bool(self._turn(batch.id, batch.status, *flat))

    # -- both --------------------------------------------------------------------------------------------------------

    @translated()
    def _put(self, kind: str, id: str, owner: str, fields: Mapping[str, str | int]) -> None:
        plural = f"{PREFIX}{kind}{'es' if kind == 'batch' else 's'}:{owner}"
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(f"{PREFIX}{kind}:{id}", mapping={name: str(value) for name, value in fields.items()})
            pipe.expire(f"{PREFIX}{kind}:{id}", KEPT_S)
            pipe.zadd(plural, {id: time.time()})  # finer than `created`: lists are in this order
            pipe.zremrangebyscore(plural, "-inf", time.time() - KEPT_S)
            pipe.execute()

    @translated()
    def _listed(
        self, index: str, kind: str, of: Callable[[str, Mapping[str, str]], T], wanted: Callable[[T], bool],
        oldest: bool, after: str, limit: int,
    ) -> Listed[T] | None:  # fmt: skip
        """A page of what an index names: of each id a hash `{kind}:{id}`, of which some may be gone by now."""
        rank: Any = (self._client.zrank if oldest else self._client.zrevrank)(index, after) if after else -1
        if rank is None:
            return None
        found: list[T] = []
        while len(found) <= limit:
            ids: Any = self._client.zrange(index, rank + 1, rank + _PORTION, desc=not oldest)
            with self._client.pipeline(transaction=False) as pipe:
                for id in ids:
                    pipe.hgetall(f"{PREFIX}{kind}:{id}")
                records: Any = pipe.execute()
            made = (of(id, fields) for id, fields in zip(ids, records, strict=True) if fields)
            found += [one for one in made if wanted(one)]
            rank += len(ids)
            if len(ids) < _PORTION:
                break
        return Listed(found[:limit], len(found) > limit)
