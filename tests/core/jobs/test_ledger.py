"""Whose a job is, where it stands, what erasing it takes along, and how long what it made is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.artifacts import Artifacts, NoArtifact
from core.jobs.reaper import Reaper
from core.jobs.record import JobState, ProgressReport
from core.jobs.store import JobStore
from tests.core.jobs.books import Books
from tests.core.jobs.drafts import draft
from tests.core.present import present

KEY = "sha256/00/" + 62 * "0" + ".png"


def end(store: JobStore, id: str, *artifacts: str, way: str = "succeeded") -> None:
    """End a job in this way, by a worker where it takes one."""
    if way in ("cancelled", "erased"):
        assert store.cancel(id) if way == "cancelled" else store.erase(id)
        return
    claim = present(store.leases.claim(id, "ada"))
    if way == "failed":
        assert store.leases.fail(id, claim.fence, "engine_error", "no")
    elif way == "expired":
        assert store.leases.expire(id, claim.fence)
    else:
        assert all(map(store.upkeep.keep, artifacts))
        assert store.leases.succeed(id, claim.fence, {"images": []}, artifacts)


def test_a_place_in_the_queue(store: JobStore) -> None:
    jobs = [draft(priority=priority, work_ms=1000) for priority in (5, 9, 0, 5, 2, 9)]
    for job in jobs:
        store.create(job)
    standings = {job.id: store.standing(job.id) for job in jobs}
    assert [standing.ahead for job in jobs if (standing := standings[job.id])] == [2, 4, 0, 3, 1, 5]
    first = present(standings[jobs[0].id])
    assert (first.backlog.queued, first.backlog.queued_ms) == (6, 6000)
    store.leases.claim(jobs[2].id, "ada")
    assert store.standing(jobs[2].id) is None and store.standing("nobody") is None
    after = present(store.standing(jobs[5].id))
    assert after.ahead == 4 and after.backlog.running_ms == 1000


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["ann", "bob", ""]), st.booleans()), max_size=25), st.integers(1, 7))
def test_pages_hold_every_job_once_and_newest_first(
    store: JobStore, client: redis.Redis, made: list[tuple[str, bool]], limit: int
) -> None:
    client.flushall()
    ids = []
    for owner, cancelled in made:
        ids.append((store.create(draft(owner=owner)).id, owner, cancelled))
        if cancelled:
            store.cancel(ids[-1][0])
    for owner in (None, "ann", "bob", "", "eve"):
        for state in (None, JobState.QUEUED, JobState.CANCELLED, JobState.FAILED):
            found: list[str] = []
            after, more = "", True
            while more:
                page = present(store.lists.page(owner, state=state, after=after, limit=limit))
                assert len(page.jobs) <= limit
                found += [job.id for job in page.jobs]
                after, more = page.after, page.more
            newest_first = [
                id for id, whose, cancelled in reversed(ids)
                if owner in (None, whose) and state in (None, JobState.CANCELLED if cancelled else JobState.QUEUED)
            ]  # fmt: skip
            assert found == newest_first


def test_what_a_page_goes_on_after_must_be_there(store: JobStore) -> None:
    mine, other = store.create(draft(owner="ann")), store.create(draft(owner="bob"))
    assert store.lists.page("ann", after="nothing") is None
    assert store.lists.page("ann", after=other.id) is None, "it is in another's list"
    page = present(store.lists.page("ann", after=mine.id))
    assert page.jobs == [] and not page.more
    elsewhere = present(store.lists.page("ann", model="other"))
    assert elsewhere.jobs == []


def test_erasing_ends_and_forgets(store: JobStore, client: redis.Redis) -> None:
    waits, runs, done = (store.create(draft(owner="ann")).id for _ in range(3))
    claim = present(store.leases.claim(runs, "ada"))
    end(store, done, "a")
    for id in (waits, runs, done):
        assert store.erase(id) and not store.erase(id)
        assert store.get(id) is None
    books = Books.of(client)
    books.check()
    assert books.records == {} and not store.leases.succeed(runs, claim.attempt, {})
    assert store.leases.report([ProgressReport(runs, claim.attempt, {})]).stale == {runs}
    told = client.xrange("diptych:control:ada")[0][1]
    assert told == {"cancel": runs, "attempt": "1", "of": claim.incarnation}
    assert client.xrevrange(f"diptych:events:{runs}")[0][1]["type"] == "cancelled", "who follows it is told"
    assert not client.exists(f"diptych:events:{done}")
    assert not client.exists("diptych:jobs", "diptych:jobs:ann", "diptych:ended")


def test_artifacts_live_as_long_as_who_names_them(store: JobStore, client: redis.Redis) -> None:
    one, two = (store.create(draft()).id for _ in range(2))
    end(store, one, "a", "b")
    end(store, two, "b")
    pass_time(client)
    store.erase(one)
    assert store.upkeep.due() == ["a"], "b is named by the other"
    assert store.upkeep.due() == [], "it is being deleted"
    assert not store.upkeep.keep("a"), "and cannot be made at this moment"
    store.upkeep.gone(["a"])
    assert store.upkeep.keep("a")
    store.erase(two)
    assert store.upkeep.due() == ["b"]


def test_one_who_dies_while_deleting_is_replaced(store: JobStore, client: redis.Redis) -> None:
    client.zadd("diptych:kept", {"a": 1})
    assert store.upkeep.due() == ["a"] and store.upkeep.due() == []
    client.zincrby("diptych:going", -61_000, "a")
    assert store.upkeep.due() == ["a"]


def test_what_was_made_this_moment_is_not_taken_away(store: JobStore) -> None:
    """A job that makes the same picture as an erased one names it a moment later."""
    one, two = (store.create(draft()).id for _ in range(2))
    end(store, one, "same")
    assert store.leases.claim(two, "bob") is not None and store.upkeep.keep("same")
    store.erase(one)
    assert store.upkeep.due() == []
    assert store.leases.succeed(two, 1, {}, ["same"])


def pass_time(client: redis.Redis, minutes: int = 11) -> None:
    # An artifact that two jobs wrote within a millisecond has a hold, too.
    for key in ("diptych:kept", *client.keys("diptych:held:*")):
        for artifact, score in client.zrange(key, 0, -1, withscores=True):
            client.zadd(key, {artifact: score - minutes * 60_000})


def test_the_reaper_deletes_what_is_due(store: JobStore, client: redis.Redis, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path.as_uri())
    keys = [artifacts.put(f"picture {k}".encode(), "image/png") for k in range(3)]
    client.zadd("diptych:kept", {keys[0]: 1, keys[1]: 1, keys[2]: 9e15})
    artifacts.delete(keys[1])  # by hand, which is nobody's business
    reaper = Reaper(store.upkeep, lambda envelope: None, every_s=0.01, delete=artifacts.delete)
    reaper.start()
    while client.zcard("diptych:kept") > 1 or client.exists("diptych:going"):
        pass
    reaper.stop()
    for key in keys[:2]:
        with pytest.raises(NoArtifact):
            artifacts.get(key)
    assert artifacts.get(keys[2]) == b"picture 2"


@pytest.mark.parametrize("way", ["succeeded", "failed", "cancelled", "expired", "erased"])
def test_what_a_job_begins_with_is_kept_as_long_as_it_lives_and_then_as_its_record(
    jobs: JobStore, client: redis.Redis, way: str
) -> None:
    assert jobs.upkeep.keep(KEY, 1)
    job, other = (jobs.create(draft(owner="ann", inputs=(KEY,))) for _ in range(2))
    assert job.inputs == (KEY,) and jobs.get(job.id) == job
    for _ in range(3):  # however long it waits, it is not taken away
        pass_time(client, 100_000)
        assert jobs.upkeep.due() == []
    end(jobs, job.id, "made", way=way)
    pass_time(client, 100_000)
    assert KEY not in jobs.upkeep.due(), "another one needs it"
    assert jobs.cancel(other.id)
    assert not client.exists("diptych:needed")
    pass_time(client, 50)
    assert KEY not in jobs.upkeep.due(), "its record has an hour and a minute"
    pass_time(client, 20)
    assert KEY in jobs.upkeep.due()


def test_erasing_the_last_job_that_began_with_something_takes_that_along(store: JobStore, client: redis.Redis) -> None:
    ids = [store.create(draft(inputs=(KEY,))).id for _ in range(2)]
    for id in ids:
        assert store.upkeep.due() == [] and store.erase(id)
        assert store.upkeep.due() == []
        pass_time(client)
    assert store.upkeep.due() == [KEY]


@pytest.mark.parametrize("for_s", [3600.0, 30 * 86_400.0])
def test_erasing_a_job_takes_nothing_that_others_keep(store: JobStore, client: redis.Redis, for_s: float) -> None:
    """An upload that came this moment has the very bytes that a job made."""
    id = store.create(draft()).id
    end(store, id, "same")
    pass_time(client, 20 * 60)  # it ended long ago
    assert store.upkeep.keep("same", for_s, hold=True)
    until = client.time()[0] + for_s
    store.erase(id)
    assert store.upkeep.due() == []
    assert client.zscore("diptych:kept", "same") / 1000 > until - 60, "it stays for as long as was said"
    pass_time(client, round(for_s / 60) + 1)
    assert store.upkeep.due() == ["same"]
    assert not client.exists("diptych:held")


def test_a_queue_is_emptied_though_a_record_is_gone(store: JobStore, client: redis.Redis) -> None:
    ids = [store.create(draft()).id for _ in range(5)]
    client.delete(f"diptych:job:{ids[0]}", f"diptych:job:{ids[3]}")  # by hand
    assert store.empty("image", 2) == 2 and store.empty("image") == 1
    assert not client.exists("diptych:sent:image.emoji-xl:3")


def test_previews_are_for_a_while(store: JobStore, client: redis.Redis) -> None:
    id = store.create(draft()).id
    assert store.leases.claim(id, "ada") is not None and store.preview(id, 0) is None
    assert not store.leases.report([ProgressReport(id, 1, {}, previews={1: "UE5H", 2: "Mg=="})]).stale
    assert store.preview(id, 1) == b"PNG" and store.preview(id, 2) == b"2" and store.preview(id, 0) is None
    assert 0 < client.pttl(f"diptych:preview:{id}") <= 60_000
    assert "UE5H" not in str(client.xrange(f"diptych:events:{id}")), "the stream stays small"
    over = ProgressReport(id, 0, {}, previews={0: "UE5H"})  # of an attempt that is over
    assert store.leases.report([over]).stale == {id}
    assert store.preview(id, 0) is None
    store.leases.succeed(id, 1, {})
    assert store.preview(id, 1) is None
