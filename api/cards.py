"""What the workers last said of themselves, read in the background so that no request waits for it.

Knows cards, backlogs and their age; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from contract.card import ModelCard, TextCard
from core.jobs.broker import QUEUES
from core.jobs.cards import WorkerCard
from core.jobs.connection import StoreError
from core.jobs.keyring import Key, Keyring
from core.jobs.record import Backlog
from core.jobs.registry import Registry
from core.jobs.store import JobStore

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_STALE_S = 5.0  # a Redis that has not answered for so long is taken for gone
_START_S = 2.0  # how long a start waits for the first look
_PROBE_BYTES = 2**20  # as deployment/redis.py asks for before it starts one
_AGAIN_S = 0.25  # the least between two looks that strangers ask for

C = TypeVar("C", bound=ModelCard)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the registry, the queues and the keys, by id.

    `guarded`: a key must be brought, even where there is none any more. `secret` is what links are signed with.
    """

    workers: tuple[WorkerCard, ...] = ()
    models: tuple[ModelCard, ...] = ()
    backlogs: dict[str, Backlog] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()
    keys: Mapping[str, Key] = field(default_factory=dict)
    guarded: bool = False
    secret: bytes = b""
    ahead_s: float = 0.0  # how much Redis's clock is ahead of this machine's

    def clock(self) -> float:
        """The time by Redis's clock, in seconds since the epoch: the same for every API."""
        return time.time() + self.ahead_s

    def ready(self, modality: str) -> int:
        """How many workers take this queue's jobs now."""
        return sum(
            worker.state == "ready" and any(model.modality == modality for model in worker.models)
            for worker in self.workers
        )

    def model(self, name: str | None, kind: type[C]) -> C | None:
        """The model of this name and kind; without a name, the first live one, or else the first that is known."""
        known = [model for model in self.models if isinstance(model, kind) and name in (None, model.name)]
        return min(known, key=lambda model: not model.live, default=None)

    def expands(self, name: str) -> bool:
        """Whether every worker that draws with this model writes text too; with none there, whether any ever did."""
        drawing = [worker for worker in self.workers if any(model.name == name for model in worker.models)]
        if not drawing:
            return self.model(None, TextCard) is not None
        return all(any(isinstance(model, TextCard) for model in worker.models) for worker in drawing)

    def wait_s(self, queue: str) -> float:
        """How long the ready workers have to do with what is queued; with none ready, how long one would."""
        backlog = self.backlogs.get(queue)
        return 0.0 if backlog is None else backlog.queued_ms / 1000 / max(1, self.ready(queue))


class Cards:
    """Keeps the newest snapshot. Belongs to one event loop; outlives Redis."""

    def __init__(self, registry: Registry, store: JobStore, keyring: Keyring, beside: Path | None = None) -> None:
        """`beside` is the folder of this Redis, where it runs beside this process."""
        self._beside = beside
        self.trouble = ""  # why Redis does not answer, where more is known than that
        self._registry = registry
        self._store = store
        self._keyring = keyring
        self._task: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None
        self._looked = -float("inf")
        self._down = False
        # Its own thread: a Redis that hangs must not take the ones that requests wait for.
        self._limiter = anyio.CapacityLimiter(1)
        self.now = Snapshot()

    @property
    def redis_answers(self) -> bool:
        return not self._down and time.monotonic() - self._looked < _STALE_S

    @property
    def known(self) -> bool:
        """Whether Redis has ever been read: before that nobody knows which keys there are."""
        return self._looked > 0

    async def start(self) -> None:
        """Returns after the first look, or without it if Redis does not answer soon."""
        self._task = asyncio.create_task(self._run())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.renew(), _START_S)

    async def close(self) -> None:
        for task in (self._task, self._look):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def find(self, name: str | None, kind: type[C]) -> C | None:
        """The model's card. One that is missing is looked for again: a worker may have come this very moment."""
        found = self.now.model(name, kind)
        if found is None and self.redis_answers:
            await self.renew()
            found = self.now.model(name, kind)
        return found

    async def renew(self) -> None:
        """Look now. Whoever asks while a look is under way waits for that one."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._read())
        await asyncio.shield(self._look)

    async def renew_soon(self) -> None:
        """Look again, but four times a second at most: strangers must not keep Redis busy. They wait instead."""
        before = self._looked
        await asyncio.sleep(before + _AGAIN_S - time.monotonic())
        if self._looked == before:
            await self.renew()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.renew()

    async def _read(self) -> None:
        try:
            self.now = await anyio.to_thread.run_sync(self._snapshot, limiter=self._limiter)
        except StoreError as error:
            self.trouble = await anyio.to_thread.run_sync(self._look_at_disk, limiter=self._limiter)
            if not self._down:
                said = self.trouble or error
                log.warning("the registry cannot be read, the last known cards are kept: %s", said)
            self._down = True
        except Exception:
            log.exception("the registry holds something that cannot be read")
            self._down = True
        else:
            if self._down:
                log.info("the registry can be read again")
            self._down = False
            self.trouble = ""
            self._looked = time.monotonic()

    def _look_at_disk(self) -> str:
        """Whether a Redis beside us has ended because it cannot write: its clients see no more than that it is gone."""
        if self._beside is None:
            return ""
        try:
            with tempfile.TemporaryFile(dir=self._beside) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
        except PermissionError:
            return ""  # another user's
        except OSError as error:
            return f"its disk cannot be written: {(error.strerror or type(error).__name__).lower()}"
        return ""

    def _snapshot(self) -> Snapshot:
        models = tuple(self._registry.models())
        workers = tuple(self._registry.workers())  # after the models: whose worker is live, its worker is known
        backlogs = {queue: self._store.backlog(queue) for queue in QUEUES}
        guard = self._keyring.guard()
        # A Redis that was emptied knows of no key either: whom this process asked for one, it asks until it is told.
        guarded = bool(guard.keys) or guard.closed or (self.now.guarded and not guard.open)
        # Read each time: a Redis that was emptied gets the one that the first API brings back, and all go on with that.
        secret = self._keyring.secret(self.now.secret)
        ahead_s = self._keyring.clock() - time.time()
        paused = frozenset(self._registry.paused())
        return Snapshot(workers, models, backlogs, paused, guard.keys, guarded, secret, ahead_s)
