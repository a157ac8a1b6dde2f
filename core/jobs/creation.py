"""Encodes arguments and decodes answers of the script that creates a job.

One script charges the rate limits, writes the record, pushes the message into the queue's list and returns the queue
position, so that every record has its message, and only created jobs are charged. The message is
opaque here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from core.jobs import rates
from core.jobs.broker import level, list_key
from core.jobs.record import Job, JobDraft, JobState, QueueBacklog, QueuePosition, milliseconds, pairs, to_json

# The possible outcomes; else the job existed already, or is refused.
_MADE, _FULL, _SHARE, _BARRED, _STORED = 1, -1, -3, -4, -8
_JOBS_OF: Final[dict[int, Literal["model", "queue"]]] = {-6: "model", -7: "queue"}


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """Limits of one owner's jobs in a queue, and of its records; None, or empty: none.

    `waiting` are queued jobs, `live` queued or running ones, `of_model` live ones of the draft's model. `running`
    limits those of the model that run or whose messages wait for a worker: a number, or a share of the workers' places
    such as 50%. More of them wait; more of the others are refused. `stored` are the bytes of Redis that all records of
    the owner may take (`lua/shared/footprint.lua`).
    """

    waiting: int | None = None
    of_model: int | None = None
    live: int | None = None
    running: str = ""
    stored: int | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        counts = (self.waiting, self.of_model, self.live)
        stored = "" if self.stored is None else str(self.stored)
        return *("" if count is None else str(count) for count in counts), self.running, stored


UNLIMITED = OwnerLimits()


@dataclass(frozen=True, slots=True)
class JobCreation:
    """The outcome for a draft. `job` is None where it was refused: the queue is `full`, the owner's `share` of it is
    used up, as many jobs as may are live (`jobs_of` says whether of the "model" or the "queue"), the owner is `barred`
    (or has no key where one is required), its records take all the bytes that they may (`stored`), or the last of
    `charges` exceeds its limit.

    `created`: this call created the job; a retried call whose first reply was lost cannot tell. `standing` is the queue
    position of a job created now. `charges` is the state of the counters that were charged, and of the one exceeded.
    """

    job: Job | None
    created: bool = False
    full: bool = False
    share: bool = False
    barred: bool = False
    stored: bool = False
    jobs_of: Literal["", "model", "queue"] = ""
    standing: QueuePosition | None = None
    charges: tuple[rates.RateLimitState, ...] = ()


def argument(
    draft: JobDraft[Any],
    max_queued: int,
    message: str = "",
    charges: Sequence[rates.RateLimitCost] = (),
    always: int = 0,
    limits: OwnerLimits = UNLIMITED,
    *,
    keyless: bool = False,
) -> str:
    """Encode the argument of `lua/jobs/create.lua`. The first `always` charges count even if no job is created.

    `keyless`: the request came without a key, and is barred if keys are required by now.
    """
    urgency = level(draft.priority)
    return to_json([
        draft.id, draft.modality, draft.model, to_json(draft.parameters), str(draft.priority), str(urgency),
        "" if draft.deadline_s is None else str(milliseconds(draft.deadline_s)), str(int(draft.work_ms)),
        str(max_queued), draft.owner, draft.digest, "" if draft.webhook is None else to_json(draft.webhook),
        " ".join(dict.fromkeys(draft.inputs)), draft.trace, draft.request_id,
        "" if draft.followed is None else str(int(draft.followed)), list_key(draft.envelope.kombu_queue, urgency),
        message,
        str(always), str(milliseconds(draft.keep_s)), "1" if keyless else "", *limits.arguments, draft.name,
        *(value for charge in charges for value in charge.arguments),
    ])  # fmt: skip


def outcome(draft: JobDraft[Any], charges: Sequence[rates.RateLimitCost], answer: Any) -> JobCreation:
    """Decode the answer of `lua/jobs/create.lua`."""
    reply, fields = (answer, None) if isinstance(answer, str) else answer
    code, count, *numbers = map(int, reply.split())
    counters = tuple(
        charge.standing(numbers[5 * k : 5 * k + 5]) for k, charge in zip(range(count), charges, strict=False)
    )
    if code == _MADE:
        created, deadline, sequence, ahead, *backlog = numbers[5 * count :]
        standing = QueuePosition(ahead, QueueBacklog(*backlog))
        queued = _queued(draft, created, deadline, f"{created}-{sequence}")
        return JobCreation(queued, True, standing=standing, charges=counters)
    job = None if fields is None else Job.of(draft.id, pairs(fields))
    if job is not None and job.modality == "text" and (job.owner, job.digest) == (draft.owner, draft.digest):
        # The reply to a first call was lost: a text's id is always new. Its request is not read back.
        job = replace(job, parameters=draft.parameters)
    return JobCreation(
        job, full=code == _FULL, share=code == _SHARE, barred=code == _BARRED, stored=code == _STORED,
        jobs_of=_JOBS_OF.get(code, ""), charges=counters,
    )  # fmt: skip


def _queued(draft: JobDraft[Any], created: int, deadline: int, incarnation: str) -> Job:
    """The record created from a draft, equal to what reading it back would give."""
    return Job(
        id=draft.id, modality=draft.modality, model=draft.model, state=JobState.QUEUED, parameters=draft.parameters,
        priority=draft.priority, created=created / 1000, deadline=deadline / 1000 if deadline else None, started=None,
        ended=None, attempt=0, lost=0, worker="", progress=None, result=None, error=None, suspect=False,
        work_ms=int(draft.work_ms), owner=draft.owner, digest=draft.digest, webhook=draft.webhook,
        inputs=tuple(dict.fromkeys(draft.inputs)), incarnation=incarnation, followed=draft.followed, name=draft.name,
    )  # fmt: skip
