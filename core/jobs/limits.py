"""The limits by which jobs live in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from core.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Limits in seconds, attempts and jobs, equal in all processes of a service.

    `lease_s`: a worker silent for this long loses its jobs. `max_attempts`: a job fails after this many workers were
    lost while running it. `max_queued`: waiting jobs per queue. `retention_s`: how long the record and the events of an
    ended job are kept. `resend_s`: how long a message may be in transit before it counts as lost. `overtime_s`: how
    long after its deadline a running job is left for its worker to expire.
    """

    lease_s: float = 15.0
    max_attempts: int = 3
    max_queued: int = 1000
    retention_s: float = 86_400.0
    resend_s: float = 5.0
    overtime_s: float = 2.0

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return those of the settings; the last two have no setting."""
        return cls(
            lease_s=settings.lease_s, max_attempts=settings.max_attempts, max_queued=settings.max_queued,
            retention_s=settings.retention_s,
        )  # fmt: skip
