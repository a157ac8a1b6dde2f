"""Reads job records as far as lists show them: a text's request and answer, megabytes perhaps, stay in Redis."""

from __future__ import annotations

from typing import TypedDict, Unpack

from core.jobs import keys
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.record import Job, JobIds, JobPage, JobState, pairs, record_id
from core.jobs.unreadable import TALLY, UnreadableRecord

_LOOKS = 2000  # entries that one page of a list may scan
_PAGE_BYTES = 2**20  # that one page reads of requests and results


class JobQuery(TypedDict, total=False):
    """Which jobs of an owner are listed: of a modality, state and model, and at most `limit` (20) after a job."""

    modality: str
    state: JobState | None
    model: str
    after: str
    limit: int


class JobLists(RedisStore):
    """Summaries of jobs: their records, without the `parameters` and the `result` of texts."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._list = self._client.script("jobs/list")
        self._summaries = self._client.script("jobs/summaries")

    def locate(self, id: str, owner: str, *, others: bool = False) -> str:
        """Return the id of the record of the job that an owner calls by this id: of its own with a record of this id,
        as all of 0.3.0 have, or else of the one that it named so; with `others` otherwise of another owner's.
        """
        named = record_id(owner, id)
        if named == id:
            return id
        with self._client.pipeline(transaction=False) as pipe:
            pipe.exists(keys.job(named))
            pipe.exists(keys.job(id))
            pipe.hget(keys.job(id), "owner")
            is_named, is_record, holder = pipe.execute()
        return id if is_record and (holder == owner or (others and not is_named)) else named

    def summary(self, id: str) -> Job | None:
        """Read a record as `page` does. Raises `UnreadableRecord`."""
        (fields,) = self._summaries(_PAGE_BYTES, id)
        return Job.of(id, pairs(fields)) if fields else None

    def page(self, owner: str | None, **query: Unpack[JobQuery]) -> JobPage | None:
        """List an owner's jobs (None: all owners), newest first, after the given one, without the `parameters` and the
        `result` of texts. None: that one does not exist.

        A page may be short, or empty, although more follow, if few of very many jobs are of the modality, state and
        model, or if their records are large.
        """
        listed = self.ids(owner, **query)
        if listed is None:
            return None
        records = self._summaries(_PAGE_BYTES, *listed.ids) if listed.ids else []
        jobs = []
        for id, fields in zip(listed.ids, records, strict=False):
            try:
                if fields:  # one may have ended or changed state since the list was read
                    jobs.append(Job.of(id, pairs(fields)))
            except UnreadableRecord as error:
                TALLY.note(error)
        if len(records) < len(listed.ids):
            return JobPage(jobs, listed.ids[len(records) - 1], True)
        return JobPage(jobs, listed.after, listed.more)

    def ids(self, owner: str | None, **query: Unpack[JobQuery]) -> JobIds | None:
        """List the ids of an owner's jobs as `page` does, without reading their records."""
        rank = 0
        index = "*" if owner is None else owner
        looked_for = query.get("state") or "", query.get("model", ""), query.get("limit", 20), query.get("after", "")
        while True:
            answer = self._list(index, *looked_for, _LOOKS, rank, query.get("modality", ""))
            if answer == 0:
                return None
            last, more, rank, *ids = answer
            if last or more == "0":  # else everything scanned is gone, and there is no position to continue from
                return JobIds(ids, last, more == "1")
