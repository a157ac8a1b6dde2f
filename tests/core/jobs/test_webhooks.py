"""Who is told next: owners and receivers in turn, each try leased, and the record kept until it is settled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.jobs.record import Claim, Job, Moment, ProgressReport, new_id
from core.jobs.store import JobStore
from core.jobs.webhooks import DueWebhook, WebhookQueue
from tests.core.jobs.drafts import draft
from tests.core.present import present


@pytest.fixture
def webhooks(redis_url: str) -> Iterator[WebhookQueue]:
    webhooks = WebhookQueue(redis_url, retention_s=60)
    yield webhooks
    webhooks.close()


def made(jobs: JobStore, owner: str, host: str, id: str = "", **more: Any) -> Job:
    webhook = {"url": f"http://{host}/hook", "base": "http://x/", **more}
    return jobs.create(draft(id=id or new_id(), owner=owner, webhook=webhook))


def ended(jobs: JobStore, owner: str, host: str) -> str:
    id = made(jobs, owner, host).id
    jobs.cancel(id)
    return id


def test_owners_and_receivers_take_turns(jobs: JobStore, webhooks: WebhookQueue) -> None:
    for k in range(50):
        ended(jobs, "ann", f"a{k % 2}")
    last = ended(jobs, "bob", "b")
    first = webhooks.due(60, 4, of_owner=3)
    assert [due.owner for due in first].count("ann") == 3 and last in {due.id for due in first}
    again = webhooks.due(60, 4, of_owner=4, of_lane=2)
    assert sorted(due.host for due in again) == ["a0", "a0", "a1", "a1"]
    assert not {due.id for due in first} & {due.id for due in again}, "they are leased"


def test_nothing_of_who_is_busy(jobs: JobStore, webhooks: WebhookQueue) -> None:
    for host in ("a0", "a1"):
        ended(jobs, "ann", host)
    ended(jobs, "bob", "b")
    found = webhooks.due(60, without={"bob"}, without_lanes={("ann", "a0")})
    assert [(due.owner, due.host) for due in found] == [("ann", "a1")]
    assert {due.host for due in webhooks.due(60)} == {"a0", "b"}


def test_a_try_counts_if_it_failed(jobs: JobStore, webhooks: WebhookQueue) -> None:
    id = ended(jobs, "ann", "A.example:80")
    (due,) = webhooks.due(60)
    assert (due.id, due.tries, due.host) == (id, 0, "a.example:80")
    webhooks.again(due, 0, failed=False)
    (due,) = webhooks.due(60)
    assert due.tries == 0
    webhooks.again(due, 0)
    (due,) = webhooks.due(60)
    assert due.tries == 1
    webhooks.again(due, 60)
    assert not webhooks.due(60)


# -- moments of jobs that run ------------------------------------------------------------------------------------------

FORMER = {"started": "start", "progressed": "logs", "succeeded": "output", "ended": "completed"}  # names of 0.3.0
SETS = [frozenset(moments) for n in range(5) for moments in combinations(Moment, n)]


def with_moments(jobs: JobStore, moments: Collection[str], id: str = "", *, former: bool = False) -> Claim:
    """A running job whose webhook names these moments, claimed for the first time; `former`: as 0.3.0 wrote them."""
    names = {"events": [FORMER[moment] for moment in moments]} if former else {"moments": [*moments]}
    return present(jobs.leases.claim(made(jobs, "", "a", id, **names).id, "worker"))


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize("succeeds", [True, False])
def test_a_webhook_is_due_at_the_moments_that_it_names(
    jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis, succeeds: bool, former: bool
) -> None:
    claims = [(with_moments(jobs, moments, former=former), moments) for moments in SETS]

    def due(*names: str) -> None:
        """At just the jobs that name one of these."""
        expected = {claim.id for claim, moments in claims if moments & set(names)}
        taken = webhooks.due(60, limit=100)
        assert {item.id for item in taken} == expected and len(taken) == len(expected)
        assert all(item.live is (client.hget(f"diptych:job:{item.id}", "state") == "running") for item in taken)
        for item in taken:
            webhooks.settle(item)

    due("started")
    for claim, _ in claims * 2:
        assert not jobs.leases.report([ProgressReport(claim.id, claim.fence, {"steps_done": 1, "steps": 2})]).stale
    for id, _ in client.zscan_iter("diptych:webhooks"):
        client.zadd("diptych:webhooks", {id: 0})  # half a second passes
    due("progressed")
    for claim, _ in claims:
        if succeeds:
            assert jobs.leases.succeed(claim.id, claim.fence, {})
        else:
            assert jobs.leases.fail(claim.id, claim.fence, "a", "b")
    due("ended", *(["succeeded"] if succeeds else []))
    assert not webhooks.due(60) and not client.keys("diptych:webhook*")


@pytest.mark.parametrize("retried", [True, False])
def test_an_outcome_that_comes_after_the_end_leaves_the_end_due(
    jobs: JobStore, webhooks: WebhookQueue, retried: bool
) -> None:
    """Whether the end's webhook was taken meanwhile or not."""
    claim = with_moments(jobs, ["started", "ended"])
    (start,) = webhooks.due(60)
    jobs.leases.succeed(claim.id, claim.fence, {})
    (end,) = webhooks.due(0) if retried else (None,)
    webhooks.settle(start)
    (again,) = webhooks.due(60)
    assert start.live and not again.live and end in (None, again)
    webhooks.settle(again)
    assert not webhooks.due(60)


def test_reports_that_go_on_do_not_put_off_the_news_of_them(jobs: JobStore, client: redis.Redis) -> None:
    """It is due half a second after the first, however often more come."""
    id = jobs.create(draft(id=new_id(), webhook={"url": "https://a/", "moments": ["progressed"]})).id
    claim = present(jobs.leases.claim(id, "worker"))
    for done in range(3):
        jobs.leases.report([ProgressReport(id, claim.fence, {"steps_done": done})])
        if done == 0:
            client.zincrby("diptych:webhooks", -400, id)
            due = client.zscore("diptych:webhooks", id)
    assert client.zscore("diptych:webhooks", id) == due


@pytest.mark.parametrize("moments", [["started"], ["started", "progressed"], ["started", "succeeded"]])
@pytest.mark.parametrize("taken", [True, False])
def test_a_start_is_told_once_where_the_end_is_not(
    jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis, moments: list[str], taken: bool
) -> None:
    """Also of a job that ends before it is told, or while it is."""
    claim = with_moments(jobs, moments)
    due = webhooks.due(60) if taken else []
    assert jobs.leases.fail(claim.id, claim.fence, "a", "b")
    (start,) = due or webhooks.due(60)
    assert start.live
    webhooks.settle(start)
    assert not webhooks.due(0) and not client.keys("diptych:webhook*")


def test_a_start_is_not_told_of_a_job_that_never_ran(jobs: JobStore, webhooks: WebhookQueue) -> None:
    job = made(jobs, "", "a", moments=["started"])
    assert jobs.cancel(job.id) is not None and not webhooks.due(0)


def test_a_second_attempt_is_no_second_start(jobs: JobStore, webhooks: WebhookQueue) -> None:
    claim = with_moments(jobs, ["started"])
    webhooks.settle(*webhooks.due(60))
    assert jobs.leases.hand_back(claim.id, claim.fence) is not None
    assert jobs.leases.claim(claim.id, "another") is not None
    assert not webhooks.due(60)


def test_an_id_that_is_used_again_is_told_of_nothing_of_its_predecessor(jobs: JobStore, webhooks: WebhookQueue) -> None:
    with_moments(jobs, [*Moment], "x")
    (start,) = webhooks.due(0)
    jobs.erase("x")
    with_moments(jobs, ["ended"], "x")
    webhooks.settle(start)
    assert not webhooks.due(60)
    assert jobs.cancel("x") is not None
    assert [item.live for item in webhooks.due(60)] == [False]


# -- ids that are used again -------------------------------------------------------------------------------------------

OWNERS, HOSTS, IDS = ("ann", "bob"), ("a", "b"), ("x", "y")


@dataclass
class Life:
    """The job that has an id now."""

    owner: str
    host: str
    incarnation: str
    over: bool = False
    settled: bool = False
    tries: int = 0


class Receivers:
    """Jobs and who is told of them beside what is to be expected; tellings that are under way are held for long."""

    def __init__(self, jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis) -> None:
        client.flushall()
        self.jobs, self.webhooks, self.client = jobs, webhooks, client
        self.lives: dict[str, Life] = {}
        self.held: list[tuple[DueWebhook, str]] = []  # and of which incarnation

    def make(self, id: str, owner: str, host: str) -> None:
        if id not in self.lives:
            self.lives[id] = Life(owner, host, made(self.jobs, owner, host, id).incarnation)

    def end(self, id: str, *_: str) -> None:
        if id in self.lives:
            self.jobs.cancel(id)
            self.lives[id].over = True

    def erase(self, id: str, *_: str) -> None:
        assert self.jobs.erase(id) is (self.lives.pop(id, None) is not None)

    def look(self, *_: str) -> None:
        """Who is due is just who has ended, and was not told: no lease is waited for here."""
        due = self.webhooks.due(0)
        untold = {id: life for id, life in self.lives.items() if life.over and not life.settled}
        assert {(d.id, d.owner, d.host, d.tries) for d in due} == {
            (id, life.owner, life.host, life.tries) for id, life in untold.items()
        }
        assert len(due) == len(untold), "each is told by one"
        self.held += ((d, self.lives[d.id].incarnation) for d in due)
        for id in untold:
            assert self.client.pttl(f"diptych:job:{id}") > 11 * 3_600_000, "its record stays until it is told"

    def settle(self, *_: str) -> None:
        if self.held:
            due, incarnation = self.held.pop(0)
            self.webhooks.settle(due)
            life = self._of(due, incarnation)
            if life is not None:
                life.settled = True
                assert self.client.pttl(f"diptych:job:{due.id}") <= 60_000

    def again(self, *_: str) -> None:
        if self.held:
            due, incarnation = self.held.pop(0)
            self.webhooks.again(due, 0)
            life = self._of(due, incarnation)
            if life is not None and not life.settled:
                life.tries += 1

    def _of(self, due: DueWebhook, incarnation: str) -> Life | None:
        life = self.lives.get(due.id)
        return life if life is not None and life.incarnation == incarnation else None


Step = Callable[..., None]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([
            Receivers.make, Receivers.end, Receivers.erase, Receivers.look, Receivers.settle, Receivers.again,
        ]),
        st.sampled_from(IDS), st.sampled_from(OWNERS), st.sampled_from(HOSTS),
    ),
    max_size=40,
)  # fmt: skip


def late(answer: Step, host: str) -> list[tuple[Step, str, str, str]]:
    """It was being told while it was erased, and the next job of its id has ended by then, or lives."""
    life = [Receivers.make, Receivers.end, Receivers.look, Receivers.erase]
    steps = [(step, "a") for step in life] + [(step, host) for step in (*life[:3], answer, Receivers.look)]
    return [(step, "x", "ann", to) for step, to in steps]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@example(steps=late(Receivers.settle, "a"))
@example(steps=late(Receivers.settle, "b"))
@example(steps=late(Receivers.again, "a"))
@example(steps=late(Receivers.again, "b"))
@example(steps=late(Receivers.look, "a")[:5])
@given(steps=STEPS)
def test_whoever_has_an_id_is_told_of_whatever_came_of_the_one_before(
    steps: list[tuple[Step, str, str, str]], jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis
) -> None:
    beside = Receivers(jobs, webhooks, client)
    for step, *names in steps:
        step(beside, *names)
    beside.look()
    while beside.held:
        beside.settle()
    beside.look()
    assert not list(client.scan_iter("diptych:webhook*")), "nothing is left of those that were told, or erased"
