"""Counts or cancels a tenant's live jobs and batches when its key is revoked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core.jobs.batches import LIVE, BatchRecord, BatchStore
from core.jobs.record import JobState
from core.jobs.store import JobStore

_PAGE = 100


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The numbers of an owner's live jobs and batches."""

    jobs: int
    batches: int


def usage(store: JobStore, batches: BatchStore, owner: str) -> TenantUsage:
    """Count an owner's live jobs and batches. Raises `StoreError`."""
    return TenantUsage(sum(1 for _ in _jobs(store, owner)), sum(1 for _ in _batches(batches, owner)))


def cancel_all(store: JobStore, batches: BatchStore, owner: str) -> TenantUsage:
    """Cancel an owner's live batches and jobs; returns how many there were. Raises `StoreError`.

    Batches first, so that none starts another job afterwards: an API cancels their jobs in progress within seconds.
    """
    ended = 0
    for batch in _batches(batches, owner):
        ended += batch.status != "cancelling" and batches.turn(batch, "cancelling")
    jobs = 0
    for id in _jobs(store, owner):
        now = store.cancel(id)
        jobs += now is not None and now.state is JobState.CANCELLED
    return TenantUsage(jobs, ended)


def _jobs(store: JobStore, owner: str) -> Iterator[str]:
    """The ids of an owner's live jobs."""
    for state in (JobState.QUEUED, JobState.RUNNING):
        after = ""
        while (page := store.lists.ids(owner, state=state, after=after, limit=_PAGE)) is not None:
            yield from page.ids
            after = page.after
            if not page.more or not after:
                break


def _batches(batches: BatchStore, owner: str) -> Iterator[BatchRecord]:
    after = ""
    while (page := batches.batches(owner, after=after, limit=_PAGE)) is not None:
        yield from (batch for batch in page.items if batch.status in LIVE)
        if not page.more or not page.items:
            break
        after = page.items[-1].id
