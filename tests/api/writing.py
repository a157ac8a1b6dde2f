"""A worker of texts for the tests of the API: all its real parts, with messages taken from Celery's lists by hand."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import redis

from core.artifacts import Artifacts
from core.batching.engine import Engine
from core.config import Settings
from core.jobs.broker import PRIORITY_STEPS, Envelope, list_key, model_queue
from core.jobs.cards import WorkerCard
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from llm.checkpoints.load import TextModel
from llm.runner import TextRunner
from tests.api.world import Api
from tests.llm import stage
from workers.claims.active_jobs import ActiveJobs
from workers.claims.control import ControlListener
from workers.claims.publisher import ProgressPublisher
from workers.claims.shared_lock import SharedLock
from workers.claims.store_retry import StoreRetry
from workers.tasks import WorkerTasks
from workers.text.handler import TextJobHandler
from workers.text.loras import TextLoraFolder

NAME = "worker-of-texts"


@contextmanager
def written(settings: Settings, *models: TextModel) -> Iterator[Api]:
    """An API, and a worker of each of these models."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(TextWorker(settings, model, name=model.name, kernels=stage.kernels()))
        yield stack.enter_context(Api(settings))


class TextWorker:
    """Serves the text queue with one model until it is left."""

    def __init__(
        self, settings: Settings, model: TextModel, *, name: str = NAME, loras: Path | None = None, **options: Any
    ) -> None:
        self.name = name
        self.runner = TextRunner(model, **options)
        if loras is not None:
            self.runner.adapters = TextLoraFolder(loras, self.runner.execution, 2**26)
        self.engine = Engine([self.runner])
        self.handler = TextJobHandler(self.runner)
        self._store, self._registry = JobStore.of(settings), Registry.of(settings)
        self._redis: redis.Redis = redis.Redis.from_url(settings.redis_url, decode_responses=True)
        store_retry, active_jobs = StoreRetry(), ActiveJobs()
        self._publisher = ProgressPublisher(
            self._store.leases, store_retry, lambda: self.engine.ticks, active_jobs.abandon
        )
        self._control = ControlListener(self._registry, store_retry, name, active_jobs.abandon)
        self._tasks = WorkerTasks(
            name, self._store, store_retry, SharedLock(on_change=lambda: None), active_jobs, self._publisher,
            Artifacts(settings.artifacts), self.engine, {self.handler.name: self.handler}, (), lambda envelope: None,
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(32)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._publisher.start()
        self._control.start()
        self._registry.announce(WorkerCard(self.name, "here", 1, "ready", "", 1.5, [self.handler.card()]), 600)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._tasks.stop()
        self._pool.shutdown()
        self._control.stop()
        self._publisher.stop()
        self.engine.close()
        self.runner.close()
        for part in (self._store, self._registry, self._redis):
            part.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            queue = model_queue("text", self.handler.name)
            taken: Any = self._redis.brpop([list_key(queue, step) for step in PRIORITY_STEPS], timeout=0.05)
            if taken is not None:
                args = json.loads(base64.b64decode(json.loads(taken[1])["body"]))[0]
                self._pool.submit(self._tasks.run, Envelope(args[0], "text", 5))
