"""The script by which a job is made: counted for who asks, recorded, put into its queue's list, told where it stands.

One script, so that no record waits for its message, and nobody is counted for a job that was not made. Knows its
arguments and its answer; knows nothing of connections, and not what a message says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.jobs import rates
from core.jobs.broker import level, list_key
from core.jobs.record import Backlog, Draft, Job, JobState, Standing, milliseconds, pairs, to_json

_MADE, _FULL, _SHARE, _BARRED = 1, -1, -3, -4  # what may come of it; else it was there, or is refused


@dataclass(frozen=True, slots=True)
class Creation:
    """What came of a draft. `job` is None where it was refused: the queue is `full`, the owner's `share` of it is, the
    owner is `barred`, or the last of `charges` is too much.

    `made`: this call made it, which one that was cut off and repeated does not know. `standing` is where a job waits
    that was made now. `charges` is how the counters stand of what was counted, and of what was too much.
    """

    job: Job | None
    made: bool = False
    full: bool = False
    share: bool = False
    barred: bool = False
    standing: Standing | None = None
    charges: tuple[rates.Standing, ...] = ()


def argument(
    draft: Draft,
    max_queued: int,
    message: str = "",
    charges: Sequence[rates.Charge] = (),
    always: int = 0,
    most: int | None = None,
) -> str:
    """The argument of `lua/jobs/create.lua`. The first `always` of the charges count where no job is made too.

    `most` of the owner's jobs may wait in the queue; None: as many as of all.
    """
    urgency = level(draft.priority)
    return to_json([
        draft.id, draft.modality, draft.model, to_json(draft.parameters), str(draft.priority), str(urgency),
        "" if draft.deadline_s is None else str(milliseconds(draft.deadline_s)), str(int(draft.work_ms)),
        str(max_queued), draft.owner, draft.digest, "" if draft.webhook is None else to_json(draft.webhook),
        " ".join(dict.fromkeys(draft.inputs)), draft.trace, draft.request_id,
        "" if draft.followed is None else str(int(draft.followed)), list_key(draft.modality, urgency), message,
        str(max_queued if most is None else most), str(always), str(milliseconds(draft.keep_s)),
        *(value for charge in charges for value in charge.arguments),
    ])  # fmt: skip


def outcome(draft: Draft, charges: Sequence[rates.Charge], answer: Any) -> Creation:
    """What `lua/jobs/create.lua` answered."""
    said, fields = (answer, None) if isinstance(answer, str) else answer
    code, count, *numbers = map(int, said.split())
    counters = tuple(
        charge.standing(numbers[5 * k : 5 * k + 5]) for k, charge in zip(range(count), charges, strict=False)
    )
    if code == _MADE:
        created, deadline, sequence, ahead, *backlog = numbers[5 * count :]
        standing = Standing(ahead, Backlog(*backlog))
        made = _queued(draft, created, deadline, f"{created}-{sequence}")
        return Creation(made, True, standing=standing, charges=counters)
    job = None if fields is None else Job.of(draft.id, pairs(fields))
    return Creation(job, full=code == _FULL, share=code == _SHARE, barred=code == _BARRED, charges=counters)


def _queued(draft: Draft, created: int, deadline: int, incarnation: str) -> Job:
    """The record that was made of a draft, as reading it would give it."""
    return Job(
        id=draft.id, modality=draft.modality, model=draft.model, state=JobState.QUEUED, parameters=draft.parameters,
        priority=draft.priority, created=created / 1000, deadline=deadline / 1000 if deadline else None, started=None,
        ended=None, attempt=0, lost=0, worker="", progress=None, result=None, error=None, suspect=False,
        work_ms=int(draft.work_ms), owner=draft.owner, digest=draft.digest, webhook=draft.webhook,
        inputs=tuple(dict.fromkeys(draft.inputs)), incarnation=incarnation, followed=draft.followed,
    )  # fmt: skip
