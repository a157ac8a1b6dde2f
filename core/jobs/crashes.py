"""Decides what becomes of jobs whose worker crashed: which may run beside others again, which alone, and which no more.

Most crashes are no job's fault (a machine, a driver, the kernel's memory killer), so after its first one a job runs
again at once and beside others: a crash of a worker with many jobs costs a lease, and not a time alone for each of
them. A job that was there at a second crash, or has one life left, runs alone. So a request that crashes workers takes
others down `COMPANY` times at most, is found by running alone, and costs no innocent job its last life.
"""

from __future__ import annotations

COMPANY = 2  # crashes that a job may have been there at, and still it is not known whose fault they were


def alone_from(max_attempts: int) -> int:
    """After so many crashes a job runs alone. `max_attempts` is how many it is given up after."""
    return max(1, min(COMPANY, max_attempts - 1))


def runs_alone(lost: int, max_attempts: int) -> bool:
    """Whether a job that was there at `lost` crashes runs alone from now on."""
    return lost >= alone_from(max_attempts)


def given_up(lost: int, max_attempts: int) -> bool:
    """Whether a job that was there at `lost` crashes fails."""
    return lost >= max_attempts
