"""Sweeps for passed deadlines, expired leases and lost messages; any process that can send messages may run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.jobs.broker import QUEUES, Envelope
from core.jobs.connection import RedisClient
from core.jobs.crashes import alone_from
from core.jobs.limits import JobLimits
from core.jobs.memory import StoreMemory
from core.jobs.record import milliseconds
from core.jobs.unreadable import TALLY, UnreadableRecord

MARGIN_MS = 3_600_000  # an artifact outlives the records that reference it by this
_SILENCE_S = 5.0  # a longer gap between sweeps means that Redis was unreachable


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep: envelopes that the caller must send, ids of jobs that it ended, and how many expired list
    entries it examined.
    """

    send: list[Envelope]
    expired: list[str]
    failed: list[str]
    over: int = 0


class JobUpkeep:
    """Sweeps of jobs, the artifacts that records reference, and the memory that all take."""

    def __init__(self, client: RedisClient, limits: JobLimits) -> None:
        self._client = client
        self._max_attempts = limits.max_attempts
        self._lease_ms = milliseconds(limits.lease_s)
        self._retention_ms = milliseconds(limits.retention_s)
        self._resend_ms = milliseconds(limits.resend_s)
        self._overtime_ms = milliseconds(limits.overtime_s)
        self._silence_ms = milliseconds(max(_SILENCE_S, limits.lease_s / 3))
        self._sweep = client.script("jobs/sweep")
        self._keep = client.script("artifacts/keep")
        self._due = client.script("artifacts/due")
        self._gone = client.script("artifacts/gone")

    def sweep(self, limit: int = 100) -> SweepResult:
        """Handle passed deadlines, expired leases and lost messages.

        At most `limit` jobs of each, and five times as many expired records. Several sweeps may run at once. Envelopes
        found count as sent: if the caller cannot send one, a later sweep finds it again. A sweep after a long gap
        (Redis was down) extends every lease once, because no worker could renew it.
        """
        send, expired, failed, ended, unreadable = self._sweep(
            limit, self._lease_ms, self._max_attempts, self._retention_ms, self._resend_ms, self._overtime_ms,
            self._silence_ms, alone_from(self._max_attempts), *QUEUES,
        )  # fmt: skip
        for id in unreadable:
            TALLY.note(UnreadableRecord("record", id, "it is of a newer version, or a field has the wrong type"))
        envelopes = [
            Envelope(id, queue, int(level), model=model)
            for id, queue, model, level in zip(*(send[at::4] for at in range(4)), strict=True)
        ]
        return SweepResult(envelopes, expired, failed, ended)

    def keep(self, artifact: str, for_s: float | None = None, *, hold: bool = False) -> bool:
        """Announce the write of an artifact, so that no sweep deletes it. False: it is being deleted; ask again.

        It is kept as long as a record that ends now, plus an hour; or for `for_s`, with `hold`, even if the job is
        erased.
        """
        keep_ms = self._retention_ms + MARGIN_MS if for_s is None else milliseconds(for_s)
        return bool(self._keep(keep_ms, artifact, "1" if hold else ""))

    def due(self, limit: int = 100) -> list[str]:
        """List artifacts that nothing references. The caller deletes them, then calls `gone`; else they are listed
        again.
        """
        return list(self._due(limit))

    def gone(self, artifacts: Sequence[str]) -> None:
        """Confirm that these are deleted."""
        if artifacts:
            self._gone(*artifacts)

    def memory(self) -> StoreMemory:
        """Redis's memory: without a limit of its own, that of its machine."""
        reply: Any = self._client.info("memory")
        most = int(reply.get("maxmemory", 0)) or int(reply.get("total_system_memory", 0))
        return StoreMemory(int(reply["used_memory"]), most)
