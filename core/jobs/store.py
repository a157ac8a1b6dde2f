"""The jobs' records: every change of state is one Lua script, so that a job is never lost and never finished twice.

Knows states, leases, deadlines and counters; knows nothing of Celery: callers send the envelopes that it returns.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from contract.errors import Invalid
from core.config import Settings
from core.jobs import creation, keys, ledger, progress, scripts
from core.jobs.broker import PRIORITY_STEPS, QUEUES, Envelope, list_key
from core.jobs.connection import Script, connect, translated
from core.jobs.crashes import alone_from
from core.jobs.record import (
    Backlog,
    Claim,
    Draft,
    Job,
    JobState,
    Page,
    Report,
    Standing,
    Told,
    from_json,
    milliseconds,
    pairs,
    to_json,
)
from core.jobs.unreadable import TALLY, Unreadable, check_version

_SILENCE_S = 5.0  # without any sweep: it says that nobody could reach Redis
_MARGIN_MS = 3_600_000  # for which an artifact outlives the records that name it
_LOOKS = 2000  # entries that one page of a list may look through


class QueueFull(RuntimeError):
    """A queue holds as many waiting jobs as it may. Not a `StoreError`: nothing is wrong with the store."""

    def __init__(self, queue: str, limit: int) -> None:
        super().__init__(f"the {queue} queue holds {limit} jobs and takes no more")
        self.queue = queue
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one sweep did: envelopes that the caller must send, the ids of jobs that it ended, and how many entries of
    the lists it looked at whose records' time is up.
    """

    send: list[Envelope]
    expired: list[str]
    failed: list[str]
    over: int = 0


class JobStore:
    """Thread-safe; connects at its first command. Every method raises `StoreDown` or `StoreFull`.

    On a full Redis only `create` and `report` are refused. A call that was cut off, so that nobody knows whether it
    took effect, may be repeated with the same arguments: it takes effect once, and answers as it would have (but for
    `claim`, which then says None until the lease has run out).

    An id may be another job's by now: where an `incarnation` may be given, a job of that id with another one counts as
    unknown. A worker's `attempt` is its claim's `fence`; a bare number says the same where no id is used again.

    `lease_s`: a worker silent for so long loses its jobs. `max_attempts`: as many workers lost while they ran it, and
    a job fails. `max_queued`: jobs that may wait in one queue. `retention_s`: how long the record and the events of a
    job that ended are kept. `resend_s`: how long a message may be on its way before it counts as lost. `overtime_s`:
    how long after its deadline a running job is left to its worker to expire.
    """

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = 15.0,
        max_attempts: int = 3,
        max_queued: int = 1000,
        retention_s: float = 86_400.0,
        resend_s: float = 5.0,
        overtime_s: float = 2.0,
    ) -> None:
        self._max_attempts = max_attempts
        self._max_queued = max_queued
        self._lease_ms = milliseconds(lease_s)
        self._retention_ms = milliseconds(retention_s)
        self._resend_ms = milliseconds(resend_s)
        self._overtime_ms = milliseconds(overtime_s)
        self._silence_ms = milliseconds(max(_SILENCE_S, lease_s / 3))
        self._client = connect(url)
        self._create = Script(self._client, creation.CREATE)
        self._claim = Script(self._client, scripts.CLAIM)
        self._renew = Script(self._client, scripts.RENEW)
        self._report = Script(self._client, progress.REPORT)
        self._finish = Script(self._client, scripts.FINISH)
        self._hand_back = Script(self._client, scripts.HAND_BACK)
        self._cancel = Script(self._client, scripts.CANCEL)
        self._follow = Script(self._client, progress.FOLLOW)
        self._sweep = Script(self._client, scripts.SWEEP)
        self._standing = Script(self._client, ledger.STANDING)
        self._list = Script(self._client, ledger.LIST)
        self._erase = Script(self._client, ledger.ERASE)
        self._empty = Script(self._client, ledger.EMPTY)
        self._keep = Script(self._client, ledger.KEEP)
        self._due = Script(self._client, ledger.DUE)
        self._gone = Script(self._client, ledger.GONE)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The store that the settings name, with their limits."""
        return cls(
            settings.redis_url,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            max_queued=settings.max_queued,
            retention_s=settings.retention_s,
        )

    def close(self) -> None:
        """Give the connections back. A later call would open new ones."""
        self._client.close()

    # -- for those who want something done -------------------------------------------------------------------

    def create(self, draft: Draft) -> Job:
        """`make`, for who knows that the id is new."""
        return self.make(draft)[0]

    def make(self, draft: Draft, message: str = "") -> tuple[Job, bool]:
        """Make the record of a queued job, and put `message` into its queue's list, which has a worker look at it.

        Without one the caller sends `Envelope(job.id, job.modality, job.priority)`. Raises `QueueFull`, and `StoreFull`
        with nothing made. A draft that is already a job is returned as it stands; where clients choose ids, its `owner`
        and `digest` tell whether it is the same. With it comes whether this call made it, which one that was cut off
        and repeated does not know.
        """
        answer = self._create(creation.argument(draft, self._max_queued, message))
        made = creation.outcome(draft, (), answer)
        if made.job is None:
            raise QueueFull(draft.modality, self._max_queued)
        return made.job, made.made

    @translated()
    def get(self, id: str) -> Job | None:
        """The record; None if there is none, or no longer. Raises `Unreadable`."""
        fields: Any = self._client.hgetall(keys.job(id))
        return Job.of(id, fields) if fields else None

    @translated()
    def preview(self, id: str, image: int, incarnation: str = "") -> bytes | None:
        """The newest look at a picture in the making, as PNG. None: there is none, or no longer."""
        found: Any = self._client.hmget(keys.preview(id), str(image), "of")
        look, of = found
        return base64.b64decode(look) if look and incarnation in ("", of) else None

    def cancel(self, id: str, incarnation: str = "") -> Job | None:
        """End a queued or running job at once; its worker is told. One that has ended stays as it is. None: unknown."""
        fields = pairs(self._cancel(id, self._retention_ms, incarnation))
        return Job.of(id, fields) if fields else None

    def erase(self, id: str, incarnation: str = "") -> bool:
        """Forget a job, which ends it first if it lives. What it made goes too, unless others name it. False: unknown.

        A worker that is still at it cannot write to another job of this id.
        """
        return bool(self._erase(id, self._retention_ms, self._retention_ms + _MARGIN_MS, incarnation))

    def follow(self, id: str, incarnation: str = "") -> bool:
        """Have a live job's progress told from now on, with all of its texts. False: it does not live."""
        return bool(self._follow(id, incarnation))

    def empty(self, queue: str, limit: int = 500) -> int:
        """Cancel up to `limit` jobs that wait in a queue, the most urgent first. Returns how many: fewer, and none is
        left. In portions, because Redis answers nobody else meanwhile.
        """
        return int(self._empty(queue, self._retention_ms, limit, *PRIORITY_STEPS))

    def standing(self, id: str) -> Standing | None:
        """Where a queued job waits. None: it does not wait."""
        answer = self._standing(id, *PRIORITY_STEPS)
        return None if not answer else Standing(int(answer[0]), Backlog(*map(int, answer[1:])))

    def page(
        self, owner: str | None, *, state: JobState | None = None, model: str = "", after: str = "", limit: int = 20
    ) -> Page | None:
        """Jobs of an owner (None: everybody's), newest first, after the one named. None: that one is not there.

        Where few of very many jobs are of this state and model, a page may be short, or empty, and there may be more.
        """
        rank = 0
        while True:
            answer = self._list("*" if owner is None else owner, state or "", model, limit, after, _LOOKS, rank)
            if answer == 0:
                return None
            last, more, rank, *ids = answer
            if last or more == "0":  # else all that was looked at is gone, and nothing to go on after
                break
        with translated(), self._client.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hgetall(keys.job(id))
            found: Any = pipe.execute()
        jobs = []
        for id, fields in zip(ids, found, strict=True):
            try:
                if fields:  # one may have gone, or moved on, since the list was read
                    jobs.append(Job.of(id, fields))
            except Unreadable as error:
                TALLY.note(error)
        return Page(jobs, last, more == "1")

    @translated()
    def backlog(self, queue: str) -> Backlog:
        """What a queue holds, in jobs and in estimated work."""
        fields: Any = self._client.hmget(keys.backlog(queue), "queued", "queued_ms", "running", "running_ms")
        return Backlog(*(int(field or 0) for field in fields))

    # -- for those who do it ---------------------------------------------------------------------------------

    @translated()
    def suspect(self, id: str) -> bool:
        """Whether the job must run alone, because a worker stopped answering while it ran. False if unknown."""
        return self._client.hget(keys.job(id), "suspect") == "1"

    @translated()
    def glance(self, id: str) -> tuple[bool, bool, str]:
        """Whether the job waits, whether it must run alone, and the model that it names.

        That is empty if the job is unknown, or of a newer version, which workers of that version can read.
        """
        found: Any = self._client.hmget(keys.job(id), "state", "suspect", "model", "v")
        try:
            check_version("record", id, found[3])
        except Unreadable as error:
            TALLY.note(error)
            return found[0] == JobState.QUEUED, False, ""
        return found[0] == JobState.QUEUED, found[1] == "1", found[2] or ""

    def claim(self, id: str, worker: str) -> Claim | None:
        """Take a queued job. None: nothing to do (live elsewhere, ended, unknown, or its deadline has passed).

        One whose parameters cannot be read is failed.
        """
        answer = self._claim(id, worker, secrets.token_hex(8), self._lease_ms, self._retention_ms)
        if not answer:
            return None
        attempt, modality, model, parameters, priority, left_ms, suspect, trace, request_id, of, followed = answer
        try:
            asked = from_json(parameters) or {}
            asked.keys()
        except (ValueError, RecursionError, AttributeError):
            TALLY.note(Unreadable("record", id, "its parameters are no JSON object"))
            self.fail(id, f"{attempt}@{of}", "record_unreadable", "the job's record is damaged")
            return None
        return Claim(
            id=id,
            attempt=int(attempt),
            modality=modality,
            model=model,
            parameters=asked,
            priority=int(priority),
            deadline_left_s=None if left_ms == "" else int(left_ms) / 1000,
            suspect=suspect == "1",
            trace=trace,
            request_id=request_id,
            incarnation=of,
            followed=followed == "1" if followed else None,
        )

    def renew(self, worker: str, held: Mapping[str, int | str]) -> set[str]:
        """Extend the leases of jobs, id to attempt; returns the ids that are no longer this worker's."""
        if not held:
            return set()
        return set(self._renew(worker, self._lease_ms, *(value for pair in held.items() for value in pair)))

    def report(self, items: Sequence[Report]) -> set[str]:
        """`tell`, for who need not know who follows: the ids whose attempt is no longer the running one."""
        return self.tell(items).stale

    def tell(self, items: Sequence[Report]) -> Told:
        """Tell progress, in one round trip."""
        if not items:
            return Told(set(), set())
        flat: list[str | int] = []
        for item in items:
            looks = [value for look in item.previews.items() for value in look]
            event = to_json({**item.data, "pieces": item.pieces}) if item.pieces else ""
            whole = "1" if item.pieces and item.whole else ""
            flat += (item.id, item.attempt, to_json(item.data), event, whole, len(looks), *looks)
        stale, followed = self._report(*flat)
        return Told(set(stale), set(followed))

    def succeed(self, id: str, attempt: int | str, result: dict[str, Any], artifacts: Sequence[str] = ()) -> bool:
        """End a running job. False: refused, because this attempt no longer runs.

        `artifacts` are the keys of what its result names; they are kept as long as its record, and an hour.
        """
        return self._end(id, attempt, JobState.SUCCEEDED, "result", to_json(result), " ".join(dict.fromkeys(artifacts)))

    def keep(self, artifact: str, for_s: float | None = None, *, hold: bool = False) -> bool:
        """Say that an artifact is about to be made, so that nobody deletes it. False: that is happening; ask again.

        It stays for as long as a record that ends now, and an hour; or for `for_s`, with `hold` whatever job is erased.
        """
        keep_ms = self._retention_ms + _MARGIN_MS if for_s is None else milliseconds(for_s)
        return bool(self._keep(keep_ms, artifact, "1" if hold else ""))

    def fail(self, id: str, attempt: int | str, code: str, message: str) -> bool:
        """End a running job with an error that may be shown. False: refused, as above."""
        return self._end(id, attempt, JobState.FAILED, "error", to_json({"code": code, "message": message}))

    def refuse(self, id: str, attempt: int | str, error: Invalid) -> bool:
        """End a running job whose request cannot be served. False: refused, as above."""
        return self._end(id, attempt, JobState.FAILED, "error", to_json(error.told()))

    def expire(self, id: str, attempt: int | str) -> bool:
        """End a running job whose deadline has passed. False: refused, as above."""
        return self._end(id, attempt, JobState.EXPIRED)

    def _end(self, id: str, attempt: int | str, state: JobState, *field: str) -> bool:
        return bool(self._finish(id, attempt, state.value, self._retention_ms, *field))

    def hand_back(self, id: str, attempt: int | str) -> Envelope | None:
        """Queue a running job again, at no cost to it; the caller sends the envelope. None: refused, as above.

        It goes before all that was never begun.
        """
        queue = self._hand_back(id, attempt)
        return Envelope(id, queue, 0) if queue else None

    def due(self, limit: int = 100) -> list[str]:
        """Artifacts that nobody names any more. Who asks deletes them, and says `gone`; else they are told again."""
        return list(self._due(limit))

    def gone(self, artifacts: Sequence[str]) -> None:
        """These are deleted."""
        if artifacts:
            self._gone(*artifacts)

    # -- for everybody, now and then -------------------------------------------------------------------------

    def sweep(self, limit: int = 100) -> Sweep:
        """Look after what nobody looks after: deadlines that passed, leases that ran out, messages that got lost.

        Each at most `limit` jobs, and five times as many whose record's time is up. Many may sweep at once. What it
        finds to send counts as sent: if the caller cannot send it, a later sweep finds it again. A sweep after a long
        time without any (Redis was away) lets every lease run for once more, because nobody could renew.
        """
        lists = [(queue, step, list_key(queue, step)) for queue in QUEUES for step in PRIORITY_STEPS]
        send, expired, failed, ended, unreadable = self._sweep(
            limit, self._lease_ms, self._max_attempts, self._retention_ms, self._resend_ms, self._overtime_ms,
            self._silence_ms, alone_from(self._max_attempts), *(value for entry in lists for value in entry),
        )  # fmt: skip
        for id in unreadable:
            TALLY.note(Unreadable("record", id, "it is of a newer version, or a field is of another form"))
        envelopes = [
            Envelope(id, queue, int(level)) for id, queue, level in zip(send[::3], send[1::3], send[2::3], strict=True)
        ]
        return Sweep(envelopes, expired, failed, ended)
