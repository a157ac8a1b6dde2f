"""Every arrow of the states of jobs is walked, and in every state whatever has no arrow from there is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from core.jobs.limits import JobLimits
from core.jobs.record import ARROWS, JobState
from core.jobs.store import JobStore
from tests.core.jobs import books
from tests.core.jobs.drafts import draft

ROOT = Path(__file__).parents[3]
LEASE_S, DEADLINE_S, RESEND_S = 100, 20_000, 1_000_000
ID = "the-job"


class Causes:
    """What may change a job's state, each done to one job."""

    def __init__(self, url: str, client: redis.Redis, max_attempts: int) -> None:
        limits = JobLimits(lease_s=LEASE_S, max_attempts=max_attempts, resend_s=RESEND_S)
        self.store, self._client = JobStore(url, limits), client

    @property
    def state(self) -> JobState | None:
        job = self.store.get(ID)
        return None if job is None else job.state

    @property
    def fence(self) -> str:
        """The fencing token of the newest attempt, as its worker has it."""
        attempt, incarnation = self._client.hmget(f"diptych:job:{ID}", "attempt", "incarnation")
        return f"{attempt}@{incarnation}"

    def create(self) -> None:
        self.store.create(draft(id=ID, deadline_s=DEADLINE_S))

    def claim(self) -> None:
        self.store.leases.claim(ID, "worker")

    def claim_late(self) -> None:
        books.age(self._client, 2 * DEADLINE_S)
        self.claim()

    def cancel(self) -> None:
        self.store.cancel(ID)

    def empty(self) -> None:
        self.store.empty("image")

    def succeed(self) -> None:
        self.store.leases.succeed(ID, self.fence, {})

    def fail(self) -> None:
        self.store.leases.fail(ID, self.fence, "code", "message")

    def expire(self) -> None:
        self.store.leases.expire(ID, self.fence)

    def hand_back(self) -> None:
        self.store.leases.hand_back(ID, self.fence)

    def sweep_after(self, seconds: float) -> None:
        """Sweep as time passes. After a silence, as the first one is, every lease is renewed once."""
        self.store.upkeep.sweep(100)
        for _ in range(3):
            books.age(self._client, seconds / 3)
            self.store.upkeep.sweep(100)

    def lose_lease(self) -> None:
        self.sweep_after(9 * LEASE_S)

    def pass_deadline(self) -> None:
        self.sweep_after(2 * DEADLINE_S)

    def erase(self) -> None:
        self.store.erase(ID)

    def end_retention(self) -> None:
        """Let Redis do what it does when the time of a record that is to vanish is up, and sweep."""
        if self._client.pttl(f"diptych:job:{ID}") > 0:  # type: ignore[operator]
            self._client.pexpire(f"diptych:job:{ID}", 0)
            self._client.zadd("diptych:ended", {f"|{ID}": 0}, xx=True)
        self.store.upkeep.sweep(100)


CAUSES: dict[str, Callable[[Causes], None]] = {
    "it is created": Causes.create,
    "a worker claims it": Causes.claim,
    "a worker claims it after its deadline": Causes.claim_late,
    "a sweep finds that its deadline has passed": Causes.pass_deadline,
    "it is cancelled": Causes.cancel,
    "its queue is emptied": Causes.empty,
    "its worker reports success": Causes.succeed,
    "its worker reports a failure": Causes.fail,
    "its worker reports that the deadline has passed": Causes.expire,
    "its worker hands it back": Causes.hand_back,
    "its lease ends": Causes.lose_lease,
    "its lease ends at the last attempt": Causes.lose_lease,
    "it is erased": Causes.erase,
    "its retention ends": Causes.end_retention,
}
STEPS_TO: dict[JobState | None, tuple[Callable[[Causes], None], ...]] = {
    None: (),
    JobState.QUEUED: (Causes.create,),
    JobState.RUNNING: (Causes.create, Causes.claim),
    JobState.SUCCEEDED: (Causes.create, Causes.claim, Causes.succeed),
    JobState.FAILED: (Causes.create, Causes.claim, Causes.fail),
    JobState.CANCELLED: (Causes.create, Causes.cancel),
    JobState.EXPIRED: (Causes.create, Causes.claim, Causes.expire),
}


@pytest.fixture
def causes(request: pytest.FixtureRequest, redis_url: str, client: redis.Redis) -> Iterator[Causes]:
    client.flushall()
    causes = Causes(redis_url, client, max_attempts=1 if "last attempt" in request.getfixturevalue("cause") else 3)
    yield causes
    causes.store.close()


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("before", STEPS_TO)
def test_a_state_changes_by_arrows_alone(
    before: JobState | None, cause: str, causes: Causes, client: redis.Redis
) -> None:
    for step in STEPS_TO[before]:
        step(causes)
    assert causes.state is before
    event_count = client.xlen(f"diptych:events:{ID}")
    after = [arrow.after for arrow in ARROWS if (arrow.before, arrow.cause) == (before, cause)]
    CAUSES[cause](causes)
    (expected,) = after or [before]
    assert causes.state is expected
    if expected is not None:
        last = client.xrevrange(f"diptych:events:{ID}", count=1)[0][1]  # type: ignore[index]
        assert (client.xlen(f"diptych:events:{ID}") > event_count, last["type"]) == (bool(after), expected.value)
    books.Books.of(client).check()


def test_the_arrows_are_those_that_are_tried() -> None:
    assert {arrow.cause for arrow in ARROWS} == CAUSES.keys() and len({*ARROWS}) == len(ARROWS)
    assert {state for state in JobState if not state.final} == {
        arrow.before for arrow in ARROWS if arrow.before and arrow.after
    }, "an ended job stays as it ended"
    scripts = ROOT / "core" / "jobs" / "lua"
    assert all((scripts / f"{arrow.script}.lua").is_file() for arrow in ARROWS)


def test_the_page_has_the_arrows() -> None:
    page = (ROOT / "docs" / "internals" / "jobs.md").read_text("utf-8")
    rows = [
        f"| {before or '–'} | {after or '–'} | {cause} | `{script}.lua` |" for before, after, cause, script in ARROWS
    ]
    assert "\n".join(rows) in page
