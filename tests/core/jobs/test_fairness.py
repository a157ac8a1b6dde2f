"""Owners share a queue: who floods it keeps nobody waiting, and what is held back is neither lost nor out of order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.jobs.broker import Envelope, level
from core.jobs.cards import WorkerCard
from core.jobs.creation import UNLIMITED, OwnerLimits
from core.jobs.limits import JobLimits
from core.jobs.registry import Registry
from core.jobs.store import JobStore, QueueFull
from core.jobs.submissions import Submissions
from tests.contract.test_card import IMAGE, TEXT
from tests.core.jobs import books
from tests.core.jobs.drafts import draft

COLD = "nobody's"
WINDOW, SPARE = 4, 8  # of lua/shared/fairness.lua
QUEUE, TEXTS = books.kombu("image", "emoji-xl"), books.kombu("text", "emoji-lm")
OWNERS = ("ada", "bob", "eve")
DEADLINE_S, LEASE_S = 500, 300


class Hall:
    """A store whose worker has `places`, and everything that may happen to jobs of several owners."""

    def __init__(self, client: redis.Redis, url: str, places: int, owner_limits: OwnerLimits = UNLIMITED) -> None:
        client.flushall()
        self.client = client
        self.places = places
        self.owner_limits = owner_limits
        share = owner_limits.running
        self.most_running = max(1, places * int(share[:-1]) // 100) if share.endswith("%") else int(share or 10**6)
        self.store = JobStore(url, JobLimits(lease_s=LEASE_S, resend_s=100, overtime_s=100))
        registry = Registry(url)
        limits = {"image": places} if places else {}
        card = WorkerCard("worker", "here", 1, "ready", "", 1.5, models=[IMAGE], limits=limits)
        registry.announce(card, 100_000)
        registry.close()
        self.made: list[str] = []
        self.fences: dict[str, str] = {}  # of running jobs

    def submit(self, owner: str, priority: int = 5, deadline_s: float | None = None) -> str:
        """Create a job, unless the owner has as many as may be."""
        id = f"job_{len(self.made)}"
        job = draft(id=id, owner=owner, priority=priority, deadline_s=deadline_s)
        limits = [most for most in (self.owner_limits.of_model, self.owner_limits.live) if most is not None]
        full = bool(owner) and bool(limits) and self.owned(owner) >= min(limits)
        try:
            self.store.create(job, id, limits=self.owner_limits)
        except QueueFull:
            assert full
        else:
            assert not full
            self.made.append(id)
        return id

    def owned(self, owner: str) -> int:
        """How many live jobs the owner has, by the records."""
        with self.client.pipeline(transaction=False) as pipe:
            for id in self.made:
                pipe.hmget(f"diptych:job:{id}", "owner", "state")
            return sum(whose == owner and state in books.LIVE for whose, state in pipe.execute())

    def take(self) -> str | None:
        """A worker with a free place takes a message, and claims its job."""
        if self.places and len(self.fences) >= self.places:
            return None
        while (id := books.pop(self.client, QUEUE)) is not None:
            if (claim := self.store.leases.claim(id, "worker")) is not None:
                self.fences[id] = claim.fence
                return id
        return None

    def fill(self) -> None:
        """All free places take messages."""
        while self.take() is not None:
            pass

    def end(self, id: str) -> None:
        self.store.leases.succeed(id, self.fences.pop(id), {})

    def owner(self, id: str) -> str:
        return str(self.client.hget(f"diptych:job:{id}", "owner"))

    def live(self) -> Counter[str]:
        return Counter(map(self.owner, self.fences))

    def held(self) -> set[str]:
        return {str(id) for owner in OWNERS for id in self.client.zrange(f"diptych:flow:{QUEUE}:{owner}", 0, -1)}

    # -- what may happen -----------------------------------------------------------------------------------

    def anything(self, dice: Random) -> None:
        name = dice.choices(
            ("submit", "flood", "take", "end", "cancel", "erase", "hand_back", "crash", "lose", "offer"),
            (6, 2, 8, 6, 1, 1, 1, 1, 1, 1),
        )[0]
        owner, running = dice.choice(("", *OWNERS)), [*self.fences]
        if name == "submit":
            self.submit(owner, dice.choice((0, 5, 5, 9)), DEADLINE_S if dice.random() < 0.2 else None)
        elif name == "flood":
            for _ in range(12):
                self.submit(owner)
        elif name == "take":
            self.take()
        elif name == "end" and running:
            self.end(dice.choice(running))
        elif name in ("cancel", "erase") and self.made:
            id = dice.choice(self.made)
            self.fences.pop(id, None)
            (self.store.cancel if name == "cancel" else self.store.erase)(id)
        elif name == "hand_back" and running:
            id = dice.choice(running)
            self.store.leases.hand_back(id, self.fences.pop(id))
            books.push(self.client, QUEUE, 0, id)
        elif name == "crash":  # every claim is lost, and deadlines pass
            self.fences.clear()
            books.age(self.client, 1000)
            self.sweep()
        elif name == "lose":
            books.pop(self.client, QUEUE)
        elif name == "offer" and (taken := books.pop(self.client, QUEUE)) is not None:
            self.store.leases.offer({Envelope(taken, "image", 0, "other"): taken}, 50)  # and nobody takes it up

    def sweep(self) -> None:
        for envelope in self.store.upkeep.sweep(1000).send:
            books.push(self.client, envelope.kombu_queue, level(envelope.priority), envelope.id)

    # -- what always holds ---------------------------------------------------------------------------------

    def check_counts(self) -> None:
        books.Books.of(self.client).check()

    def check(self) -> None:
        now = books.Books.of(self.client)
        now.check()
        assert now.backlog.get(QUEUE, {}).get("held", 0) == len(now.held)
        for owner in OWNERS:
            out: Any = self.client.zrange(f"diptych:out:{QUEUE}:{owner}", 0, -1, withscores=True)
            flow: Any = self.client.zrange(f"diptych:flow:{QUEUE}:{owner}", 0, -1)
            live = {id: r for id, r in now.records.items() if r["owner"] == owner and r["state"] in books.LIVE}
            assert {id for id, _ in out} | {*flow} == set(live) and len(out) + len(flow) == len(live)
            for id, score in out:
                record = live[id]
                assert score in {0 if record["state"] == "running" else 1 + int(record["level"])} | (
                    {0} if "offered" in record else set()
                )
            assert all(("message" in record) == (id in flow) for id, record in live.items())
            assert flow == sorted(flow, key=lambda id: (int(live[id]["level"]), int(live[id]["sequence"])))
            assert out or not flow  # whoever waits has a job whose claim or end feeds the next one
            assert len(out) <= self.most_running
            assert self.client.sismember(f"diptych:flows:{QUEUE}", owner) == bool(flow)
            assert self.client.sismember(f"diptych:owners:{QUEUE}", owner) == bool(live)

    def drain(self) -> None:
        """With a worker that lives, every job comes to its end."""
        for _ in range(len(self.made) + 2):
            self.fill()
            for id in [*self.fences]:
                self.end(id)
            books.age(self.client, 1000)
            self.sweep()
            if self.store.backlog("image").queued == 0:
                break
        self.check()
        states = [self.store.get(id) for id in self.made]
        assert all(job is None or job.state.final for job in states)


@pytest.fixture
def hall(client: redis.Redis, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Hall]:
    """A hall of 32 places, or of what a test is parametrized with."""
    hall = Hall(client, redis_url, *getattr(request, "param", (32,)))
    yield hall
    hall.store.close()


@settings(
    deadline=None,
    max_examples=max(15, settings().max_examples // 8),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    dice=st.randoms(use_true_random=False),
    places=st.sampled_from((0, 1, 3, 8, 11, 32)),
    limits=st.builds(
        OwnerLimits,
        of_model=st.none() | st.integers(1, 20),
        live=st.none() | st.integers(1, 20),
        running=st.sampled_from(("", "1", "3", "25%", "100%")),
    ),
)
def test_nothing_is_lost_or_counted_wrong(
    dice: Random, places: int, limits: OwnerLimits, client: redis.Redis, redis_url: str
) -> None:
    hall = Hall(client, redis_url, places, limits)
    for _ in range(40):
        hall.anything(dice)
    hall.check()
    for _ in range(10):
        hall.anything(dice)
        hall.check()
    hall.drain()
    hall.store.close()
    assert client.keys("diptych:flow*") + client.keys("diptych:out*") + client.keys("diptych:owners*") == []


@pytest.mark.parametrize("hall", [(2,), (8,), (15,), (32,)], indirect=True)
def test_who_floods_leaves_places_to_others(hall: Hall) -> None:
    places = hall.places
    for _ in range(100):
        hall.submit("ada", priority=0)
    hall.fill()
    assert hall.live() == {"ada": places - places // SPARE}
    for _ in range(places // SPARE):
        id = hall.submit("bob", priority=9)
        assert hall.take() == id, "it waited for another owner's"


def test_floods_share_the_places_and_take_what_others_leave(hall: Hall) -> None:
    for owner in ("ada", "bob"):
        for _ in range(150):
            hall.submit(owner)
        hall.fill()

    def turn_over(jobs: int) -> None:
        for _ in range(jobs):
            hall.end(next(iter(hall.fences)))
            hall.fill()

    turn_over(100)
    share = (hall.places - hall.places // SPARE) // 2
    assert hall.live() == {"ada": share, "bob": share}
    for id in [id for id in hall.made if hall.owner(id) == "bob"]:
        hall.fences.pop(id, None)
        hall.store.cancel(id)
    turn_over(10)
    assert hall.live() == {"ada": hall.places - hall.places // SPARE}


@pytest.mark.parametrize("hall", [(0,)], indirect=True)
def test_few_messages_of_an_owner_wait_while_no_worker_tells_its_places(hall: Hall) -> None:
    for _ in range(50):
        hall.submit("ada")
    id = hall.submit("bob")
    taken = [hall.take() for _ in range(WINDOW + 1)]
    assert taken[-1] == id
    hall.drain()


def test_an_owners_own_priorities_are_kept(hall: Hall) -> None:
    for _ in range(60):
        hall.submit("ada", priority=5)
    urgent = [hall.submit("ada", priority=0) for _ in range(3)]
    later = hall.submit("ada", priority=9)
    order = []
    while (id := hall.take()) is not None or hall.fences:
        if id is None:
            hall.end(next(iter(hall.fences)))
        else:
            order.append(id)
    places = hall.places - hall.places // SPARE
    assert [id for id in order if id in urgent] == urgent
    assert max(map(order.index, urgent)) < places + len(urgent) + WINDOW + places // SPARE
    assert order[-1] == later and len(order) == 64


@pytest.mark.parametrize(
    ("hall", "most"),
    [((places, OwnerLimits(running=share)), most)
     for places, share, most in ((32, "25%", 8), (32, "5", 5), (32, "1%", 1), (11, "25%", 2), (7, "40%", 2))],
    indirect=["hall"],
)  # fmt: skip
def test_an_owner_has_no_more_jobs_at_workers_than_its_limit_and_all_of_them_in_the_end(hall: Hall, most: int) -> None:
    for _ in range(40):
        hall.submit("ada")
    urgent = hall.submit("ada", priority=0)
    others = [hall.submit("bob") for _ in range(most)]
    order = []
    while (id := hall.take()) is not None or hall.fences:
        if id is not None:
            order.append(id)
            assert hall.live()["ada"] <= most
        else:
            hall.end(next(iter(hall.fences)))
    assert len(order) == 41 + most and {*others} <= {*order[: 2 * most]}, "another's wait for none of them"
    assert order.index(urgent) <= 2 * most, "it went before those that were held back"
    hall.check()


async def test_live_jobs_of_an_owner_are_limited_in_a_queue_and_of_a_model(
    hall: Hall, redis_url: str, submissions: Submissions
) -> None:
    """Across processes that create them at once."""
    other, limits = Submissions(redis_url, 1000), OwnerLimits(of_model=6, live=9)

    async def create(model: str, modality: str = "image") -> str:
        job = draft(owner="ada", model=model, modality=modality, priority=Random().randrange(10))
        made = await Random().choice((submissions, other)).make(job, job.id, limits=limits)
        assert (made.job is None) == bool(made.jobs_of)
        return made.jobs_of

    assert Counter(await asyncio.gather(*(create("emoji-xl") for _ in range(20)))) == {"": 6, "model": 14}
    then = Counter(await asyncio.gather(*(create("emoji-z") for _ in range(20))))
    assert then == {"": 3, "queue": 17}, "three more in the queue"
    assert await create("emoji-lm", "text") == "", "another queue"
    await other.close()
    hall.check_counts()


@pytest.mark.parametrize("hall", [(32, OwnerLimits(live=4))], indirect=True)
def test_what_nobody_removed_counts_against_no_limit_for_long(hall: Hall, client: redis.Redis) -> None:
    client.zadd(f"diptych:out:{QUEUE}:ada", {f"gone_{k}": 4 for k in range(40)})
    client.sadd("diptych:active:image", "emoji-xl")
    for _ in range(40):
        with contextlib.suppress(QueueFull):
            hall.store.create(draft(owner="ada", id="job_0"), "job_0", limits=hall.owner_limits)
            break
    assert hall.store.get("job_0") is not None
    client.delete("diptych:job:job_0")  # by hand
    client.zadd(f"diptych:out:{QUEUE}:ada", {f"lost_{k}": 4 for k in range(40)})
    assert books.pop(client, QUEUE) == "job_0"
    for _ in range(100):
        hall.sweep()
        if not client.exists("diptych:active:image"):
            break
    assert not client.keys("diptych:o*:image*") and not client.exists("diptych:active:image")


def test_positions_of_held_jobs_take_turns_into_account(hall: Hall) -> None:
    for owner in ("ada", "bob"):
        for _ in range(100):
            hall.submit(owner)
    held = sorted(hall.held(), key=lambda id: int(id.removeprefix("job_")))
    positions = {id: position.ahead for id in held if (position := hall.store.standing(id)) is not None}
    assert [*positions] == held and hall.store.standing(hall.made[0]) is not None
    for owner in ("ada", "bob"):
        ahead = [count for id, count in positions.items() if hall.owner(id) == owner]
        assert ahead == sorted(ahead) and ahead[-1] < 200


def test_what_is_held_back_is_emptied(hall: Hall, client: redis.Redis) -> None:
    for _ in range(60):
        hall.submit("bob")
    sent = client.llen(f"{QUEUE}:3")
    assert hall.store.empty("image", 1000) == 60 and client.llen(f"{QUEUE}:3") == sent
    hall.check()


@pytest.mark.parametrize("hall", [(0,)], indirect=True)
def test_entries_that_nobody_removes_cost_an_owner_no_place_for_long(hall: Hall, client: redis.Redis) -> None:
    """A process of an older version ends jobs without a word in `out`, and a worker of it takes them."""
    client.zadd(f"diptych:out:{QUEUE}:ada", {f"gone_{k}": 4 for k in range(40)})
    ids = [hall.submit("ada") for _ in range(3)]
    assert hall.held() == {*ids}
    client.sadd(f"diptych:owners:{QUEUE}", "ada")
    for _ in range(1000):
        hall.sweep()
        if not hall.held():
            break
    assert not hall.held()
    hall.drain()


def test_a_worker_that_ends_takes_its_places_along(client: redis.Redis, registry: Registry) -> None:
    cards = [
        WorkerCard(id, "here", 1, "ready", "", 1.5, models=[IMAGE, TEXT], limits={"image": 32, "text": jobs})
        for id, jobs in (("ada", 64), ("bob", 8))
    ]
    for card in (*cards, *cards):
        registry.announce(card, 600)
    assert client.hgetall("diptych:places") == {QUEUE: "64", TEXTS: "72"}
    registry.deregister("ada")
    assert client.hgetall("diptych:places") == {QUEUE: "32", TEXTS: "8"}
    draining = WorkerCard("bob", "here", 1, "draining", "", 1.5, models=[IMAGE], limits={"image": 32})
    registry.announce(draining, 600)
    assert client.hgetall("diptych:places") == {}
    registry.announce(cards[0], 600)
    client.zadd("diptych:placed", {"ada": 1})  # its card has expired
    registry.announce(cards[1], 600)
    assert client.hgetall("diptych:places") == {QUEUE: "32", TEXTS: "8"}


async def test_many_submissions_at_once_are_held_back_alike(hall: Hall, submissions: Submissions) -> None:
    hall.made = [f"job_{k}" for k in range(80)]
    for k, id in enumerate(hall.made):
        made = await submissions.make(draft(id=id, owner="ada"), id)
        assert made.standing is not None and made.standing.ahead <= k
    hall.check()
    hall.drain()


def test_jobs_of_a_model_without_workers_take_no_place_of_anothers(hall: Hall, client: redis.Redis) -> None:
    """Neither of their owner's jobs of other models, nor of others'; few of them wait as messages."""
    hall.made = [f"cold_{k}" for k in range(60)]
    for id in hall.made:
        hall.store.create(draft(id=id, owner="ada", model=COLD), id)
    hall.check_counts()
    assert client.zcard(f"diptych:out:{books.kombu('image', COLD)}:ada") == WINDOW
    warm = [hall.submit("ada") for _ in range(28)]
    taken = [hall.take() for _ in range(28)]
    assert taken == warm
    assert hall.store.empty("image", 1000) == 60
    for id in warm:
        hall.end(id)
    hall.sweep()
    hall.check_counts()
    assert not client.keys("diptych:flow*") and not client.keys("diptych:o*:image*")
