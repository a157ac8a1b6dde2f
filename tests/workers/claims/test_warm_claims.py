"""Jobs that name LoRAs go to workers that have them in memory, and wait a bounded time for these."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.request import urlopen

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contract.image import ImageJob
from core.jobs.broker import Envelope
from core.jobs.holders import FileHolders
from core.jobs.record import JobDraft, JobState
from core.jobs.store import JobStore
from deployment.redis import free_port
from tests.workers.crew import Crew, Hired, eventually
from tests.workers.desk import JOB
from tests.workers.stage import StagePictures
from workers.claims.store_retry import StoreRetry
from workers.claims.warm_claims import WarmClaims

WORKERS, FILES = ("first", "second", "third"), ("stage:lora a", "stage:lora b", "stage:control edges")


def reads(hired: Hired) -> list[str]:
    return [event["request"] for event in hired.noted("read")]


def one_after_another(crew: Crew, loras: str) -> list[str]:
    ids = []
    for lora in loras:
        ids.append(crew.ask(lora=lora))
        crew.succeeded(ids[-1])
    return ids


def test_two_workers_with_room_for_one_lora_each_settle_on_one_each(crew: Crew) -> None:
    both = [crew.hire("--files", "1", warm_wait_s=60, lease_s=60) for _ in range(2)]
    settled = 0
    for _ in range(30):  # a LoRA that is in no memory is read by the worker that takes its job, whichever that is
        one_after_another(crew, "ab")
        settled = settled + 1 if sorted({*reads(both[0])[-1:], *reads(both[1])[-1:]}) == ["lora a", "lora b"] else 0
        if settled == 3:
            break
    before = [len(reads(hired)) for hired in both]
    one_after_another(crew, "abbaab")
    assert settled == 3 and [len(reads(hired)) for hired in both] == before
    crew.acknowledged()
    assert crew.redis.smembers("_kombu.binding.image") == {"image::image"}, "nothing of a worker's own list"


def test_a_worker_that_is_dead_or_stopped_is_waited_for_once(crew: Crew) -> None:
    dead, alive = (crew.hire("--files", "2", warm_wait_s=0.2, lease_s=20) for _ in range(2))
    dead.signal(signal.SIGSTOP)
    one_after_another(crew, "b")
    crew.holders.hold("gone", ["stage:lora a"], 20)
    one_after_another(crew, "aab")
    assert reads(alive) == ["lora b", "lora a"]
    dead.process.kill()
    eventually(lambda: not crew.redis.keys("image@*"), "messages to the dead are dropped")


@pytest.mark.parametrize("both", [False, True], ids=["the holder dies", "both die"])
def test_what_is_on_offer_to_a_killed_worker_is_served_by_others(crew: Crew, both: bool) -> None:
    """By the worker that offered it, or if that is killed too by another, to which a sweep sends it."""
    brief = {"lease_s": 4, "warm_wait_s": 4, "max_attempts": 100, "stuck_s": 3600}
    holder = crew.hire("--files", "1", image_jobs=1, **brief)
    one_after_another(crew, "a")
    jobs = [crew.ask(lora="a", prompt="HANG=1")]  # fills the holder: what is offered to it stays in its list
    crew.running(jobs[0])
    jobs += [crew.ask(lora="a") for _ in range(5)]
    offering = crew.hire("--files", "1", **brief)
    eventually(lambda: any(crew.redis.hexists(f"diptych:job:{id}", "offered") for id in jobs), "an offer")
    holder.process.kill()
    if both:
        offering.process.kill()
        crew.hire("--files", "1", **brief)
    assert {crew.ended(id).state for id in jobs} == {JobState.SUCCEEDED}
    eventually(lambda: not crew.redis.keys("image@*"), "the end of its list")


def test_an_offer_that_a_worker_dies_with_is_restored_to_no_list(crew: Crew) -> None:
    dying = crew.hire("--files", "1", lease_s=2, max_attempts=100)
    job = crew.make(prompt="KILL=1")
    crew.offer(job, dying)
    dying.wait()
    crew.hire("--files", "1", lease_s=2, max_attempts=100)
    crew.succeeded(job)
    assert {json.loads(kept)[2] for kept in crew.redis.hvals("unacked")} <= {"image.stage"}
    assert not crew.redis.keys("image@*")


@pytest.mark.parametrize("asked", [{"deadline_s": 60.0}, {"lora": ""}])
def test_jobs_with_a_deadline_and_without_files_are_not_offered(crew: Crew, asked: dict[str, Any]) -> None:
    crew.hire("--files", "1", warm_wait_s=60, lease_s=60)
    crew.holders.hold("gone", ["stage:lora a"], 60)
    crew.succeeded(crew.ask(**{"lora": "a", **asked}))
    assert not crew.redis.keys("image@*")


def test_claims_are_counted_and_a_wait_of_zero_offers_nothing(crew: Crew) -> None:
    port = free_port()
    crew.hire("--files", "1", warm_wait_s=0, metrics=f"127.0.0.1:{port}")
    crew.holders.hold("gone", ["stage:lora a"], 60)
    one_after_another(crew, "aaba")
    shown = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    counts = {f'diptych_claims_total{{files="{kind}"}} {count}' for kind, count in (("warm", 1.0), ("cold", 3.0))}
    assert counts <= {*shown.splitlines()}


@pytest.fixture
def holders(redis_url: str) -> Iterator[FileHolders]:
    holders = FileHolders(redis_url)
    yield holders
    holders.close()


def test_nothing_is_kept_of_files_whose_jobs_have_ended(redis_url: str, holders: FileHolders) -> None:
    """Their names are the clients'."""
    handler, store = StagePictures(0, files=1), JobStore(redis_url)
    claims = WarmClaims("me", store.leases, holders, StoreRetry(), str, [handler], wait_s=1, known_s=1)

    for name in "ab":
        with claims.reading(ImageJob.read({**JOB, "lora": name}), handler):
            assert holders.holders([f"stage:lora {name}"]) == ["me"]
    store.close()
    assert not claims._reading


@pytest.mark.parametrize(
    ("own", "others", "offered"),
    [("", "ab", True), ("a", "ab", True), ("b", "ab", True), ("ab", "ab", False), ("", "a", False), ("a", "b", False)],
)
def test_a_job_is_offered_to_workers_with_all_of_its_files(
    redis_url: str, holders: FileHolders, own: str, others: str, offered: bool
) -> None:
    """By one that lacks any of them, and not to one that has some."""
    handler, store = StagePictures(0, files=2), JobStore(redis_url)
    claims = WarmClaims("me", store.leases, holders, StoreRetry(), str, [handler], wait_s=60, known_s=60)
    parameters = {**JOB, "lora": "a,b"}
    job = store.create(JobDraft("two-files", "image", handler.name, parameters))
    holders.hold("other", [f"stage:lora {name}" for name in others], 60)
    with ExitStack() as stack:
        for name in own:
            stack.enter_context(claims.reading(ImageJob.read({**JOB, "lora": name}), handler))
        assert not claims.leave(Envelope(job.id, "image", 5), handler, lambda: True)
    assert store._client.hexists(f"diptych:job:{job.id}", "offered") == offered
    assert bool(store._client.keys("image@other*")) == offered
    store.close()


def test_holders_are_those_that_announced_all_files_and_not_too_long_ago(holders: FileHolders) -> None:
    class Holders(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            holders._client.delete(*(f"diptych:holders:{file}" for file in FILES))
            self.held: dict[str, set[str]] = {worker: set() for worker in WORKERS}

        @rule(worker=st.sampled_from(WORKERS), files=st.sets(st.sampled_from(FILES)), gone=st.sampled_from(FILES))
        def announce(self, worker: str, files: set[str], gone: str) -> None:
            holders.hold(worker, files, 3600, {gone} - files)
            self.held[worker] = (self.held[worker] - {gone}) | files

        @rule(worker=st.sampled_from(WORKERS), file=st.sampled_from(FILES))
        def expire(self, worker: str, file: str) -> None:
            if file in self.held[worker]:
                holders._client.zadd(f"diptych:holders:{file}", {worker: 1})
                self.held[worker] -= {file}

        @rule(files=st.sets(st.sampled_from(FILES), min_size=1))
        def ask(self, files: set[str]) -> None:
            assert set(holders.holders(files)) == {one for one, held in self.held.items() if files <= held}

        @invariant()
        def nobody_holds_nothing(self) -> None:
            assert holders.holders([]) == []

    Holders.TestCase.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
    Holders.TestCase().runTest()
