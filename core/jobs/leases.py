"""What a worker does with jobs: claims them, renews its leases, reports progress, and ends them or hands them back."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import Invalid
from core.jobs import keys
from core.jobs.broker import Envelope
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.record import Claim, JobState, Report, Told, from_json, milliseconds, to_json
from core.jobs.unreadable import TALLY, Unreadable, check_version

MARGIN_MS = 3_600_000  # for which an artifact outlives the records that name it


class JobLeases(RedisStore):
    """The jobs of workers. A worker's `attempt` is its claim's `fence`, which every write is checked against.

    `lease_s`: a worker silent for so long loses its jobs. `retention_s`: how long a job that ended is kept.
    """

    def __init__(self, redis: RedisClient | str, *, lease_s: float = 15.0, retention_s: float = 86_400.0) -> None:
        RedisStore.__init__(self, redis)
        self._lease_ms = milliseconds(lease_s)
        self._retention_ms = milliseconds(retention_s)
        self._claim = self._client.script("jobs/claim")
        self._renew = self._client.script("jobs/renew")
        self._report = self._client.script("jobs/report")
        self._finish = self._client.script("jobs/finish")
        self._hand_back = self._client.script("jobs/hand_back")
        self._keep = self._client.script("artifacts/keep")

    def suspect(self, id: str) -> bool:
        """Whether the job must run alone, because a worker stopped answering while it ran. False if unknown."""
        return self._client.hget(keys.job(id), "suspect") == "1"

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
        attempt, modality, model, parameters, priority, left_ms, suspect, trace, request_id, of, followed, owner = (
            answer
        )
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
            owner=owner,
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
        keep_ms = self._retention_ms + MARGIN_MS if for_s is None else milliseconds(for_s)
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
