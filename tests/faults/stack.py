"""Runs the whole service as real processes on this machine (Redis, an API, workers), for fault injection.

scenarios.py injects the faults.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis

from core.config import Settings
from core.jobs import keys
from core.jobs.cards import WorkerCard
from core.jobs.record import JobState
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from deployment.address import listen, url
from deployment.redis import RedisServer
from tests.faults.client import PATIENCE_S, Client, Order, patiently
from tests.faults.parts import Part, wait_for
from tests.faults.site import Site
from tests.forks import API, REAL, WORKER

START_S = 180.0  # a worker imports torch and makes a model, maybe beside others on one core
_MEASURED = 50  # steps
NICENESS = 10  # of workers, as `diptych serve` has it

FINAL = {state.value for state in JobState if state.final}


class Entry(NamedTuple):
    """One entry of a job's stream. `at` is when Redis wrote it, in seconds since the epoch on its clock."""

    at: float
    type: str
    data: dict[str, Any]


@dataclass(eq=False)
class Stack(Site):
    """Starts on `with`, and leaves no process behind, however that ends.

    `switches` go to every worker's entry, `settings` (names without DIPTYCH_) to every part. With `preload` parts are
    forked from processes that have imported what they need, where how long a start takes is of no interest.
    """

    folder: Path
    workers: int = 2
    niceness: int = NICENESS
    switches: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    preload: bool = False

    def _start(self) -> None:
        self._step_s = 0.0
        self.parts = []
        self.redis = RedisServer(self.folder / "redis")
        self.redis.start()
        assert self.redis.process is not None
        self.guard.watch(self.redis.process.pid)
        self.listener = listen("127.0.0.1", 0)
        self._closing.append(self.listener)
        self.data = self.folder / "data"
        given = {
            "redis_url": self.redis.url, "data_dir": str(self.data),
            "model": "random:tiny", "compile": "false", "threads": "1", "image_jobs": "4", **self.settings,
        }  # fmt: skip
        environment = {f"DIPTYCH_{name.upper()}": value for name, value in given.items()}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        logs = self.folder / "logs"
        descriptor = self.listener.fileno()
        api = [sys.executable, "-m", "tests.faults.fragile", "--fd", str(descriptor)]
        of_api, of_workers = (API, REAL if "--real" in self.switches else WORKER) if self.preload else ((), ())
        self.api = Part(
            "api", api, environment, logs / "api.log", self.guard, descriptors=(descriptor,), preload=of_api
        )  # fmt: skip
        worker = [sys.executable, "-m", "tests.workers.stage", *self.switches]
        self.crew = [
            Part(
                f"worker-{k}",
                worker,
                environment,
                logs / f"worker-{k}.log",
                self.guard,
                niceness=self.niceness,
                preload=of_workers,
            )
            for k in range(self.workers)
        ]
        self.parts = [*self.crew, self.api]  # the workers take longest
        settings = Settings.model_validate(given)
        self.lease_s, self.max_attempts = settings.lease_s, settings.max_attempts
        self.store = JobStore.of(settings)
        self.registry = Registry.of(settings)
        self.client = Client(url(self.listener))
        self.keys: Any = redis.Redis.from_url(self.redis.url, decode_responses=True, socket_timeout=PATIENCE_S)
        self._closing += [self.store, self.registry, self.client, self.keys]
        for part in self.parts:
            part.start()
        self.settle(START_S)

    def close(self) -> None:
        """End everything, without asking."""
        for part in self.parts:
            part.kill()
        self.redis.kill()
        for one in self._closing:
            one.close()
        self.guard.close()

    # -- keeping it up ---------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Start again what has ended, as a supervisor would."""
        for part in self.parts:
            if not part.running:
                part.start()

    def settle(self, timeout_s: float = START_S) -> None:
        """Wait until every part runs and says that it is ready."""

        def ready() -> bool:
            self.tend()
            live = {card.pid for card in self.cards() if card.state == "ready"}
            return {part.pid for part in self.crew} <= live and self.client.ready()

        wait_for("every part is ready", ready, timeout_s, every_s=0.1)

    def stop_redis(self, how: str) -> None:
        """`how`: "kill" as a power cut would, or "stop" in good order."""
        assert self.redis.process is not None
        pid = self.redis.process.pid
        if how == "kill":
            self.redis.kill()
        else:
            self.redis.stop()
        self.guard.forget(pid)

    def start_redis(self) -> None:
        self.redis.start()
        assert self.redis.process is not None
        self.guard.watch(self.redis.process.pid)

    def step_s(self) -> float:
        """Seconds that one step of one deterministic picture takes, alone. Measured when it is asked for first."""
        if not self._step_s:
            for _ in range(2):  # the first time warms up
                id = patiently(lambda: self.client.submit(Order("a metronome", steps=_MEASURED)))
                wait_for("a job to measure by has ended", lambda id=id: self.states([id])[id][0] in FINAL, START_S)  # type: ignore[misc]
                job = patiently(lambda id=id: self.store.get(id))  # type: ignore[misc]
            assert job is not None and job.result is not None
            self._step_s = job.result["engine_s"] / _MEASURED
        return self._step_s

    # -- looking at it ---------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Redis's clock, which stamps records and streams."""
        seconds, microseconds = self.keys.time()
        return float(seconds + microseconds / 1e6)

    def cards(self) -> list[WorkerCard]:
        try:
            return self.registry.workers()
        except RuntimeError:
            return []

    def stream(self, id: str) -> list[Entry]:
        """All that was ever said of a job."""
        return [
            Entry(int(at.partition("-")[0]) / 1000, fields["type"], json.loads(fields["data"]))
            for at, fields in self.keys.xrange(keys.events(id))
        ]

    def states(self, ids: list[str]) -> dict[str, tuple[str, str]]:
        """(state, worker) of each job that has a record, read in one round trip."""
        with self.keys.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hmget(keys.job(id), "state", "worker")
            found = pipeline.execute()
        return {id: (state, worker or "") for id, (state, worker) in zip(ids, found, strict=True) if state}

    def running_on(self, part: Part, ids: list[str]) -> list[str]:
        """Which of these jobs the worker runs now."""
        names = {card.id for card in self.cards() if card.pid == part.pid}
        return [id for id, (state, worker) in self.states(ids).items() if state == "running" and worker in names]
