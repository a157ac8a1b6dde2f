"""The store's edges, one by one: races, a full Redis, Redis killed and away, answers that got lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis

from core.jobs.connection import StoreDown, StoreFull
from core.jobs.limits import JobLimits
from core.jobs.record import JobState, ProgressReport, new_id
from core.jobs.store import JobStore
from core.jobs.upkeep import SweepResult
from deployment.redis import RedisServer
from tests.core.jobs import books
from tests.core.jobs.drafts import draft, envelope
from tests.core.jobs.severed import Severed
from tests.core.present import present


def check(client: redis.Redis) -> None:
    books.Books.of(client).check()


# -- a life ------------------------------------------------------------------------------------------------------


def test_record_tells_all(store: JobStore, client: redis.Redis) -> None:
    wanted = draft(request={"prompt": "ein Fuchs 🦊\n", "seed": 2**63 - 1}, priority=7, deadline_s=500.25)
    queued = store.create(wanted)
    seconds, microseconds = client.time()
    assert abs(queued.created - (seconds + microseconds / 1e6)) < 60
    assert queued.deadline == pytest.approx(queued.created + 500.25, abs=0.001)
    claim = present(store.leases.claim(queued.id, "ada"))
    assert claim.deadline_left_s is not None and 400 < claim.deadline_left_s <= 500.25
    assert (claim.modality, claim.model, claim.parameters, claim.priority) == (
        "image",
        "emoji-xl",
        wanted.parameters,
        7,
    )
    running = present(store.get(queued.id))
    assert running.started is not None and running.started >= queued.created
    store.leases.report([ProgressReport(queued.id, 1, {"steps_done": 3})])
    result = {"images": [{"key": "sha256/ab"}]}
    assert store.leases.succeed(queued.id, 1, result)
    ended = present(store.get(queued.id))
    assert ended.ended is not None and ended.ended >= running.started
    assert running == replace(queued, state=JobState.RUNNING, worker="ada", attempt=1, started=running.started)
    assert ended == replace(
        running, state=JobState.SUCCEEDED, ended=ended.ended, progress={"steps_done": 3}, result=result
    )


def test_ended_jobs_are_kept_for_their_time(redis_url: str, client: redis.Redis) -> None:
    store = JobStore(redis_url, JobLimits(retention_s=5000))
    job = store.create(draft(deadline_s=900))
    assert client.pttl(f"diptych:job:{job.id}") == -1
    store.leases.claim(job.id, "ada")
    store.cancel(job.id)
    for key in (f"diptych:job:{job.id}", f"diptych:events:{job.id}"):
        assert 3_000_000 < client.pttl(key) <= (5_000_000 if "job:" in key else 3_600_000)
    assert 0 < client.pttl("diptych:control:ada") <= 3_600_000
    # And nothing else is left of it but the entries of lists, which a sweep takes out when the record has gone.
    lists = ("ended", "jobs", "jobs:", "happened", "active:image", "backlog:image.emoji-xl", "mark:image.emoji-xl:3")
    rest = {f"diptych:{name}" for name in ("sequence", "backlog:image", "control:ada", *lists)}
    assert set(client.keys("diptych:*")) == rest | {f"diptych:job:{job.id}", f"diptych:events:{job.id}"}
    store.close()


@pytest.mark.parametrize(
    ("max_attempts", "message"),
    [
        (1, "a worker stopped answering while it ran this job"),
        (3, "3 workers stopped answering while they ran this job"),
    ],
)
def test_crashes_are_counted(redis_url: str, client: redis.Redis, max_attempts: int, message: str) -> None:
    store = JobStore(redis_url, JobLimits(lease_s=1000, max_attempts=max_attempts))
    job = store.create(draft(priority=9))
    for lost in range(1, max_attempts + 1):
        claim = present(store.leases.claim(job.id, f"worker {lost}"))
        assert claim.suspect is (lost > 2)  # after a first crash it runs beside others
        store.upkeep.sweep()
        for _ in range(3):
            books.age(client, 300)  # within the lease, and within what counts as silence
            assert store.upkeep.sweep() == SweepResult([], [], [])
        books.age(client, 300)
        last = lost == max_attempts
        assert store.upkeep.sweep() == SweepResult([] if last else [envelope(job.id, 0)], [], [job.id] if last else [])
    assert present(store.get(job.id)).error == {"code": "crashed", "message": message}
    store.close()


def test_a_running_job_that_is_far_over_its_deadline_is_ended_and_its_worker_told(
    store: JobStore, client: redis.Redis
) -> None:
    job = store.create(draft(deadline_s=500))
    store.leases.claim(job.id, "ada")
    for seconds, expired in ((600, []), (700, []), (300, [job.id])):
        books.age(client, seconds)
        store.leases.renew("ada", {job.id: 1})
        assert store.upkeep.sweep().expired == expired
    over = present(store.get(job.id))
    assert over.error == {"code": "expired", "message": "the deadline passed before the job was done"}
    told: Any = client.xrange("diptych:control:ada")
    assert [fields for _, fields in told] == [{"cancel": job.id, "attempt": "1", "of": job.incarnation}]


# -- messages that get lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_message_overtaken_by_a_later_one(store: JobStore, client: redis.Redis, order: tuple[int, int]) -> None:
    """A worker died with a message in its hands, while the list was never empty."""
    jobs = [store.create(draft()) for _ in range(6)]
    for job in jobs:
        books.push(client, "image.emoji-xl", 3, job.id)
    for job in jobs[:3]:
        assert books.pop(client, "image.emoji-xl") == job.id
    lost = jobs.pop(1)
    store.upkeep.sweep()
    for index in order:  # as threads do that took them at the same time
        assert store.leases.claim(jobs[index].id, "ada") is not None
    found = []
    for turn in range(8):
        for message in store.upkeep.sweep().send:
            found.append(message)
            books.push(client, message.kombu_queue, message.priority, message.id)
        if turn % 2:
            books.age(client, 600)
            store.leases.renew("ada", {jobs[0].id: 1, jobs[1].id: 1})
    assert found == [envelope(lost.id, 3)]  # and none of those that wait behind
    check(client)


def test_message_in_hand_is_not_lost(store: JobStore, client: redis.Redis) -> None:
    """A later one was claimed, but only just: the first may be on its way to its claim."""
    first, second, behind = (store.create(draft()) for _ in range(3))
    books.push(client, "image.emoji-xl", 3, behind.id)
    books.age(client, 5000)
    assert store.leases.claim(second.id, "ada") is not None
    assert store.upkeep.sweep().send == []
    books.age(client, 900)
    assert store.upkeep.sweep().send == []
    assert store.leases.claim(first.id, "ada") is not None


def test_sweep_is_bounded(store: JobStore, client: redis.Redis) -> None:
    jobs = [store.create(draft(priority=index)) for index in range(7)]  # in several lists
    jobs += [store.create(draft(deadline_s=10)) for _ in range(7)]
    books.age(client, 1100)
    first, second, third = (store.upkeep.sweep(4) for _ in range(3))
    assert [len(sweep.expired) for sweep in (first, second, third)] == [4, 3, 0]
    assert sorted(e.id for sweep in (first, second, third) for e in sweep.send) == sorted(job.id for job in jobs[:7])
    assert max(len(sweep.send) for sweep in (first, second, third)) == 4
    check(client)


def test_records_deleted_by_hand_are_swept_away(store: JobStore, client: redis.Redis) -> None:
    jobs = [store.create(draft(deadline_s=10)) for _ in range(2)]
    store.leases.claim(jobs[0].id, "ada")
    client.delete(*(f"diptych:job:{job.id}" for job in jobs))
    books.age(client, 9000)
    assert store.upkeep.sweep() == SweepResult([], [], [])
    assert not client.exists("diptych:leases", "diptych:deadlines", "diptych:sent:image.emoji-xl:3")


# -- many at once ------------------------------------------------------------------------------------------------


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The same work on many threads, begun together."""
    barrier = threading.Barrier(count)

    def begin(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_everybody_does_everything_at_once(redis_url: str, client: redis.Redis) -> None:
    """Threads that end, hand back, cancel and sweep the same jobs, each on a connection of a store of its own."""
    ids = [new_id() for _ in range(30)]
    ends: list[tuple[str, int]] = []

    def work(index: int) -> None:
        store, dice = JobStore(redis_url, JobLimits(lease_s=1000, max_attempts=2)), random.Random(index)
        for _ in range(120):
            id = dice.choice(ids)
            store.create(draft(id=id, work_ms=7, deadline_s=dice.choice([None, 0.01, 500])))
            claim = store.leases.claim(id, f"worker {index}")
            attempt = claim.attempt if claim else dice.randint(1, 3)
            match dice.randrange(9):
                case 0:
                    store.cancel(id)
                case 1 | 2:
                    if store.leases.succeed(id, attempt, {"by": index}) and claim:
                        ends.append((id, attempt))
                case 3:
                    store.leases.fail(id, attempt, "code", "message")
                case 4 | 5:
                    store.leases.hand_back(id, attempt)
                case 6:
                    store.upkeep.sweep()
                case 7:
                    store.leases.report([ProgressReport(id, attempt, {"by": index})])
                case 8:
                    client.zadd("diptych:leases", {id: 1}, xx=True)  # its lease has run out
        store.close()

    at_once(6, work)
    after = books.Books.of(client)
    after.check()
    assert set(after.records) == set(ids)
    assert len(ends) == len({id for id, _ in ends})  # nothing is finished twice
    for id, attempt in ends:
        assert (after.records[id]["state"], after.records[id]["attempt"]) == ("succeeded", str(attempt))


def test_many_threads_share_a_few_connections(store: JobStore, client: redis.Redis) -> None:
    before = len(client.client_list())
    ids = [store.create(draft()).id for _ in range(4)]
    at_once(64, lambda index: [store.get(id) for id in ids * 5])
    assert len(client.client_list()) - before <= 32


# -- a full Redis ------------------------------------------------------------------------------------------------


def test_full_redis_creates_nothing_and_ends_all(store: JobStore, full: redis.Redis) -> None:
    jobs = [store.create(draft(deadline_s=500 if index == 8 else None)) for index in range(11)]
    for job in jobs[:6]:
        store.leases.claim(job.id, "ada")
    before = sorted(full.keys())
    full.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        store.create(draft())
    assert sorted(full.keys()) == before
    check(full)
    with pytest.raises(StoreFull):
        store.leases.report([ProgressReport(jobs[0].id, 1, {"steps_done": 1})])
    # Whatever keeps jobs going or ends them goes on.
    assert store.leases.renew("ada", {job.id: 1 for job in jobs[:7]}) == {jobs[6].id}
    assert store.leases.succeed(jobs[0].id, 1, {"images": ["x" * 10_000]})
    assert store.leases.fail(jobs[1].id, 1, "code", "message")
    assert store.leases.expire(jobs[2].id, 1)
    assert store.leases.hand_back(jobs[3].id, 1) is not None
    assert store.cancel(jobs[4].id) is not None
    assert store.cancel(jobs[6].id) is not None
    assert store.leases.claim(jobs[7].id, "bob") is not None
    full.config_set("maxmemory", 0)
    books.age(full, 1100)
    full.config_set("maxmemory", 1)
    sweep = store.upkeep.sweep()
    assert sweep.expired == [jobs[8].id]
    assert {envelope.id for envelope in sweep.send} == {jobs[k].id for k in (3, 5, 7, 9, 10)}
    check(full)
    assert " ".join(present(store.get(job.id)).state for job in jobs) == (
        "succeeded failed expired queued cancelled queued cancelled queued expired queued queued"
    )
    full.config_set("maxmemory", 0)
    assert store.create(draft()).state is JobState.QUEUED


# -- Redis dies --------------------------------------------------------------------------------------------------


def test_kill_in_the_middle_of_writing(store: JobStore, client: redis.Redis, mortal: RedisServer) -> None:
    """Whatever the moment: what is found afterwards is whole, and what was acknowledged is there."""
    for _ in range(3):
        said: dict[str, str] = {}

        def work(index: int, said: dict[str, str] = said) -> None:
            try:
                while True:
                    id = store.create(draft(deadline_s=500)).id
                    said[id] = "queued"
                    store.leases.claim(id, f"worker {index}")
                    said[id] = "running"
                    store.leases.succeed(id, 1, {"images": []})
                    said[id] = "succeeded"
            except StoreDown:
                return

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        while len(said) < 50:
            time.sleep(0.001)
        mortal.kill()
        for thread in threads:
            thread.join()
        mortal.start()
        after = books.Books.of(client)
        after.check()
        order = ["queued", "running", "succeeded"]
        for id, state in said.items():
            assert order.index(after.records[id]["state"]) >= order.index(state)


def test_redis_away(store: JobStore, mortal: RedisServer) -> None:
    job = store.create(draft())
    assert store.leases.claim(job.id, "ada") is not None
    mortal.kill()
    calls: list[Callable[[], Any]] = [
        lambda: store.create(draft()),
        lambda: store.get(job.id),
        lambda: store.leases.glance(job.id),
        lambda: store.leases.claim(job.id, "ada"),
        lambda: store.leases.renew("ada", {job.id: 1}),
        lambda: store.leases.report([ProgressReport(job.id, 1, {})]),
        lambda: store.leases.succeed(job.id, 1, {}),
        lambda: store.leases.fail(job.id, 1, "a", "b"),
        lambda: store.leases.expire(job.id, 1),
        lambda: store.leases.hand_back(job.id, 1),
        lambda: store.cancel(job.id),
        store.upkeep.sweep,
        lambda: store.backlog("image"),
    ]
    for call in calls:
        with pytest.raises(StoreDown):
            call()
    mortal.start()  # which has forgotten every script
    assert store.leases.succeed(job.id, 1, {"images": []})
    for call in calls:
        call()


def test_answers_that_get_lost(redis_url: str, client: redis.Redis) -> None:
    """Each command takes effect, and the connection breaks before its answer: it is repeated, and has effect once."""
    severed = Severed(redis_url)
    store = JobStore(severed.url, JobLimits(lease_s=1000, resend_s=1000))
    # Load the scripts: from then on each call is one command.
    store.cancel(store.create(draft()).id)
    store.leases.claim("x", "y")
    store.leases.renew("y", {"x": 1})
    store.leases.succeed("x", 1, {})
    store.leases.hand_back("x", 1)

    def lost(call: Callable[[], Any], marker: str) -> Any:
        cuts = severed.cuts
        severed.cut(marker)
        answer = call()
        assert severed.cuts == cuts + 1
        return answer

    wanted = draft(work_ms=5)
    job = lost(lambda: store.create(wanted), wanted.id)
    assert job == store.get(job.id)
    assert lost(lambda: store.leases.claim(job.id, "ada"), job.id).attempt == 1
    assert store.leases.claim(job.id, "ada") is None  # another call of the same worker is another matter
    assert lost(lambda: store.leases.hand_back(job.id, 1), job.id) == envelope(job.id, 0)
    assert store.leases.claim(job.id, "ada") is not None
    assert lost(lambda: store.leases.renew("ada", {job.id: 2}), job.id) == set()
    assert lost(lambda: store.leases.succeed(job.id, 2, {"images": []}), job.id) is True
    assert not store.leases.fail(job.id, 2, "a", "b")
    second = store.create(draft())
    cancelled = lost(lambda: store.cancel(second.id), second.id)
    assert cancelled.state is JobState.CANCELLED
    types = [type for type, _ in books.Books.of(client).streams[job.id]]
    assert types == ["queued", "running", "queued", "running", "succeeded"]
    check(client)
    store.close()
    severed.close()
