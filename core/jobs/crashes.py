"""Decides how jobs of a crashed worker continue: beside others again, alone, or not at all.

Most crashes are not caused by a job (a machine, a driver, the kernel's OOM killer), so after the first crash a job runs
again at once beside others: a crash of a worker with many jobs costs one lease, not a solo run of each job. A job that
was present at a second crash, or has one attempt left, runs alone. A request that crashes workers therefore takes
others down at most `COMPANY` times, is identified by running alone, and costs no innocent job its last attempt.
"""

from __future__ import annotations

COMPANY = 2  # crashes a job may be present at before it has to run alone


def alone_from(max_attempts: int) -> int:
    """The number of crashes after which a job runs alone. `max_attempts` is the number after which it fails."""
    return max(1, min(COMPANY, max_attempts - 1))
