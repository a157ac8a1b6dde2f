"""Sends Celery messages: the API's only module that uses Celery."""

from __future__ import annotations

import base64
import json
from typing import Any
from uuid import uuid4

from celery import Celery
from kombu.entity import Queue
from kombu.pools import ProducerPool

from core.jobs.broker import QUEUES, Envelope, celery_settings, pushed, task_name

_CONNECTIONS = 10
_PATIENCE_S = 10.0  # for a connection used by others
_JOB, _TASK, _TAG, _BODY, _QUEUE = "<job>", "<task>", "<tag>", "<body>", "<queue>"  # placeholders in a message


class MessageProducer:
    """A producer for any number of threads. Connects at its first send."""

    def __init__(self, url: str) -> None:
        self._celery = Celery("diptych", set_as_current=False, config_source=celery_settings(url))
        # Own pools: Celery's are shared by the whole process, and unusable once anybody has closed them.
        self._connections = self._celery.connection_for_write().Pool(limit=_CONNECTIONS)
        self._producers = ProducerPool(self._connections, limit=_CONNECTIONS)  # type: ignore[no-untyped-call]
        tasks = {queue: self._task(queue) for queue in QUEUES}
        self._bodies = {queue: json.dumps(task.body) for queue, task in tasks.items()}
        self._messages = {
            (queue, priority): pushed(task, _QUEUE, priority, _BODY, _TAG)
            for queue, task in tasks.items()
            for priority in range(10)
        }

    def message(self, envelope: Envelope) -> str:
        """A message as `send` would push it into its list: for the script that creates the job's record.

        Celery's own sending takes several times as long as creating a record, and a process may end between the two.
        The id is a job's: letters, digits, - and _.
        """
        body = base64.b64encode(self._bodies[envelope.queue].replace(_JOB, envelope.id).encode()).decode()
        return (
            self._messages[envelope.queue, envelope.priority]
            .replace(_JOB, envelope.id).replace(_BODY, body)
            .replace(_TASK, str(uuid4())).replace(_TAG, str(uuid4()))
            .replace(json.dumps(_QUEUE), json.dumps(envelope.kombu_queue))
        )  # fmt: skip

    def send(self, envelope: Envelope) -> None:
        """Send one message. Raises Celery's and kombu's errors: OSError and kombu's OperationalError among them."""
        with self._producers.acquire(block=True, timeout=_PATIENCE_S) as producer:  # type: ignore[no-untyped-call]
            self._celery.send_task(
                task_name(envelope.queue),
                args=[envelope.id],
                queue=Queue(envelope.kombu_queue),  # type: ignore[no-untyped-call]  # of no exchange: it leaves nothing
                priority=envelope.priority,
                producer=producer,
            )

    def _task(self, queue: str) -> Any:
        return self._celery.amqp.as_task_v2(_TASK, task_name(queue), args=[_JOB], reply_to=self._celery.thread_oid)

    def close(self) -> None:
        self._producers.force_close_all()  # type: ignore[no-untyped-call]
        self._connections.force_close_all()
        self._celery.close()
