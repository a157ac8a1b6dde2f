"""Defines the record of a history: calls with answers, faults, final counters and levels; with JSON serialization.

Times are seconds of one monotonic clock since the history began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

OK, REFUSED, UNKNOWN = "ok", "refused", "unknown"  # 2xx; another answer; none, so that nobody knows what was done
SMALL_BYTES = 8_192  # of a record's values that need not be counted
FINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})


@dataclass(frozen=True)
class Seen:
    """A job in one answer. `created` distinguishes jobs with the same id."""

    id: str
    created: float
    status: str
    attempt: int = 0
    error: str = ""  # its code

    @property
    def final(self) -> bool:
        return self.status in FINAL

    @classmethod
    def of(cls, told: dict[str, Any]) -> Seen:
        """From a job object of the API."""
        error = (told.get("error") or {}).get("code") or ""
        return cls(told["id"], told["created_at"], told["status"], told.get("attempt") or 0, error)


@dataclass(frozen=True)
class Told:
    """One event of a job's stream. `value`: the attempt of running, the steps of progress."""

    id: str
    type: str
    value: int = 0
    job: Seen | None = None  # that the last one carries

    @classmethod
    def of(cls, id: str, type: str, data: dict[str, Any]) -> Told:
        """From an event of the API, or of a stream in Redis."""
        value = data.get("attempt" if type == "running" else "steps_done", 0)
        job = Seen.of(data) if type in FINAL and "created_at" in data else None
        return cls(id, type, value if isinstance(value, int) else 0, job)


@dataclass(frozen=True)
class Call:
    """One call: what was asked, by whom, and what came of it. `tenant` is empty where no key was shown.

    `about`: the id that it names. `wants`: digests of the bytes that the job's pictures (the file, the text) must have.
    `got`: digests of those that came. `ids`: what a list named. `created`: of which job of this id it must speak.
    `owner`: the tenant that the named thing belongs to, where another or nobody asks for it. `size`: bytes of an
    upload, or of all files that a list named. `quiet`: all jobs had ended, and nothing else was asked meanwhile.
    """

    op: str
    tenant: str
    begin: float
    end: float
    outcome: str
    status: int = 0
    code: str = ""
    about: str = ""
    created: float = 0.0
    key: str = ""
    wants: tuple[str, ...] = ()
    got: tuple[str, ...] = ()
    seen: tuple[Seen, ...] = ()
    told: tuple[Told, ...] = ()
    ids: tuple[str, ...] = ()
    cost: int = 1  # pictures that are counted against the tenant's quota
    whole: bool = False  # `told` is all that there is, from the first to the last
    owner: str = ""
    size: int = 0
    quiet: bool = False


@dataclass(frozen=True)
class Fault:
    """One fault: when it begins, what it is, whom it hits, how long it lasts, and how bad it is."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    size: float = 0.0


@dataclass(frozen=True)
class Limits:
    """The configured limits of a history's service; rates as (count, seconds), by tenant; 0, or no entry: none.

    `share`: jobs of one tenant that may wait in a queue. `files`: bytes of a tenant's files.
    """

    max_attempts: int = 3
    max_queued: int = 1000
    requests: dict[str, tuple[int, float]] = field(default_factory=dict)
    pictures: dict[str, tuple[int, float]] = field(default_factory=dict)
    share: int = 0
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Level:
    """What a process holds once all has ended, and what one of its kind held after warm-up."""

    part: str
    descriptors: int
    rss_mib: float
    warm_descriptors: int
    warm_rss_mib: float


@dataclass(frozen=True)
class Stored:
    """What a tenant has left in Redis once all has ended: the bytes of the largest record's values, and those of all
    records beyond `SMALL_BYTES` each that are not counted for the tenant.
    """

    largest_bytes: int
    uncounted_bytes: int


@dataclass
class History:
    """All of one history. `left`: what is not as it was before any job, though all have ended. `miscounted`: what a
    look at Redis or a fault showed to be wrong meanwhile. `stored_before`: what earlier histories of this world left.
    """

    seed: int
    faults: list[Fault] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    levels: list[Level] = field(default_factory=list)
    miscounted: list[str] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)
    stored_before: dict[str, Stored] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(TypeAdapter(History).dump_json(self))

    @classmethod
    def read(cls, path: Path) -> History:
        return TypeAdapter(History).validate_json(path.read_bytes())
