"""Counts or cancels a tenant's live jobs and batches when its key is revoked, and erases what it has left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.jobs.batches import LIVE, BatchRecord, BatchStore
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.files import FileStore
from core.jobs.keys import PREFIX
from core.jobs.record import JobState
from core.jobs.store import JobStore

_PAGE = 100


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The numbers of an owner's live jobs and batches."""

    jobs: int
    batches: int


@dataclass(frozen=True, slots=True)
class ErasedRecords:
    """The numbers of a tenant's records that were erased, the bytes of Redis that they took, and those of its files."""

    jobs: int
    batches: int
    files: int
    store_bytes: int
    file_bytes: int


class TenantRecords(RedisStore):
    """All records of a tenant."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._footprint = self._client.script("keys/footprint")
        self._forget_batch = self._client.script("batches/forget")
        self._files = FileStore(self._client)

    def footprint(self, owner: str) -> int:
        """The bytes of Redis that an owner's records take, as limits count them."""
        return int(self._footprint(owner))

    def erase(self, store: JobStore, owner: str) -> ErasedRecords:
        """Erase an owner's jobs, batches and files, live ones too. Artifacts that nothing else references are deleted
        within seconds. Raises `StoreError`; may be repeated.
        """
        before, file_bytes = self.footprint(owner), self._files.used_bytes(owner)
        batches = jobs = 0
        for id in self._entries(f"batches:{owner}"):
            forgotten = bool(self._forget_batch(id))
            batches += forgotten
            if not forgotten:  # its record has expired
                self._client.zrem(f"{PREFIX}batches:{owner}", id)
        for entry in self._entries(f"jobs:{owner}"):
            id = entry.partition("|")[2]
            # Else it is another's that has the id of an expired one.
            own = self._client.hget(f"{PREFIX}job:{id}", "owner") == owner
            erased = own and store.erase(id)
            jobs += erased
            if not erased:  # its record has expired
                self._client.zrem(f"{PREFIX}jobs:{owner}", entry)
                self._client.zrem(f"{PREFIX}jobs", entry)
        files = 0
        while (page := self._files.files(owner, limit=_PAGE)) is not None and page.items:
            for file in page.items:
                self._files.forget(file)
            files += len(page.items)
        return ErasedRecords(jobs, batches, files, before - self.footprint(owner), file_bytes)

    def _entries(self, index: str) -> Iterator[str]:
        """The entries of an index, oldest first, which the caller removes."""
        before: list[str] = []
        while True:
            entries: Any = self._client.zrange(f"{PREFIX}{index}", 0, _PAGE - 1)
            if not entries or entries == before:
                return
            yield from entries
            before = entries


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
