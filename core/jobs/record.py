"""A job's record in Redis: the request, its state, and its outcome."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from contract.bounds import PRIORITY
from core.jobs.broker import JOB_ID, PRIORITY_STEPS, QUEUES, Envelope
from core.jobs.unreadable import UnreadableRecord, check_version

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
Webhook = dict[str, Any]
_LARGE = 65_536  # characters of JSON, which is parsed in about a millisecond
_LONGEST_S = 1_000_000_000  # about thirty years; its milliseconds are exact in Lua's numbers
FIELDS = (
    "v", "modality", "model", "state", "parameters", "priority", "created", "deadline", "started", "ended", "attempt",
    "lost", "worker", "progress", "result", "error", "suspect", "work_ms", "owner", "digest", "webhook", "inputs",
    "incarnation", "followed", "dropped", "name",
)  # fmt: skip
"""The fields of the hash `job:{id}` that `Job.of` reads."""


class JobState(StrEnum):
    """A job's state. The last four are final: a job reaches exactly one of them, once."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


class Arrow(NamedTuple):
    """A change of a job's state from `before` to `after`; None: there is no record. `script` of `lua/` makes it."""

    before: JobState | None
    after: JobState | None
    cause: str
    script: str


ARROWS = (
    Arrow(None, JobState.QUEUED, "it is created", "jobs/create"),
    Arrow(JobState.QUEUED, JobState.RUNNING, "a worker claims it", "jobs/claim"),
    Arrow(JobState.QUEUED, JobState.EXPIRED, "a worker claims it after its deadline", "jobs/claim"),
    Arrow(JobState.QUEUED, JobState.EXPIRED, "a sweep finds that its deadline has passed", "jobs/sweep"),
    Arrow(JobState.QUEUED, JobState.CANCELLED, "it is cancelled", "jobs/cancel"),
    Arrow(JobState.QUEUED, JobState.CANCELLED, "its queue is emptied", "jobs/empty"),
    Arrow(JobState.RUNNING, JobState.SUCCEEDED, "its worker reports success", "jobs/finish"),
    Arrow(JobState.RUNNING, JobState.FAILED, "its worker reports a failure", "jobs/finish"),
    Arrow(JobState.RUNNING, JobState.EXPIRED, "its worker reports that the deadline has passed", "jobs/finish"),
    Arrow(JobState.RUNNING, JobState.EXPIRED, "a sweep finds that its deadline has passed", "jobs/sweep"),
    Arrow(JobState.RUNNING, JobState.CANCELLED, "it is cancelled", "jobs/cancel"),
    Arrow(JobState.RUNNING, JobState.QUEUED, "its worker hands it back", "jobs/hand_back"),
    Arrow(JobState.RUNNING, JobState.QUEUED, "its lease ends", "jobs/sweep"),
    Arrow(JobState.RUNNING, JobState.FAILED, "its lease ends at the last attempt", "jobs/sweep"),
    *(Arrow(state, None, "it is erased", "jobs/erase") for state in JobState),
    *(Arrow(state, None, "its retention ends", "jobs/sweep") for state in JobState if state.final),
)
"""All changes of a job's state. A live job that is erased is cancelled first, which those who follow it are told."""


class Moment(StrEnum):
    """The moments of a job at which a webhook may be called: the first attempt's start, progress, at most twice a
    second, success, and any end.
    """

    STARTED = "started"
    PROGRESSED = "progressed"
    SUCCEEDED = "succeeded"
    ENDED = "ended"


def new_id() -> str:
    """A random, unguessable id: `job_` and 24 hexadecimal digits."""
    return f"job_{secrets.token_hex(12)}"


def derived_id(source: str) -> str:
    """Return the id of the record of a job that its source, such as a client's choice, makes one job however often."""
    return "job_" + hashlib.sha256(source.encode()).hexdigest()[:24]


def record_id(owner: str, name: str) -> str:
    """Return the id of the record of an owner's job of a chosen name: no two owners share one. Without an owner it is
    the name.
    """
    return derived_id(f"{owner}\0\0{name}") if owner else name  # no Idempotency-Key begins with a NUL


def to_json(value: Any) -> str:
    """Compact ASCII JSON. Raises ValueError for NaN and infinities, TypeError for types without a JSON form."""
    return _ENCODER.encode(value)


def from_json(text: str | None) -> Any:
    """Parse JSON; None for empty or absent text.

    Of a large one each object calls back, which lets other threads go on: the parser alone would hold the
    interpreter's lock until its end.
    """
    if not text:
        return None
    return json.loads(text) if len(text) < _LARGE else json.loads(text, object_hook=lambda members: members)


def milliseconds(seconds: float) -> int:
    """Seconds as whole milliseconds, the scripts' unit of time."""
    return round(seconds * 1000)


def pairs(flat: Sequence[str]) -> dict[str, str]:
    """Turn a hash as scripts return it into a dict: [a, 1, b, 2] → {a: 1, b: 2}"""
    return dict(zip(flat[::2], flat[1::2], strict=True))


class JobRequest(Protocol):
    """The typed request of a job, such as `contract.image.ImageJob`."""

    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=JobRequest | Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class JobDraft(Generic[R]):
    """A job to be created. `modality` is also the name of its queue.

    `request` is what it asks for: typed, or the parameters of another record as they are.

    `priority` is Celery's: 0 is the most urgent, 9 the least. `deadline_s` counts seconds from creation; None: no
    deadline. `work_ms` estimates how long the job occupies one worker. `owner` is the id of a key; empty without keys.
    `digest` identifies the request's content where the client chose the id: two jobs with equal ids and different
    digests are different requests. `keep_s` is the minimum retention of the ended job's record, in seconds. `webhook`
    holds the `url` that is called at the end, and what its API needs for the message; with `moments`, it is called at
    these instead. `inputs` are the keys of source
    artifacts, which are kept while the job lives and then as long as its record. `trace` is the request's traceparent,
    `request_id` its HTTP request id; each may be empty. `followed`: True reports progress with pieces of text, None
    without them, and False reports none until `JobStore.follow`. `tokens` are those that it counts as against rate
    limits, of `text_model` if that is not its own model; neither is stored. `name` is the id that the owner chose, if
    the record has another one (`record_id`). Raises ValueError, naming the field.
    """

    id: str
    modality: str
    model: str
    request: R
    priority: int = PRIORITY
    deadline_s: float | None = None
    work_ms: int = 0
    owner: str = ""
    digest: str = ""
    webhook: Webhook | None = None
    inputs: tuple[str, ...] = ()
    trace: str = ""
    request_id: str = ""
    followed: bool | None = None
    keep_s: float = 0.0
    tokens: int = 0
    text_model: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not JOB_ID.fullmatch(self.id):
            raise ValueError("id: must be 1 to 64 letters, digits, - or _")
        if self.owner and not JOB_ID.fullmatch(self.owner):
            raise ValueError("owner: must be empty, or 1 to 64 letters, digits, - or _")
        if self.modality not in QUEUES:
            raise ValueError(f"modality: must be one of {', '.join(QUEUES)}")
        if not PRIORITY_STEPS[0] <= self.priority <= 9:
            raise ValueError("priority: must be between 0 (most urgent) and 9")
        if self.deadline_s is not None and not 0 <= self.deadline_s <= _LONGEST_S:
            raise ValueError(f"deadline_s: must be between 0 and {_LONGEST_S}")
        if not 0 <= self.keep_s <= _LONGEST_S:
            raise ValueError(f"keep_s: must be between 0 and {_LONGEST_S}")
        if not 0 <= self.work_ms <= _LONGEST_S * 1000:
            raise ValueError(f"work_ms: must be between 0 and {_LONGEST_S * 1000}")

    @property
    def parameters(self) -> dict[str, Any]:
        """The request as the record has it."""
        return dict(self.request) if isinstance(self.request, Mapping) else self.request.to_dict()

    @property
    def envelope(self) -> Envelope:
        """The message that makes a worker look at the job."""
        return Envelope(self.id, self.modality, self.priority, model=self.model)


@dataclass(frozen=True, slots=True)
class Job:
    """A job's record. Times are seconds since the epoch on Redis's clock.

    `attempt` counts claims and fences writes: only the holder of the current attempt may write. `lost` counts workers
    lost while running it; above a threshold the job is `suspect` and runs alone. `progress` is the data of the current
    attempt's last progress event, `result` the output of a success, `error` has `code` and `message` if the job failed
    or expired. `worker` is the worker that runs it, or ran it last. `owner`, `digest`, `inputs` and `name` are the
    draft's.
    `incarnation` distinguishes it from all other jobs with this id; empty in records of versions without incarnations.
    `followed`: whether its progress is reported, as set by the draft or `JobStore.follow`. `dropped`: its parameters
    are gone, as those of a text job that has ended are if they are large; so many bytes.
    """

    id: str
    modality: str
    model: str
    state: JobState
    parameters: dict[str, Any]
    priority: int
    created: float
    deadline: float | None
    started: float | None
    ended: float | None
    attempt: int
    lost: int
    worker: str
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    suspect: bool
    work_ms: int
    owner: str = ""
    digest: str = ""
    webhook: Webhook | None = None
    inputs: tuple[str, ...] = ()
    incarnation: str = ""
    followed: bool | None = None
    dropped: int = 0
    name: str = ""

    @property
    def fence(self) -> str:
        """The fencing token of its current attempt."""
        return fence(self.attempt, self.incarnation)

    def same(self, other: Job | None) -> bool:
        """Return whether the other record is this very job, and not another with the same id."""
        return other is not None and (other.id, other.incarnation) == (self.id, self.incarnation)

    @classmethod
    def of(cls, id: str, fields: Mapping[str, str]) -> Self:
        """Parse the `FIELDS` of the hash `job:{id}`. Raises `UnreadableRecord`."""
        owner = fields.get("owner", "")
        try:
            check_version("record", id, fields.get("v"))
            return cls._of(id, fields)
        except UnreadableRecord as error:
            raise UnreadableRecord("record", id, error.reason, owner) from None
        except KeyError as error:
            raise UnreadableRecord("record", id, f"its field {error} is missing", owner) from None
        except (ValueError, RecursionError):
            raise UnreadableRecord("record", id, "a field has the wrong type", owner) from None

    @classmethod
    def _of(cls, id: str, fields: Mapping[str, str]) -> Self:
        return cls(
            id=id,
            modality=fields["modality"],
            model=fields["model"],
            state=JobState(fields["state"]),
            parameters=_object(fields["parameters"]) or {},
            priority=int(fields["priority"]),
            created=int(fields["created"]) / 1000,
            deadline=_seconds(fields.get("deadline")),
            started=_seconds(fields.get("started")),
            ended=_seconds(fields.get("ended")),
            attempt=int(fields["attempt"]),
            lost=int(fields["lost"]),
            worker=fields.get("worker", ""),
            progress=_object(fields.get("progress")),
            result=_object(fields.get("result")),
            error=_object(fields.get("error")),
            suspect=fields.get("suspect") == "1",
            work_ms=int(fields["work_ms"]),
            owner=fields.get("owner", ""),
            digest=fields.get("digest", ""),
            webhook=_object(fields.get("webhook")),
            inputs=tuple(fields.get("inputs", "").split()),
            incarnation=fields.get("incarnation", ""),
            followed=_flag(fields.get("followed")),
            dropped=int(fields.get("dropped", 0)),
            name=fields.get("name", ""),
        )


def _flag(value: str | None) -> bool | None:
    return value == "1" if value else None


def fence(attempt: int | str, incarnation: str | None) -> str:
    """The fencing token of an attempt; its bare number in records of versions without incarnations."""
    return f"{attempt}@{incarnation}" if incarnation else str(attempt)


def _object(text: str | None) -> dict[str, Any] | None:
    """Parse a JSON object; None for an empty text. Raises ValueError for anything else."""
    value = from_json(text)
    if value is not None and not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _seconds(milliseconds: str | None) -> float | None:
    return int(milliseconds) / 1000 if milliseconds else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A job held by a worker until it finishes it, hands it back, or its lease expires.

    `deadline_left_s` is the time to the deadline at the claim; None: no deadline. `trace` and `request_id` are the
    draft's; empty for jobs of versions without them. `incarnation` and `followed` are the record's. `checker` is what
    the owner's key, which may be revoked by now, has flagged pictures done to; "": the service decides. `lays`: a large
    result may be an artifact (`core.artifacts.lay_result`), which the API that made the job reads.
    """

    id: str
    attempt: int
    modality: str
    model: str
    parameters: dict[str, Any]
    priority: int
    deadline_left_s: float | None
    suspect: bool
    trace: str = ""
    request_id: str = ""
    incarnation: str = ""
    followed: bool | None = None
    owner: str = ""
    checker: str = ""
    lays: bool = False

    @property
    def fence(self) -> str:
        """The fencing token that every write for this claim carries."""
        return fence(self.attempt, self.incarnation)


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Progress of a held job: `data` becomes the event's data and the record's `progress`.

    `attempt` is the claim's `fence`, or its bare number. `previews` are previews of its images: the image's index, and
    a small PNG in base64. `pieces` are new pieces of its texts (see `workers.text.stream_buffer`), sent in the event
    only; with `complete` they are the complete texts, and replace those sent before.
    """

    id: str
    attempt: int | str
    data: dict[str, Any]
    previews: Mapping[int, str] = field(default_factory=dict)
    pieces: Sequence[Mapping[str, Any]] = ()
    complete: bool = False


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """Outcome of reports: ids whose attempt no longer runs (`stale`), and ids with followers."""

    stale: set[str]
    followed: set[str]


@dataclass(frozen=True, slots=True)
class QueueBacklog:
    """A queue's load: waiting and running jobs, and their estimated work (ms of one worker)."""

    queued: int
    queued_ms: int
    running: int
    running_ms: int


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A job's queue position: how many jobs are served before it, and its queue's total load."""

    ahead: int
    backlog: QueueBacklog


@dataclass(frozen=True, slots=True)
class JobIds:
    """The ids of a page of jobs, as `JobPage` has these."""

    ids: list[str]
    after: str
    more: bool


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first. `after` is where the next page continues; `more` says whether there may be one."""

    jobs: list[Job]
    after: str
    more: bool
