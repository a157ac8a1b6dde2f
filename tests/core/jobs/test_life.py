"""The life of jobs against a plain model: several workers, a broker that loses messages, time that passes in leaps.

Every answer of the store is foretold; after every step Redis's books are checked; in the end every job ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from core.jobs.broker import Envelope
from core.jobs.record import Draft, JobState, Report
from core.jobs.store import JobStore, QueueFull
from tests.core.jobs import books

# Time passes in leaps of 400 seconds, and no sum of leaps comes nearer than 100 s to anything that is decided by it.
LEASE_S, DEADLINE_S, OVERTIME_S, RESEND_S, SILENCE_S = 1500, 1000, 500, 900, 500
LEAPS = (400, 800, 2000)
MAX_ATTEMPTS, MAX_QUEUED = 2, 4
WORKERS = ("ada", "bob", "eve")
FINAL = ("succeeded", "failed", "cancelled", "expired")


@dataclass
class Model:
    """One job as plain Python has it. Times are seconds of leaps."""

    id: str
    queue: str
    work_ms: int
    deadline: float | None
    level: int
    sequence: int
    sent: float
    state: str = "queued"
    attempt: int = 0
    lost: int = 0
    worker: str = ""
    suspect: bool = False
    lease: float = 0.0
    graced: bool = False
    progress: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    code: str | None = None
    by: str = ""
    states: list[str] = field(default_factory=lambda: ["queued"])

    @property
    def live(self) -> bool:
        return self.state in ("queued", "running")

    def to(self, state: str, by: str = "") -> None:
        self.state, self.by = state, by
        self.states.append(state)


class Life(RuleBasedStateMachine):
    jobs = Bundle("jobs")
    client: redis.Redis
    store: JobStore

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.now = 0.0
        self.swept: float | None = None
        self.sequence = 0
        self.models: dict[str, Model] = {}
        self.unsent: list[Envelope] = []
        self.highest: dict[tuple[str, int], int] = {}

    # -- what anybody may do -----------------------------------------------------------------------------------

    @rule(
        target=jobs,
        queue=st.sampled_from(books.QUEUES),
        priority=st.integers(0, 9),
        timed=st.booleans(),
        work_ms=st.sampled_from([0, 1, 2500]),
    )
    def create(self, queue: str, priority: int, timed: bool, work_ms: int) -> str:
        id = f"job_{len(self.models)}"
        draft = Draft(id, queue, "model", {"prompt": "a fox"}, priority, DEADLINE_S if timed else None, work_ms)
        if sum(m.queue == queue and m.state == "queued" for m in self.models.values()) >= MAX_QUEUED:
            try:
                self.store.create(draft)
            except QueueFull as error:
                assert (error.queue, error.limit) == (queue, MAX_QUEUED)
                return "job_of_nobody"
            raise AssertionError("the queue took more than it may")
        job = self.store.create(draft)
        assert (job.state, job.priority, job.work_ms) == (JobState.QUEUED, priority, work_ms)
        level = max(step for step in books.LEVELS if step <= priority)
        deadline = self.now + DEADLINE_S if timed else None
        self.models[id] = Model(id, queue, work_ms, deadline, level, self._next(), self.now)
        assert self.store.create(draft) == job  # again: nothing happens
        self.unsent.append(Envelope(id, queue, priority))
        return id

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        if self.unsent:
            envelope = self.unsent.pop(data.draw(st.integers(0, len(self.unsent) - 1)))
            level = max(step for step in books.LEVELS if step <= envelope.priority)
            books.push(self.client, envelope.queue, level, envelope.id)

    @rule(data=st.data())
    def lose_unsent(self, data: st.DataObject) -> None:
        if self.unsent:
            self.unsent.pop(data.draw(st.integers(0, len(self.unsent) - 1)))

    @rule(queue=st.sampled_from(books.QUEUES))
    def lose_message(self, queue: str) -> None:
        books.pop(self.client, queue)

    @rule(queue=st.sampled_from(books.QUEUES), worker=st.sampled_from(WORKERS))
    def deliver(self, queue: str, worker: str) -> None:
        id = books.pop(self.client, queue)
        if id is not None:
            self.claim(id, worker)

    @rule(id=jobs, worker=st.sampled_from(WORKERS))
    def claim(self, id: str, worker: str) -> None:
        claim, model = self.store.claim(id, worker), self.models.get(id)
        if model is None or model.state != "queued":
            assert claim is None
            return
        if model.deadline is not None and model.deadline <= self.now:
            assert claim is None
            self._expire(model)
            return
        assert claim is not None
        model.attempt += 1
        assert (claim.id, claim.attempt, claim.suspect) == (id, model.attempt, model.suspect)
        if model.deadline is None:
            assert claim.deadline_left_s is None
        else:
            assert claim.deadline_left_s is not None
            assert abs(claim.deadline_left_s - (model.deadline - self.now)) < 90
        model.to("running")
        model.worker, model.lease, model.graced = worker, self.now + LEASE_S, False
        key = model.queue, model.level
        self.highest[key] = max(self.highest.get(key, 0), model.sequence)
        assert self.store.suspect(id) is model.suspect

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def renew(self, worker: str, data: st.DataObject) -> None:
        held = {}
        for id in data.draw(st.sets(st.sampled_from([*self.models, "job_of_nobody"]))):
            attempt = self.models[id].attempt if id in self.models else 1
            held[id] = attempt + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
        stale = self.store.renew(worker, held)
        for id, attempt in held.items():
            model = self.models.get(id)
            ours = model is not None and (model.state, model.worker, model.attempt) == ("running", worker, attempt)
            assert (id in stale) is not ours
            if ours and model is not None:
                model.lease, model.graced = self.now + LEASE_S, False

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        items = []
        for id in data.draw(st.lists(st.sampled_from([*self.models, "job_of_nobody"]), max_size=3)):
            attempt = self.models[id].attempt if id in self.models else 1
            said = {"steps_done": data.draw(st.integers(0, 99))}
            items.append(Report(id, data.draw(st.integers(max(0, attempt - 1), attempt)), said))
        stale = self.store.report(items)
        expected = set()
        for item in items:
            model = self.models.get(item.id)
            if model is not None and (model.state, model.attempt) == ("running", item.attempt):
                model.progress = item.data
                model.states.append("progress")
            else:
                expected.add(item.id)
        assert stale == expected

    @rule(
        id=jobs,
        back=st.sampled_from([0, 0, 0, 1]),
        how=st.sampled_from(["succeed", "fail", "expire"]),
        twice=st.booleans(),
    )
    def end(self, id: str, back: int, how: str, twice: bool) -> None:
        model = self.models.get(id)
        attempt = (model.attempt if model else 1) - back
        state = {"succeed": "succeeded", "fail": "failed", "expire": "expired"}[how]
        ours = model is not None and model.attempt == attempt
        for _ in range(1 + twice):
            if how == "succeed":
                ended = self.store.succeed(id, attempt, {"images": [attempt]})
            elif how == "fail":
                ended = self.store.fail(id, attempt, "refused", "steps: too many")
            else:
                ended = self.store.expire(id, attempt)
            if model is not None and ours and model.state == "running":
                assert ended
                model.to(state, "worker")
                model.result = {"images": [attempt]} if how == "succeed" else None
                model.code = {"succeed": None, "fail": "refused", "expire": "expired"}[how]
            else:  # refused, unless it is what this attempt has said before
                assert ended is (model is not None and ours and (model.state, model.by) == (state, "worker"))

    @rule(id=jobs, back=st.sampled_from([0, 0, 1]))
    def hand_back(self, id: str, back: int) -> None:
        model = self.models.get(id)
        attempt = (model.attempt if model else 1) - back
        envelope = self.store.hand_back(id, attempt)
        if model is not None and model.attempt == attempt and model.state == "running":
            self._queue(model, "worker")
            assert envelope == Envelope(id, model.queue, 0)
        elif model is not None and model.attempt == attempt and (model.state, model.by) == ("queued", "worker"):
            assert envelope == Envelope(id, model.queue, 0)  # said again
        else:
            assert envelope is None
        if envelope is not None:
            self.unsent.append(envelope)

    @rule(id=jobs)
    def cancel(self, id: str) -> None:
        told = {worker: self.client.xlen(f"diptych:control:{worker}") for worker in WORKERS}
        job, model = self.store.cancel(id), self.models.get(id)
        if model is None:
            assert job is None
            return
        running = model.state == "running"
        if model.live:
            model.to("cancelled")
        assert job == self.store.get(id)
        for worker in WORKERS:
            due = running and worker == model.worker
            assert self.client.xlen(f"diptych:control:{worker}") == told[worker] + due

    @rule(seconds=st.sampled_from(LEAPS))
    def let_pass(self, seconds: int) -> None:
        self.now += seconds
        books.age(self.client, seconds)

    @rule()
    def sweep(self) -> None:
        empty = {
            (queue, level): not self.client.exists(f"{queue}:{level}" if level else queue)
            for queue in books.QUEUES
            for level in books.LEVELS
        }
        sweep = self.store.sweep(1000)
        if self.swept is not None and self.now - self.swept > SILENCE_S:
            for model in self._in("running"):
                if model.lease < self.now + LEASE_S and not model.graced:
                    model.lease, model.graced = self.now + LEASE_S, True
        self.swept = self.now
        expired, failed, lost = set(), set(), set()
        for model in [*self._in("queued"), *self._in("running")]:
            over_s = OVERTIME_S if model.state == "running" else 0
            if model.deadline is not None and model.deadline + over_s <= self.now:
                self._expire(model)
                expired.add(model.id)
        for model in self._in("running"):
            if model.lease <= self.now:
                model.lost, model.suspect = model.lost + 1, True
                if model.lost >= MAX_ATTEMPTS:
                    model.to("failed")
                    model.code = "crashed"
                    failed.add(model.id)
                else:
                    lost.add(model.id)
        resent = [envelope.id for envelope in sweep.send if envelope.id not in lost]
        assert (set(sweep.expired), set(sweep.failed)) == (expired, failed)
        assert sweep.send == [Envelope(e.id, self.models[e.id].queue, 0) for e in sweep.send]
        assert len({envelope.id for envelope in sweep.send}) == len(sweep.send) == len(lost) + len(resent)
        for model in self._in("queued"):
            key = model.queue, model.level
            old = self.now - model.sent >= RESEND_S
            if model.id in resent:
                assert old and (empty[key] or model.sequence < self.highest.get(key, 0))
            else:
                assert not (old and empty[key])
        for envelope in sweep.send:
            model = self.models[envelope.id]
            if envelope.id in lost:
                self._queue(model, "sweep")
        for id in resent:
            model = self.models[id]
            assert model.state == "queued"
            model.level, model.sequence, model.sent = 0, self._next(), self.now
        self.unsent.extend(sweep.send)

    # -- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "models"):
            return
        now = books.Books.of(self.client)
        now.check()
        assert set(now.records) == set(self.models)
        for id, model in self.models.items():
            record = now.records[id]
            assert (record["state"], int(record["attempt"]), int(record["lost"])) == (
                model.state,
                model.attempt,
                model.lost,
            )
            assert (record.get("worker", ""), record.get("suspect") == "1") == (model.worker, model.suspect)
            assert [type for type, _ in now.streams[id]] == model.states
            job = self.store.get(id)
            assert job is not None
            assert (job.progress, job.result) == (model.progress, model.result)
            assert (job.error or {}).get("code") == model.code
            assert (job.ended is None) is model.live
            assert (self.client.pttl(f"diptych:job:{id}") > 0) is not model.live
            assert (self.client.pttl(f"diptych:events:{id}") > 0) is not model.live

    def teardown(self) -> None:
        """Nothing is lost: with a broker that works and a worker that lives every job comes to its end."""
        if not hasattr(self, "models"):
            return
        for _ in range(8):
            self.let_pass(2000)  # longer than any lease: whoever held something is dead
            self.sweep()
            while self.unsent:
                envelope = self.unsent.pop()
                books.push(self.client, envelope.queue, 0, envelope.id)
            for queue in books.QUEUES:
                while (id := books.pop(self.client, queue)) is not None:
                    self.claim(id, "zoe")
                    if self.models[id].state == "running" and self.models[id].worker == "zoe":
                        self.end(id, 0, "succeed", False)
            self.agrees()
        assert all(model.state in FINAL for model in self.models.values())
        assert all(model.states.count(model.state) == 1 for model in self.models.values())

    # -- the model's own ---------------------------------------------------------------------------------------

    def _in(self, state: str) -> list[Model]:
        return [model for model in self.models.values() if model.state == state]

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _expire(self, model: Model) -> None:
        model.to("expired")
        model.code = "expired"

    def _queue(self, model: Model, by: str) -> None:
        model.to("queued", by)
        model.worker, model.progress = "", None
        model.level, model.sequence, model.sent = 0, self._next(), self.now


def test_life(client: redis.Redis, redis_url: str) -> None:
    store = JobStore(
        redis_url,
        lease_s=LEASE_S,
        max_attempts=MAX_ATTEMPTS,
        max_queued=MAX_QUEUED,
        resend_s=RESEND_S,
        overtime_s=OVERTIME_S,
    )

    class Here(Life):
        pass

    Here.client, Here.store = client, store
    run_state_machine_as_test(Here, settings=settings(max_examples=settings().max_examples, stateful_step_count=40))
    store.close()
