"""The worker's Celery application: one task per queue, and how messages are sent.

`celery -A workers.app worker` runs the same worker as `diptych worker`. tasks.py serves a message, boot.py runs the
process.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Celery, Task
from kombu.entity import Queue

from contract.bounds import PRIORITY
from core.config import Settings, read
from core.jobs.broker import QUEUES, Envelope, celery_settings, own_queue, pushed, task_name
from workers.worker import Worker

if TYPE_CHECKING:
    from workers.serving_runtime import ServingRuntime

Say = Callable[[str], None]
Build = Callable[[Settings, Say], "ServingRuntime"]


class WorkerApplication(Celery):  # type: ignore[misc]
    """A Celery application with our `Worker`. Nothing is loaded or run before Celery's worker starts."""

    def __init__(self, settings: Settings, build: Build, configured: Mapping[str, str]) -> None:
        """Raises `SettingsError`."""
        super().__init__("diptych", config_source=celery_settings(settings.redis_url))
        self.conf.update(
            worker_pool="workers.thread_pool:ThreadPool",
            worker_consumer="workers.claims.prefetch:ReconnectingConsumer",
            worker_disable_rate_limits=True,
            worker_enable_prefetch_count_reduction=False,  # the intake limits unacknowledged messages
            result_backend_thread_safe=True,  # there is none; else each thread searches all packages for its class
            broker_channel_error_retry=True,  # e.g. of a full Redis
        )
        self.settings = settings
        self.build = build
        self.worker = Worker(settings, self.post, self.message, configured)
        self.prefetch = self.worker.prefetch
        self.Worker = self.subclass_with_self("workers.boot:WorkerProgram")
        for queue in QUEUES:
            self.task(_serve, bind=True, base=CountedTask, name=task_name(queue), queue=queue)

    def post(self, envelope: Envelope) -> None:
        """Send a message to any worker of its model. Raises Celery's and kombu's errors."""
        # A queue of no exchange: kombu leaves no binding of it in Redis.
        queue: Any = Queue(envelope.kombu_queue)  # type: ignore[no-untyped-call]
        self.send_task(task_name(envelope.queue), args=[envelope.id], queue=queue, priority=envelope.priority)

    def message(self, envelope: Envelope) -> str:
        """A message as it lies in a queue's list: in that of its model, or in the one that is for `envelope.to`."""
        task = self.amqp.as_task_v2(str(uuid4()), task_name(envelope.queue), args=[envelope.id])
        body = base64.b64encode(json.dumps(task.body).encode()).decode()
        return pushed(task, envelope.kombu_queue, envelope.priority, body, str(uuid4()))


class CountedTask(Task):  # type: ignore[misc]
    """A task whose messages are counted while unacknowledged."""

    Request = "workers.claims.prefetch:CountedRequest"


def _serve(self: Any, id: str = "", *_: Any) -> None:
    delivery = self.request.delivery_info or {}
    priority, worker = delivery.get("priority"), self.app.worker
    to = worker.id if delivery.get("routing_key") == own_queue(self.queue, worker.id) else ""
    worker.tasks.run(Envelope(str(id), self.queue, priority if isinstance(priority, int) else PRIORITY, to))


def _build(settings: Settings, say: Say) -> ServingRuntime:
    from pipeline.checkpoints.load import check_name

    for model in settings.catalogue:
        check_name(model.model_name)  # importing torch and its dependencies takes seconds
    _check_texts(settings.text_catalogue[1:])  # the first is loaded at once
    from workers.build import build
    from workers.metrics import METER
    from workers.serving_runtime import build_serving_runtime

    return build_serving_runtime(build(settings, measure_s=_MEASURE_S, text=True, say=say, on_tick=METER.tick), say)


def _check_texts(models: Sequence[Settings]) -> None:
    """Reject names that lead to no text model. Raises `ModelError`."""
    from llm.checkpoints.load import TextModelError, check_name
    from pipeline.checkpoints.folder import ModelError

    for model in models:
        try:
            check_name(str(model.text_model_name))
        except TextModelError as error:
            raise ModelError(f"text: {error}") from error


_MEASURE_S = 5.0  # limit for measuring cost curves; the rest is learnt from the first jobs


def create(settings: Settings, build: Build | None = None) -> WorkerApplication:
    """Create the application. `build` makes what the worker runs, by default a model with its engine."""
    return WorkerApplication(settings, build or _build, configured_models(settings) if build is None else {})


def configured_models(settings: Settings) -> Mapping[str, str]:
    """The modalities of the models that a worker with these settings serves once all are loaded, by name."""
    from pipeline.checkpoints.load import short_name

    names = [(each.model_name, "image") for each in settings.catalogue]
    names += [(str(each.text_model_name), "text") for each in settings.text_catalogue]
    configured = {}
    for name, modality in names:
        with suppress(OSError, RuntimeError):  # it cannot be looked at: building it says so in the usual words
            configured[short_name(name)] = modality
    return configured


def __getattr__(name: str) -> WorkerApplication:
    """Create `workers.app.app` from the environment when Celery's command line asks for it."""
    if name != "app":
        raise AttributeError(name)
    globals()["app"] = app = create(read())
    return app
