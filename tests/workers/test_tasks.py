"""Tasks on the test's own threads, with a real store and engine: what no process from outside can be made to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from core.batching.engine import Engine
from core.batching.runner import Lane
from core.jobs.broker import Envelope
from core.jobs.connection import RedisClient, StoreDown
from core.jobs.leases import JobLeases
from core.jobs.limits import JobLimits
from core.jobs.record import Claim, JobState
from core.jobs.store import JobStore
from tests.workers.crew import PATIENCE_S, Crew, eventually
from tests.workers.desk import Tasks
from tests.workers.stage import StagePictures, StageRunner


class Flaky(JobLeases):
    """Leases whose answers to claims can be lost, after the claim was made."""

    lose = 0
    before_claim: Callable[[str], object] = staticmethod(lambda id: None)

    def claim(self, id: str, worker: str) -> Claim | None:
        self.before_claim(id)
        claim = super().claim(id, worker)
        if self.lose:
            self.lose -= 1
            raise StoreDown("Redis does not answer")
        return claim


class Scene(Tasks):
    def __init__(self, crew: Crew) -> None:
        store, self._client, self._lane = JobStore(crew.url), RedisClient.at(crew.url), Lane()
        self.leases = store.leases = Flaky(self._client, JobLimits())
        engine = Engine([StageRunner("image", self._lane, 0.005, 4, lambda event, request: None)])
        super().__init__(crew, store, engine, {"stage": StagePictures(0.005)})

    def start(self, id: str) -> threading.Thread:
        thread = threading.Thread(target=self.run, args=[id], daemon=True)
        thread.start()
        return thread

    def ended(self, thread: threading.Thread) -> bool:
        thread.join(PATIENCE_S)
        return not thread.is_alive()

    def close(self) -> None:
        super().close()
        self.engine.close()
        self._lane.close()
        self._client.close()


@pytest.fixture
def scene(crew: Crew) -> Iterator[Scene]:
    scene = Scene(crew)
    yield scene
    scene.close()
    assert not scene.active_jobs.works()


def test_the_engine_knows_whose_requests_are(crew: Crew, scene: Scene) -> None:
    tenants: list[str] = []
    submit = scene.engine.submit
    scene.engine.submit = lambda request: tenants.append(request.tenant) or submit(request)  # type: ignore
    for owner in ("key_ann", ""):
        scene.run(crew.make(owner=owner, n=2))
    assert tenants == ["key_ann", "key_ann", "", ""]


def test_a_claim_whose_answer_was_lost_is_handed_back_at_no_cost(crew: Crew, scene: Scene) -> None:
    id = crew.make()
    scene.leases.lose = 2  # the second one finds the first one's work, and says None
    scene.run(id)
    assert scene.sent == [Envelope(id, "image", 0, model="stage")]
    assert (crew.job(id).state, crew.job(id).lost) == (JobState.QUEUED, 0)
    scene.run(id)
    assert (crew.job(id).state, crew.job(id).attempt) == (JobState.SUCCEEDED, 2)


def test_a_lost_answer_about_a_job_of_others_changes_nothing(crew: Crew, scene: Scene) -> None:
    id = crew.make()
    crew.store.leases.claim(id, "another")
    scene.leases.lose = 1
    scene.run(id)
    assert not scene.sent and (crew.job(id).state, crew.job(id).worker) == (JobState.RUNNING, "another")


def test_a_job_that_becomes_suspect_on_the_way_is_not_run_in_company(crew: Crew, scene: Scene) -> None:
    id = crew.make()
    scene.leases.before_claim = lambda id: crew.redis.hset(f"diptych:job:{id}", "suspect", "1")
    scene.run(id)
    assert scene.sent == [Envelope(id, "image", 0, model="stage")]
    assert crew.job(id).state is JobState.QUEUED
    scene.run(id)
    assert crew.job(id).state is JobState.SUCCEEDED


def test_what_another_handed_back_just_now_is_not_drawn_by_the_wrong_model(crew: Crew, scene: Scene) -> None:
    id = crew.make(model="another")
    claim = crew.store.leases.claim(id, "another's worker")
    assert claim is not None
    scene.leases.before_claim = lambda id: crew.store.leases.hand_back(id, 1)
    scene.run(id)
    assert scene.sent == [Envelope(id, "image", 0, model="another")]
    assert (crew.job(id).state, crew.job(id).lost) == (JobState.QUEUED, 0)


def test_a_draining_worker_claims_nothing(crew: Crew, scene: Scene) -> None:
    id = crew.make()
    scene.tasks.drain()
    scene.run(id)
    assert scene.sent == [Envelope(id, "image", 5, model="stage")] and crew.job(id).attempt == 0


def test_a_job_that_is_claimed_while_draining_begins_is_handed_back(crew: Crew, scene: Scene) -> None:
    id = crew.make(steps=1000)
    scene.leases.before_claim = lambda id: scene.tasks.drain()
    scene.run(id)
    assert scene.sent == [Envelope(id, "image", 0, model="stage")]
    assert (crew.job(id).state, crew.job(id).attempt, crew.job(id).lost) == (JobState.QUEUED, 1, 0)


def test_everything_can_be_handed_back_without_its_threads(crew: Crew, scene: Scene) -> None:
    ids = [crew.make(steps=1000) for _ in range(3)]
    threads = [scene.start(id) for id in ids]
    for id in ids:
        crew.running(id)
    scene.tasks.hand_back_all()
    assert {envelope.id for envelope in scene.sent} == set(ids)
    assert [crew.job(id).state for id in ids] == [JobState.QUEUED] * 3
    scene.engine.drain(0)
    assert all(map(scene.ended, threads))
    assert len(scene.sent) == 3  # what the threads found out later was refused


def test_what_an_engine_that_broke_says_is_not_written(crew: Crew, scene: Scene) -> None:
    """It goes to another worker by way of its lease."""
    id = crew.make(steps=1000)
    thread = scene.start(id)
    crew.running(id)
    scene.engine._scheduler.schedule = lambda now: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    assert scene.ended(thread) and crew.job(id).state is JobState.RUNNING and not scene.sent


def test_an_error_of_its_own_is_logged_and_raises_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.leases.before_claim = lambda id: 1 / 0
    scene.run("job_x")
    assert "internal error of this worker" in caplog.text
    assert scene.shared_lock.enter(alone=True)  # it has left the gate


def test_a_job_that_nobody_wants_any_more_keeps_no_pictures(crew: Crew, scene: Scene) -> None:
    id = crew.make(steps=3, prompt="STEP=0.05")
    thread = scene.start(id)
    crew.running(id)
    crew.store.cancel(id)
    eventually(lambda: id in scene.active_jobs)
    scene.active_jobs.abandon(id)
    assert scene.ended(thread) and crew.job(id).state is JobState.CANCELLED
    assert not [path for path in (crew.folder / "artifacts").rglob("*") if path.is_file()]
