"""Who is told next: owners and receivers in turn, each try leased, and the record kept until it is settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.jobs.record import JobDraft, new_id
from core.jobs.store import JobStore
from core.jobs.webhooks import DueWebhook, WebhookQueue


@pytest.fixture
def webhooks(redis_url: str) -> Iterator[WebhookQueue]:
    webhooks = WebhookQueue(redis_url, retention_s=60)
    yield webhooks
    webhooks.close()


def made(jobs: JobStore, owner: str, host: str, id: str) -> str:
    webhook = {"url": f"http://{host}/hook", "base": "http://x/"}
    return jobs.create(JobDraft(id, "image", "m", {}, owner=owner, webhook=webhook)).incarnation


def ended(jobs: JobStore, owner: str, host: str) -> str:
    id = new_id()
    made(jobs, owner, host, id)
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


def test_the_record_goes_when_it_was_told(jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis) -> None:
    id = ended(jobs, "ann", "a")
    assert client.pttl(f"diptych:job:{id}") > 11 * 3_600_000
    (due,) = webhooks.due(60)
    webhooks.settle(due)
    assert client.pttl(f"diptych:job:{id}") <= 60_000
    assert not list(client.scan_iter("diptych:webhook*"))


def test_one_that_was_erased_is_forgotten(jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis) -> None:
    jobs.erase(ended(jobs, "ann", "a"))
    assert not webhooks.due(60) and not list(client.scan_iter("diptych:webhook*"))


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
        self.seen: Counter[str] = Counter()

    def make(self, id: str, owner: str, host: str) -> None:
        if id not in self.lives:
            self.lives[id] = Life(owner, host, made(self.jobs, owner, host, id))

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

    def again(self, *_: str) -> None:
        if self.held:
            due, incarnation = self.held.pop(0)
            self.webhooks.again(due, 0)
            life = self._of(due, incarnation)
            if life is not None and not life.settled:
                life.tries += 1

    def _of(self, due: DueWebhook, incarnation: str) -> Life | None:
        life = self.lives.get(due.id)
        if life is not None and life.incarnation == incarnation:
            return life
        self.seen["of one that is gone" if life is None else "of the one before"] += 1
        return None


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


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
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


@pytest.mark.parametrize("way", ["settle", "again"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_answer_that_comes_late_is_no_answer_for_the_next_job(
    way: str, host: str, jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis
) -> None:
    """It was being told while it was erased, and the next job of its id has ended by then."""
    beside = Receivers(jobs, webhooks, client)
    beside.make("x", "ann", "a")
    beside.end("x")
    beside.look()
    beside.erase("x")
    beside.make("x", "ann", host)
    beside.end("x")
    beside.webhooks.due(0)  # the next one has its place
    getattr(beside, way)()
    beside.look()
    assert beside.seen["of the one before"] == 1


def test_a_job_that_lives_is_not_told_for_one_of_its_id(
    jobs: JobStore, webhooks: WebhookQueue, client: redis.Redis
) -> None:
    beside = Receivers(jobs, webhooks, client)
    beside.make("x", "ann", "a")
    beside.end("x")
    beside.look()
    beside.erase("x")
    beside.make("x", "ann", "a")
    beside.look()
    assert not list(client.scan_iter("diptych:webhook*")), "the place of the one before is gone"
