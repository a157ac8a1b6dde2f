"""Prepares the pictures of batch lines on the event loop, for the threads that submit lines.

A line is retried while the queue is full or its pictures are being decoded: its preparation goes on meanwhile, and is
made once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from api.errors import ApiError
from api.service import Service
from core.jobs.record import JobDraft

_WAIT_S = 5.0  # of a thread for one line; other batches of the key go on afterwards
_LASTS_S = 1800.0  # shorter than stored pictures are kept without a record
_REMEMBERED = 256  # lines


class _Preparation(NamedTuple):
    began: float
    draft: Future[JobDraft[Any]]


class BatchInputs:
    """The preparations of one process. Thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, _Preparation] = OrderedDict()  # by the id of the line's job

    def draft(self, id: str, prepare: Callable[[], Coroutine[Any, Any, JobDraft[Any]]]) -> JobDraft[Any]:
        """The line's draft, its pictures stored. Raises what `prepare` does; `ApiError` (503) while it is not done."""
        with self._lock:
            line = self._lines.get(id)
            if line is None or time.monotonic() - line.began > _LASTS_S:
                line = _Preparation(time.monotonic(), self._service.submit(prepare()))
                self._lines[id] = line
            while len(self._lines) > _REMEMBERED:
                self._lines.popitem(last=False)
        if not wait((line.draft,), _WAIT_S).done:
            raise ApiError(503, "The pictures of this line are being decoded.", code="decoder_overloaded")
        try:
            return line.draft.result()
        except BaseException:
            with self._lock:
                self._lines.pop(id, None)  # a failed preparation is made again if the line is retried
            raise
