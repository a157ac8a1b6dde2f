"""The store beside a plain model of a job's life: several workers, a broker that loses messages, time that leaps.

Every answer of the store is foretold, and Redis's books are compared with the model's. Knows what may happen; the tests
decide what does.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar

import redis

from core.jobs.broker import Envelope
from core.jobs.limits import JobLimits
from core.jobs.record import ARROWS, JobDraft, JobState, ProgressReport
from core.jobs.store import JobStore, QueueFull
from tests.core.jobs import books

# Time passes in leaps of 400 seconds, and no sum of leaps comes nearer than 100 s to anything that is decided by it.
LEASE_S, DEADLINE_S, OVERTIME_S, RESEND_S, SILENCE_S, OFFER_S = 1500, 1000, 500, 900, 500, 1100
LEAPS = (400, 800, 2000)
MAX_ATTEMPTS, MAX_QUEUED = 2, 6
WORKERS = ("ada", "bob", "eve")
NAMES = ("model", "50%:other")
KOMBU = [books.kombu(queue, name) for queue in books.QUEUES for name in NAMES]
FINAL = tuple(state.value for state in JobState if state.final)


@dataclass
class Model:
    """One job as plain Python has it. Times are seconds of leaps."""

    id: str
    queue: str
    name: str  # of the model that it asks for
    work_ms: int
    deadline: float | None
    level: int
    sequence: int
    sent: float
    offered: float = 0.0
    state: str = "queued"
    attempt: int = 0
    lost: int = 0
    priority: int = 5
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

    @property
    def kombu(self) -> str:
        return books.kombu(self.queue, self.name)

    def envelope(self, level: int) -> Envelope:
        return Envelope(self.id, self.queue, level, model=self.name)

    def to(self, state: str, by: str = "") -> None:
        assert (self.state, state) in {(arrow.before, arrow.after) for arrow in ARROWS}
        self.state, self.by = state, by
        self.states.append(state)


class Life:
    """The store and its model, side by side. Each operation draws what it does with `dice`, and checks the answer."""

    # How often a walk takes which.
    OPERATIONS: ClassVar = {
        "create": 8, "send": 8, "lose_unsent": 1, "lose_message": 1, "deliver": 6, "claim_one": 2, "offer": 3,
        "renew": 6, "report": 3, "end_one": 4, "hand_back": 2, "cancel": 1, "erase": 1, "let_pass": 6, "sweep": 6,
    }  # fmt: skip

    def __init__(self, client: redis.Redis, url: str) -> None:
        client.flushall()
        self.client = client
        self.store = JobStore(
            url,
            JobLimits(
                lease_s=LEASE_S,
                max_attempts=MAX_ATTEMPTS,
                max_queued=MAX_QUEUED,
                resend_s=RESEND_S,
                overtime_s=OVERTIME_S,
            ),
        )
        self.now = 0.0
        self.swept: float | None = None
        self.sequence = 0
        self.models: dict[str, Model] = {}
        self.made = 0
        self.unsent: list[Envelope] = []
        self.highest: dict[tuple[str, int], int] = {}
        self.seen: Counter[str] = Counter()  # what came about, so that a test can tell whether it tested anything

    # -- what anybody may do -----------------------------------------------------------------------------------

    def create(self, dice: Random) -> None:
        name = NAMES[self.made % len(NAMES)]
        queue, priority, timed = dice.choice(books.QUEUES), dice.choice([0, 2, 5, 5, 5, 9]), dice.random() < 0.25
        work_ms = dice.choice([0, 1, 2500])
        id = f"job_{self.made}"
        self.made += 1
        draft = JobDraft(id, queue, name, {"prompt": "a fox"}, priority, DEADLINE_S if timed else None, work_ms)
        if sum(m.queue == queue and m.state == "queued" for m in self.models.values()) >= MAX_QUEUED:
            try:
                self.store.create(draft)
            except QueueFull as error:
                assert (error.queue, error.limit) == (queue, MAX_QUEUED)
                self.seen["queue full"] += 1
                return
            raise AssertionError("the queue took more than it may")
        job = self.store.create(draft)
        assert (job.state, job.priority, job.work_ms) == (JobState.QUEUED, priority, work_ms)
        level = max(step for step in books.LEVELS if step <= priority)
        deadline = self.now + DEADLINE_S if timed else None
        self.models[id] = Model(id, queue, name, work_ms, deadline, level, self._next(), self.now, priority=priority)
        again, summary = self.store.create(draft), self.store.lists.summary(id)
        assert again is not None and summary is not None and again.parameters == draft.parameters
        assert replace(again, parameters=summary.parameters) == summary  # nothing happens
        assert self.store.get(id) == job
        self.unsent.append(draft.envelope)

    def send(self, dice: Random) -> None:
        if self.unsent:
            envelope = self.unsent.pop(dice.randrange(len(self.unsent)))
            level = max(step for step in books.LEVELS if step <= envelope.priority)
            books.push(self.client, envelope.kombu_queue, level, envelope.id)

    def lose_unsent(self, dice: Random) -> None:
        if self.unsent:
            self.unsent.pop(dice.randrange(len(self.unsent)))

    def lose_message(self, dice: Random) -> None:
        books.pop(self.client, dice.choice(KOMBU))

    def deliver(self, dice: Random) -> None:
        queue = dice.choice(books.QUEUES)  # a worker of all models
        for id in (books.pop(self.client, books.kombu(queue, name)) for name in NAMES):
            if id is not None:
                self.claim(id, dice.choice(WORKERS))
                return

    def claim_one(self, dice: Random) -> None:
        self.claim(self._pick(dice, "queued"), dice.choice(WORKERS))

    def claim(self, id: str, worker: str) -> None:
        claim, model = self.store.leases.claim(id, worker), self.models.get(id)
        if model is None or model.state != "queued":
            assert claim is None
            self.seen[f"claim of {model.state if model else None}"] += 1
            return
        if model.deadline is not None and model.deadline <= self.now:
            assert claim is None
            self._expire(model)
            self.seen["claim too late"] += 1
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
        key = model.kombu, model.level
        self.highest[key] = max(self.highest.get(key, 0), model.sequence)
        assert self.store.leases.glance(id)[1] is model.suspect

    def offer(self, dice: Random) -> None:
        id = self._pick(dice, "queued")
        model = self.models.get(id)
        to = Envelope(id, model.queue if model else "image", model.level if model else 5, dice.choice(WORKERS))
        queued = model is not None and model.state == "queued"
        assert self.store.leases.offer({to: "a message"}, OFFER_S) is queued
        if queued and model is not None:
            model.offered = self.now + OFFER_S
            own = f"{to.queue}@{to.to}:{model.level}".removesuffix(":0")
            assert self.client.lindex(own, 0) == "a message" and 0 < self.client.pttl(own) <= 1000 * OFFER_S

    def renew(self, dice: Random) -> None:
        worker, held = dice.choice(WORKERS), {}
        for id in {self._pick(dice, "running") for _ in range(dice.randrange(4))}:
            attempt = self.models[id].attempt if id in self.models else 1
            held[id] = attempt + dice.choice([0, 0, 0, 0, -1, 1])
        stale = self.store.leases.renew(worker, held)
        for id, attempt in held.items():
            model = self.models.get(id)
            ours = model is not None and (model.state, model.worker, model.attempt) == ("running", worker, attempt)
            assert (id in stale) is not ours
            if ours and model is not None:
                model.lease, model.graced = self.now + LEASE_S, False
                self.seen["renewed"] += 1

    def report(self, dice: Random) -> None:
        items = []
        for _ in range(dice.randrange(4)):
            id = self._pick(dice, "running")
            attempt = self.models[id].attempt if id in self.models else 1
            items.append(ProgressReport(id, attempt - dice.choice([0, 0, 0, 1]), {"steps_done": dice.randrange(100)}))
        stale = self.store.leases.report(items).stale
        expected = set()
        for item in items:
            model = self.models.get(item.id)
            if model is not None and (model.state, model.attempt) == ("running", item.attempt):
                model.progress = item.data
                model.states.append("progress")
            else:
                expected.add(item.id)
        assert stale == expected

    def end_one(self, dice: Random) -> None:
        id, back, ways = self._pick(dice, "running"), dice.choice([0, 0, 1]), ["succeed", "fail", "expire"]
        self.end(id, back, dice.choice(ways), dice.random() < 0.3)
        if dice.random() < 0.5:  # and somebody who does not know it
            self.end(id, dice.choice([back, 0]), dice.choice(ways), False)

    def end(self, id: str, back: int, how: str, twice: bool) -> None:
        model = self.models.get(id)
        attempt = (model.attempt if model else 1) - back
        state = {"succeed": "succeeded", "fail": "failed", "expire": "expired"}[how]
        ours = model is not None and model.attempt == attempt
        for _ in range(1 + twice):
            if how == "succeed":
                ended = self.store.leases.succeed(id, attempt, {"images": [attempt]})
            elif how == "fail":
                ended = self.store.leases.fail(id, attempt, "refused", "steps: too many")
            else:
                ended = self.store.leases.expire(id, attempt)
            if model is not None and ours and model.state == "running":
                assert ended
                model.to(state, "worker")
                model.result = {"images": [attempt]} if how == "succeed" else None
                model.code = {"succeed": None, "fail": "refused", "expire": "expired"}[how]
                self.seen[state] += 1
            else:  # refused, unless it is what this attempt has said before
                self.seen[f"{how} of {model.state if model else None}, {back} back: {ended}"] += 1
                assert ended is (model is not None and ours and (model.state, model.by) == (state, "worker"))

    def hand_back(self, dice: Random) -> None:
        id = self._pick(dice, "running")
        model = self.models.get(id)
        attempt = (model.attempt if model else 1) - dice.choice([0, 0, 1])
        envelope = self.store.leases.hand_back(id, attempt)
        if model is not None and model.attempt == attempt and model.state == "running":
            self._queue(model, "worker")
            assert envelope == model.envelope(0)
        elif model is not None and model.attempt == attempt and (model.state, model.by) == ("queued", "worker"):
            assert envelope == model.envelope(0)  # said again
        else:
            assert envelope is None
            self.seen[f"handed back {model.state if model else None}: refused"] += 1
        if envelope is not None:
            self.unsent.append(envelope)

    def cancel(self, dice: Random) -> None:
        id = self._pick(dice, "running")
        told = {worker: self.client.xlen(f"diptych:control:{worker}") for worker in WORKERS}
        job, model = self.store.cancel(id), self.models.get(id)
        if model is None:
            assert job is None
            return
        running = model.state == "running"
        self.seen[f"cancel of {model.state}"] += 1
        if model.live:
            model.to("cancelled")
        assert job == self.store.lists.summary(id)
        for worker in WORKERS:
            due = running and worker == model.worker
            assert self.client.xlen(f"diptych:control:{worker}") == told[worker] + due

    def erase(self, dice: Random) -> None:
        """Whatever was under way with it, a message that waits included, comes to nothing."""
        id = self._pick(dice, dice.choice(["queued", "running", "succeeded"]))
        model = self.models.pop(id, None)
        assert self.store.erase(id) is (model is not None)
        assert self.store.get(id) is self.store.standing(id) is None and not self.store.leases.glance(id)[1]
        if model is not None:
            self.seen[f"erase of {model.state}"] += 1
            assert not self.store.leases.succeed(id, model.attempt, {})

    def let_pass(self, dice: Random) -> None:
        self.pass_time(dice.choice(LEAPS))

    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        books.age(self.client, seconds)

    def sweep(self, dice: Random | None = None) -> None:
        places = [(queue, level) for queue in KOMBU for level in books.LEVELS]
        with self.client.pipeline(transaction=False) as pipe:
            for queue, level in places:
                pipe.exists(f"{queue}:{level}" if level else queue)
            empty = {place: not there for place, there in zip(places, pipe.execute(), strict=True)}
        sweep = self.store.upkeep.sweep(1000)
        if self.swept is not None and self.now - self.swept > SILENCE_S:
            for model in self._in("running"):
                if model.lease <= self.now + LEASE_S and not model.graced:
                    model.lease, model.graced = self.now + LEASE_S, True
                    self.seen["graced"] += 1
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
        levels = {id: 0 if id in lost else self.models[id].level for id in (e.id for e in sweep.send)}
        assert sweep.send == [self.models[e.id].envelope(levels[e.id]) for e in sweep.send]
        assert len({envelope.id for envelope in sweep.send}) == len(sweep.send) == len(lost) + len(resent)
        for model in self._in("queued"):
            key = model.kombu, model.level
            old = self.now - model.sent >= RESEND_S and self.now >= model.offered
            self.seen["kept back while on offer"] += empty[key] and self.now - model.sent >= RESEND_S and not old
            if model.id in resent:
                self.seen[f"sent again, {'none' if empty[key] else 'later ones'} there"] += 1
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
            model.sequence, model.sent = self._next(), self.now
        self.unsent.extend(sweep.send)
        self.seen.update({"swept expired": len(expired), "swept failed": len(failed), "swept lost": len(lost)})

    # -- what always holds -------------------------------------------------------------------------------------

    def agrees(self) -> None:
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
            assert [type for type, _ in now.streams[id]] == model.states and record["priority"] == str(model.priority)
            if model.state == "queued":
                reasons = {"": None, "worker": "handed_back", "sweep": "worker_lost"}
                assert now.streams[id][-1][1].get("reason") == reasons[model.by]
            told = {name: json.loads(record[name]) for name in ("progress", "result", "error") if name in record}
            assert (told.get("progress"), told.get("result")) == (model.progress, model.result)
            assert told.get("error", {}).get("code") == model.code
            assert ("ended" in record) is not model.live
            assert ("started" in record) is (model.attempt > 0 and model.state != "queued" and model.worker != "")

    def drain(self) -> None:
        """Nothing is lost: with a broker that works and a worker that lives every job comes to its end."""
        for _ in range(8):
            self.pass_time(2000)  # longer than any lease: whoever held something is dead
            self.sweep()
            while self.unsent:
                envelope = self.unsent.pop()
                books.push(self.client, envelope.kombu_queue, 0, envelope.id)
            for queue in KOMBU:
                while (id := books.pop(self.client, queue)) is not None:
                    self.claim(id, "zoe")
                    model = self.models.get(id)  # none: it was erased, and its message came all the same
                    if model is not None and model.state == "running" and model.worker == "zoe":
                        self.end(id, 0, "succeed", False)
            self.agrees()
        assert all(model.state in FINAL for model in self.models.values())
        ended = [f"{kind}:{queue}*" for kind in ("diptych:sent", "diptych:mark") for queue in KOMBU]
        assert not [key for name in ended for key in self.client.scan_iter(name, 1000)], "nothing is kept of a model"
        assert not self.client.exists(*KOMBU, *(f"diptych:backlog:{queue}" for queue in KOMBU))
        assert all(model.states.count(model.state) == 1 for model in self.models.values())

    def close(self) -> None:
        self.store.close()

    # -- the model's own ---------------------------------------------------------------------------------------

    def _in(self, state: str) -> list[Model]:
        return [model for model in self.models.values() if model.state == state]

    def _pick(self, dice: Random, state: str) -> str:
        """Most likely a job in this state, but any other too."""
        fitting = [model.id for model in self._in(state)]
        return dice.choice(fitting if fitting and dice.random() < 0.8 else [*self.models, "job_of_nobody"])

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _expire(self, model: Model) -> None:
        model.to("expired")
        model.code = "expired"

    def _queue(self, model: Model, by: str) -> None:
        model.to("queued", by)
        model.worker, model.progress = "", None
        model.level, model.sequence, model.sent, model.offered = 0, self._next(), self.now, 0.0
