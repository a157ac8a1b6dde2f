"""A thread that watches whether the API answers and what the worker announces.

It may block on slow replies, so that the supervising thread does not.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from core.config import Settings

if TYPE_CHECKING:
    from contract.card import ModelCard
    from core.jobs.registry import Registry

_LOOK_S = 0.1
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """The last observation. `api`: it answers, and has itself seen Redis and a ready worker. `worker`: all of ours are
    ready. `message` is the activity of one that is not, or why that is unknown.
    """

    api: bool = False
    worker: bool = False
    message: str = ""
    models: tuple[ModelCard, ...] = ()

    @property
    def ready(self) -> bool:
        return self.api and self.worker


class ReadinessWatcher:
    """Polls until all is ready; `lost` makes it poll again. The properties may be read from any thread."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._address = urlsplit(url)
        self._sight = Readiness()
        self._workers: dict[str, tuple[int, float] | None] = {}
        self._changed = threading.Condition()
        self._over = False
        self._registry: Registry | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def sight(self) -> Readiness:
        with self._changed:
            return self._sight

    def lost(self, name: str) -> None:
        """A part ended, a worker or an API process; its last observation is invalid."""
        with self._changed:
            if name in self._workers:
                self._sight = replace(self._sight, worker=False, message="", models=())
                self._workers[name] = None
            else:
                self._sight = replace(self._sight, api=False)
            self._changed.notify()

    def expect(self, name: str, pid: int) -> None:
        """Set the process id of the worker of this name."""
        with self._changed:
            self._workers[name] = (pid, time.time() - 1.0)
            self._changed.notify()

    def close(self) -> None:
        """Does not wait: the thread may be blocked, and ends with the process."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or not self._sight.ready)
                if self._over:
                    return
                before, workers = self._sight, dict(self._workers)
            seen = before
            if workers and not seen.worker:
                seen = self._look_for_workers(seen, workers.values())
            if not seen.api:
                seen = replace(seen, api=self._api_answers())
            with self._changed:
                if self._sight == before and self._workers == workers:  # nothing was lost meanwhile
                    self._sight = seen
                self._changed.wait_for(lambda: self._over, _LOOK_S)

    def _look_for_workers(self, seen: Readiness, workers: Iterable[tuple[int, float] | None]) -> Readiness:
        from core.jobs.connection import StoreError
        from core.jobs.registry import Registry

        if self._registry is None:  # imported only after the children's own imports have begun
            self._registry = Registry.of(self._settings)
        try:
            here = [card for card in self._registry.workers() if card.host == socket.gethostname()]
        except StoreError as error:
            return replace(seen, message=str(error))
        for worker in workers:
            # An earlier worker may have had the same process id, above all in a container.
            own = [card for card in here if worker is not None and card.pid == worker[0] and card.started >= worker[1]]
            if not own:
                return replace(seen, message="")
            card = own[0]
            seen = replace(seen, worker=card.state == "ready", message=card.message, models=tuple(card.models))
            if not seen.worker:
                break
        return seen

    def _api_answers(self) -> bool:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=_ANSWER_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
