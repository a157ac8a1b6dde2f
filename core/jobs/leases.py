"""The worker's side of job state: claim, renew leases, report progress, finish or hand back."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from core.jobs import keys
from core.jobs.broker import Envelope, level, list_key
from core.jobs.connection import RedisClient
from core.jobs.limits import JobLimits
from core.jobs.record import Claim, JobState, ProgressReport, ReportOutcome, fence, from_json, milliseconds, to_json
from core.jobs.unreadable import TALLY, UnreadableRecord, check_version


class JobLeases:
    """Job state for workers, which is written with a client whose errors are `StoreError`s.

    A worker's `attempt` is its claim's fencing token (`fence`); every write is checked against it.
    """

    def __init__(self, client: RedisClient, limits: JobLimits) -> None:
        self._client = client
        self._lease_ms = milliseconds(limits.lease_s)
        self._retention_ms = milliseconds(limits.retention_s)
        self._offer = client.script("jobs/offer")
        self._claim = client.script("jobs/claim")
        self._renew = client.script("jobs/renew")
        self._report = client.script("jobs/report")
        self._finish = client.script("jobs/finish")
        self._hand_back = client.script("jobs/hand_back")
        self._route = client.script("jobs/route")

    def glance(self, id: str) -> tuple[bool, bool, str]:
        """Return whether the job is queued, whether it must run alone, and the model that it names.

        The model is empty if the job is unknown or of a newer version, which only workers of that version can read.
        """
        reply: Any = self._client.hmget(keys.job(id), "state", "suspect", "model", "v")
        try:
            check_version("record", id, reply[3])
        except UnreadableRecord as error:
            TALLY.note(error)
            return reply[0] == JobState.QUEUED, False, ""
        return reply[0] == JobState.QUEUED, reply[1] == "1", reply[2] or ""

    def asked(self, id: str) -> tuple[dict[str, Any], bool]:
        """The parameters of a job, and whether it has a deadline. What is unknown or unreadable has no parameters."""
        reply: Any = self._client.hmget(keys.job(id), "parameters", "deadline")
        try:
            parameters = from_json(reply[0] or "{}")
        except (ValueError, RecursionError):
            parameters = None
        return parameters if isinstance(parameters, dict) else {}, reply[1] is not None

    def offer(self, envelopes: Mapping[Envelope, str], for_s: float) -> bool:
        """Push messages (envelope → message) of one queued job into the own lists of workers. False: it is not queued.

        The lists vanish unless their workers take from them within `for_s`, and until then no sweep counts the job's
        message as lost; `for_s` is a lease at most.
        """
        pushes = [
            (list_key(envelope.kombu_queue, level(envelope.priority)), message)
            for envelope, message in envelopes.items()
        ]
        id = next(iter(envelopes)).id
        return bool(self._offer(id, milliseconds(for_s), *(value for push in pushes for value in push)))

    def claim(self, id: str, worker: str) -> Claim | None:
        """Claim a queued job. None: nothing to do (running elsewhere, ended, unknown, or past its deadline).

        A job whose parameters cannot be read is failed.
        """
        answer = self._claim(id, worker, secrets.token_hex(8), self._lease_ms, self._retention_ms)
        if not answer:
            return None
        (
            attempt, modality, model, parameters, priority, left_ms, suspect, trace, request_id, of, followed, owner,
            checker, lays,
        ) = answer  # fmt: skip
        try:
            decoded = from_json(parameters) or {}
            decoded.keys()
        except (ValueError, RecursionError, AttributeError):
            TALLY.note(UnreadableRecord("record", id, "its parameters are no JSON object"))
            self.fail(id, f"{attempt}@{of}", "record_unreadable", "the job's record is damaged")
            return None
        return Claim(
            id=id,
            attempt=int(attempt),
            modality=modality,
            model=model,
            parameters=decoded,
            priority=int(priority),
            deadline_left_s=None if left_ms == "" else int(left_ms) / 1000,
            suspect=suspect == "1",
            trace=trace,
            request_id=request_id,
            incarnation=of,
            followed=followed == "1" if followed else None,
            owner=owner,
            checker=checker,
            lays=lays == "1",
        )

    def fence_of(self, id: str, worker: str) -> str | None:
        """The fencing token by which this worker runs the job. None: it does not run it."""
        reply: Any = self._client.hmget(keys.job(id), "state", "worker", "attempt", "incarnation")
        state, holder, attempt, incarnation = reply
        return fence(attempt, incarnation) if (state, holder) == (JobState.RUNNING, worker) else None

    def renew(self, worker: str, leases: Mapping[str, int | str]) -> set[str]:
        """Renew the leases of jobs, given as id → attempt; returns the ids that this worker no longer holds."""
        if not leases:
            return set()
        return set(self._renew(worker, self._lease_ms, *(value for pair in leases.items() for value in pair)))

    def report(self, items: Sequence[ProgressReport]) -> ReportOutcome:
        """Report progress in one round trip; returns lost and followed ids."""
        if not items:
            return ReportOutcome(set(), set())
        flat: list[str | int] = []
        for item in items:
            looks = [value for look in item.previews.items() for value in look]
            event = to_json({**item.data, "pieces": item.pieces}) if item.pieces else ""
            complete = "1" if item.pieces and item.complete else ""
            flat += (item.id, item.attempt, to_json(item.data), event, complete, len(looks), *looks)
        stale, followed = self._report(*flat)
        return ReportOutcome(set(stale), set(followed))

    def succeed(self, id: str, attempt: int | str, result: dict[str, Any], artifacts: Sequence[str] = ()) -> bool:
        """End a running job successfully. False: refused, because this attempt no longer runs.

        `artifacts` are the keys that its result references; they are kept as long as its record, plus an hour.
        """
        return self._end(id, attempt, JobState.SUCCEEDED, "result", to_json(result), " ".join(dict.fromkeys(artifacts)))

    def fail(self, id: str, attempt: int | str, code: str, message: str, **detail: str | None) -> bool:
        """End a running job with an error that may be shown to the client. False: refused, as for `succeed`.

        `detail` are further fields of the error, as `Invalid.to_dict` has them.
        """
        return self._end(id, attempt, JobState.FAILED, "error", to_json({"code": code, "message": message, **detail}))

    def expire(self, id: str, attempt: int | str) -> bool:
        """End a running job whose deadline has passed. False: refused, as for `succeed`."""
        return self._end(id, attempt, JobState.EXPIRED)

    def _end(self, id: str, attempt: int | str, state: JobState, *field: str) -> bool:
        return bool(self._finish(id, attempt, state.value, self._retention_ms, *field))

    def hand_back(self, id: str, attempt: int | str) -> Envelope | None:
        """Requeue a running job without counting an attempt; the caller sends the envelope. None: refused, as for
        `succeed`.

        It is placed before all jobs that were never started.
        """
        answer = self._hand_back(id, attempt)
        return Envelope(id, answer[0], 0, model=answer[1]) if answer else None

    def route(self, id: str) -> Envelope | None:
        """Move a queued job, whose message an older version has sent to all models' queue, to the queue of its model;
        the caller sends the envelope. None: it is not queued, not readable, or there already.
        """
        answer = self._route(id)
        return Envelope(id, answer[0], int(answer[2]), model=answer[1]) if answer else None
