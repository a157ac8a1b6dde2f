"""Sweeps: what nobody looks after is found, by any process that can send messages and delete artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.jobs.broker import PRIORITY_STEPS, QUEUES, Envelope, list_key
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.crashes import alone_from
from core.jobs.record import milliseconds
from core.jobs.unreadable import TALLY, Unreadable

_SILENCE_S = 5.0  # without any sweep: it says that nobody could reach Redis


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one sweep did: envelopes that the caller must send, the ids of jobs that it ended, and how many entries of
    the lists it looked at whose records' time is up.
    """

    send: list[Envelope]
    expired: list[str]
    failed: list[str]
    over: int = 0


class JobUpkeep(RedisStore):
    """Sweeps of jobs, and artifacts that are due. The limits are `JobStore`'s."""

    def __init__(
        self,
        redis: RedisClient | str,
        *,
        lease_s: float = 15.0,
        max_attempts: int = 3,
        retention_s: float = 86_400.0,
        resend_s: float = 5.0,
        overtime_s: float = 2.0,
    ) -> None:
        RedisStore.__init__(self, redis)
        self._max_attempts = max_attempts
        self._lease_ms = milliseconds(lease_s)
        self._retention_ms = milliseconds(retention_s)
        self._resend_ms = milliseconds(resend_s)
        self._overtime_ms = milliseconds(overtime_s)
        self._silence_ms = milliseconds(max(_SILENCE_S, lease_s / 3))
        self._sweep = self._client.script("jobs/sweep")
        self._due = self._client.script("artifacts/due")
        self._gone = self._client.script("artifacts/gone")

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

    def due(self, limit: int = 100) -> list[str]:
        """Artifacts that nobody names any more. Who asks deletes them, and says `gone`; else they are told again."""
        return list(self._due(limit))

    def gone(self, artifacts: Sequence[str]) -> None:
        """These are deleted."""
        if artifacts:
            self._gone(*artifacts)
