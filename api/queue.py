"""Sends envelopes: the one place of the API where Celery appears.

Knows queues, task names and priorities; knows nothing of what a job is.
"""

from __future__ import annotations

import logging

from celery import Celery
from kombu.pools import ProducerPool

from core.jobs.broker import Envelope, celery_settings, task_name

log = logging.getLogger(__name__)

_CONNECTIONS = 10
_PATIENCE_S = 10.0  # for a connection that others use


class Queue:
    """A producer for any number of threads. Connects at its first send."""

    def __init__(self, url: str) -> None:
        self._celery = Celery("diptych", set_as_current=False, config_source=celery_settings(url))
        # Pools of its own. Celery's belong to the whole process, and cannot be used again by anybody once closed.
        self._connections = self._celery.connection_for_write().Pool(limit=_CONNECTIONS)
        self._producers = ProducerPool(self._connections, limit=_CONNECTIONS)  # type: ignore[no-untyped-call]

    def send(self, envelope: Envelope) -> None:
        """Send one message. Raises what Celery and kombu raise: OSError and kombu's OperationalError among them."""
        with self._producers.acquire(block=True, timeout=_PATIENCE_S) as producer:  # type: ignore[no-untyped-call]
            self._celery.send_task(
                task_name(envelope.queue),
                args=[envelope.id],
                queue=envelope.queue,
                priority=envelope.priority,
                producer=producer,
            )

    def post(self, envelope: Envelope) -> bool:
        """Send one message if that is possible. False: it was not; the job's record stands, and the reaper will."""
        try:
            self.send(envelope)
        except Exception as error:
            log.warning("%s is left to the reaper: sending failed (%s)", envelope.id, type(error).__name__)
            return False
        return True

    def close(self) -> None:
        self._producers.force_close_all()  # type: ignore[no-untyped-call]
        self._connections.force_close_all()
        self._celery.close()
