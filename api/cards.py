"""Polls worker cards, model cards, queue loads and keys from Redis in the background, so that requests read memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from contract.card import ImageCard, ModelCard, TextCard
from contract.model_names import PLACEHOLDERS, is_openai_image
from core.jobs.access import AccessReader
from core.jobs.broker import QUEUES
from core.jobs.cards import WorkerCard
from core.jobs.connection import StoreError
from core.jobs.keyring import ApiKey, Keyring
from core.jobs.memory import StoreMemory
from core.jobs.record import QueueBacklog
from core.jobs.registry import Registry, log_condition_faults
from core.jobs.store import JobStore

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_STALE_S = 5.0  # after which a silent Redis counts as down
_START_S = 2.0  # how long start-up waits for the first snapshot
_PROBE_BYTES = 2**20  # as deployment/redis.py requires before it starts Redis
_AGAIN_S = 0.25  # minimum interval of refreshes triggered by unauthenticated requests

C = TypeVar("C", bound=ModelCard)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names that models are served under besides their own: `aliases`, by alias, and OpenAI's of image models.

    `openai` is "on": the first live image model is served under these; "auto": if it is the only one; or "off".
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    openai: str = "off"


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """A snapshot of the registry, the queues, and the keys by id.

    `backlogs` are by queue, `model_backlogs` by model. `guarded`: requests need a key, even after the last
    one was deleted. `secret` signs links.
    """

    workers: tuple[WorkerCard, ...] = ()
    models: tuple[ModelCard, ...] = ()
    backlogs: dict[str, QueueBacklog] = field(default_factory=dict)
    model_backlogs: Mapping[str, QueueBacklog] = field(default_factory=dict)  # of models with live jobs
    paused: frozenset[str] = frozenset()
    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    guarded: bool = False
    secret: bytes = b""
    ahead_s: float = 0.0  # how far Redis's clock is ahead of this machine's
    names: ModelNames = ModelNames()
    only_live: str = ""  # the model that was the only live image model when there was one last
    memory: StoreMemory = field(default_factory=StoreMemory)
    hidden: tuple[ModelCard, ...] = ()  # models that the key may not use whose view this is
    loading: Mapping[str, str] = field(default_factory=dict)  # modalities of the models that no worker serves yet
    reliable_shares: Mapping[str, float] = field(default_factory=dict)  # see `WorkEstimates`

    def seen_by(self, owner: str) -> RegistrySnapshot:
        """The snapshot as a key sees it: without the models that it may not use, and their aliases."""
        key = self.keys.get(owner)
        names = None if key is None else key.allowed_models
        if names is None:
            return self
        allowed = {self.names.aliases.get(name, name) for name in names}
        aliases = {alias: name for alias, name in self.names.aliases.items() if name in allowed}
        return replace(
            self,
            models=tuple(_with_drafts(model, allowed) for model in self.models if model.name in allowed),
            names=replace(self.names, aliases=aliases),
            hidden=tuple(model for model in self.models if model.name not in allowed),
            loading={name: kind for name, kind in self.loading.items() if name in allowed},
        )

    def clock(self) -> float:
        """Redis's time in seconds since the epoch, which all API processes share."""
        return time.time() + self.ahead_s

    def ready(self, modality: str) -> int:
        """The number of ready workers that serve this queue."""
        return sum(
            worker.state == "ready" and any(model.modality == modality for model in worker.models)
            for worker in self.workers
        )

    def model(self, name: str | None, kind: type[C]) -> C | None:
        """The model of this name and kind; without a name, the first of a worker that is live, or else any.

        The name may be another one of the model, or that of an adapter of a text model.
        """
        name = self.served_name(name)
        every = [model for model in self.models if isinstance(model, kind)]
        candidates = [model for model in every if name in (None, model.name)]
        candidates = candidates or [model for model in every if _adapter(model, name)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        ready = [worker for worker in reversed(self.workers) if worker.state == "ready"]
        place = {model.name: at for worker in ready for at, model in enumerate(worker.models)}
        return min(candidates, key=lambda model: (not model.live, place.get(model.name, 0)), default=None)

    def declared(self, name: str, kind: type[C]) -> C | None:
        """The model of this kind that has the name, or that the operator's alias stands for: not one that OpenAI's
        names or placeholders do.
        """
        models = {model.name: model for model in self.models if isinstance(model, kind)}
        return models.get(name) or models.get(self.names.aliases.get(name) or self._alike(name) or "")

    def named(self, name: str) -> ModelCard | None:
        """The model of any kind that is served under this name."""
        served = self.served_name(name)
        named = [model for model in self.models if model.name == served]
        return next(iter(named), None) or (None if served is None else self.model(served, TextCard))

    def adapter(self, card: TextCard, name: str | None) -> str | None:
        """Return the adapter of a text model that this name, by which it is asked for, stands for; None: none."""
        served = self.served_name(name)
        return served if served != card.name and _adapter(card, served) else None

    def served_name(self, name: str | None) -> str | None:
        """Return the name of the model that is served under this name, by its letters in any case if no other is alike;
        other names are returned as they are. None: the name stands for any model.
        """
        if name is None or any(model.name == name for model in self.models):
            return name
        if name in self.names.aliases:
            return self.names.aliases[name]
        if name in PLACEHOLDERS:
            return None
        if self.names.openai == "on" and is_openai_image(name):
            first = self.model(None, ImageCard)
            return name if first is None else first.name
        if self.names.openai == "auto" and is_openai_image(name):
            images = [model.name for model in self.models if isinstance(model, ImageCard)]
            known = _image_models(self) or [name for name in images if name == self.only_live] or images
            if len(known) == 1:
                return known[0]
        return self._alike(name) or name

    def _alike(self, name: str) -> str | None:
        """Return the only model whose name has these letters in another case."""
        names = [model.name for model in self.models if model.name.casefold() == name.casefold()]
        return names[0] if len(names) == 1 else None

    def reliable_share(self, name: str) -> float:
        """Return the part of the queued image jobs' estimated work that counts against a deadline: of this model, and
        of each with queued jobs, the least.
        """
        queued = [model for model, backlog in self.model_backlogs.items() if backlog.queued]
        images = {model.name for model in self.models if isinstance(model, ImageCard)}
        return min((self.reliable_shares.get(model, 0.0) for model in {name, *queued} if model in images), default=0.0)

    def wait_s(self, queue: str) -> float:
        """Seconds that the ready workers need for the queued work; without one, that one worker would need."""
        backlog = self.backlogs.get(queue)
        return 0.0 if backlog is None else backlog.queued_ms / 1000 / max(1, self.ready(queue))

    def next_end_s(self, queue: str, model: str, jobs: int) -> float:
        """Seconds in which the first of so many of the live jobs, of a queue or of a model alone, should end."""
        backlog = self.model_backlogs.get(model) if model else self.backlogs.get(queue)
        work_ms = 0 if backlog is None else backlog.queued_ms + backlog.running_ms
        return work_ms / 1000 / max(1, self.ready(queue)) / jobs


def _image_models(now: RegistrySnapshot) -> list[str]:
    """The names of the image models that workers serve, or will serve once they are loaded."""
    live = [model.name for model in now.models if isinstance(model, ImageCard) and model.live]
    return [*dict.fromkeys([*live, *(name for name, kind in now.loading.items() if kind == "image")])]


def _adapter(card: ModelCard, name: str | None) -> bool:
    """Return whether this is the name of an adapter of a text model."""
    return isinstance(card, TextCard) and name in card.adapters


def _with_drafts(card: ModelCard, allowed: Set[str]) -> ModelCard:
    """The card with those cascades alone whose draft models are allowed."""
    if not isinstance(card, ImageCard) or card.cascades.keys() <= allowed:
        return card
    return replace(card, cascades={name: gate for name, gate in card.cascades.items() if name in allowed})


class WorkEstimates:
    """Tells how far the estimates of queued image jobs can be relied on: costs that a worker measured at a loaded start
    may have been a hundred times too high, and stay in the records of jobs that were queued then.
    """

    def __init__(self) -> None:
        self._highest_s: dict[str, float] = {}  # of an image, by model, since it had no live jobs last

    def reliable_shares(self, models: Iterable[ModelCard], backlogs: Mapping[str, QueueBacklog]) -> dict[str, float]:
        """Return, by image model, by how much its costs have sunk since the oldest of its live jobs was estimated at
        the latest; 0.0 if no iteration has confirmed them, or if these jobs are older than what is known here.

        A running job counts as well: it may be queued again, with the estimate that it has.
        """
        highest_s, shares = dict[str, float](), dict[str, float]()
        for card in models:
            if isinstance(card, ImageCard) and card.capacity_per_s > 0:
                image_s, backlog = 1 / card.capacity_per_s, backlogs.get(card.name)
                live = backlog is not None and (backlog.queued or backlog.running)
                before_s = self._highest_s.get(card.name, math.inf) if live else image_s
                highest_s[card.name] = max(before_s, image_s)
                confirmed = any(card.least_costs.row_step_s.values())
                shares[card.name] = image_s / highest_s[card.name] if confirmed else 0.0
        self._highest_s = highest_s
        return shares


class CardCache:
    """Keeps the newest snapshot. Belongs to one event loop; survives Redis outages."""

    def __init__(
        self,
        registry: Registry,
        store: JobStore,
        keyring: Keyring,
        access: AccessReader,
        names: ModelNames = ModelNames(),
        folder: Path | None = None,
    ) -> None:
        """`folder` is the folder of this Redis, if it runs beside this process."""
        self._beside = folder
        self.trouble = ""  # why Redis does not reply, where known
        self._registry = registry
        self._store = store
        self._keyring = keyring
        self._access = access
        self._names = names
        self._task: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None
        self._looked = -float("inf")  # when the newest look began
        self._down = False
        # Its own thread: a hanging Redis must not occupy the threads that requests use.
        self._limiter = anyio.CapacityLimiter(1)
        self._estimates = WorkEstimates()
        self.now = RegistrySnapshot(names=names)

    @property
    def redis_answers(self) -> bool:
        return not self._down and time.monotonic() - self._looked < _STALE_S

    @property
    def known(self) -> bool:
        """Whether Redis has ever been read: before that the keys are unknown."""
        return self._looked > 0

    async def start(self) -> None:
        """Start polling. Returns after the first snapshot, or without it if Redis does not reply soon."""
        self._task = asyncio.create_task(self._run())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.renew(), _START_S)

    async def close(self) -> None:
        for task in (self._task, self._look):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._access.close()

    async def find(self, name: str | None, kind: type[C], owner: str) -> C | None:
        """The model's card, if its owner may use it. If it is missing, the snapshot is refreshed first: a worker may
        have just started.
        """
        card = self.seen_by(owner).model(name, kind)
        if card is None and self.redis_answers:
            await self.renew()
            card = self.seen_by(owner).model(name, kind)
        return card

    def seen_by(self, owner: str) -> RegistrySnapshot:
        """The newest snapshot as the owner's key sees it."""
        return self.now.seen_by(owner)

    async def renew(self) -> None:
        """Refresh now. A call during a refresh waits for that one."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._read())
        await asyncio.shield(self._look)

    async def renew_soon(self) -> None:
        """Refresh, at most four times a second, so that unauthenticated callers cannot load Redis, and wait for a look
        that began after this call.
        """
        called = time.monotonic()
        for _ in range(2):  # a look that is under way began before
            if self._looked < called:
                await asyncio.sleep(self._looked + _AGAIN_S - time.monotonic())
            if self._looked < called:
                await self.renew()

    async def guarded(self) -> bool:
        """Return whether requests need a key, as Redis says after this call began, or said last if it is silent."""
        if not self.now.guarded and self.redis_answers:
            with contextlib.suppress(StoreError):
                if await self._access.guarded():
                    await self.renew()
                    if not self.now.guarded:  # that look had begun before
                        await self.renew()
        return self.now.guarded

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.renew()

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            self.now = await anyio.to_thread.run_sync(self._snapshot, limiter=self._limiter)
        except StoreError as error:
            self.trouble = await anyio.to_thread.run_sync(self._look_at_disk, limiter=self._limiter)
            if not self._down:
                failure = self.trouble or error
                log.warning("the worker registry is unavailable, using the last known model cards: %s", failure)
            self._down = True
        except Exception:
            log.exception("the worker registry contains an unreadable entry")
            self._down = True
        else:
            if self._down:
                log.info("the worker registry is available again")
            self._down = False
            self.trouble = ""
            self._looked = began

    def _examine(self) -> None:
        """Log how Redis may lose jobs, as far as it says it."""
        with contextlib.suppress(StoreError):
            log_condition_faults(self._registry)

    def _look_at_disk(self) -> str:
        """Return why the Redis beside this process ended, if its disk is unwritable: clients only see it gone."""
        if self._beside is None:
            return ""
        try:
            with tempfile.TemporaryFile(dir=self._beside) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
        except PermissionError:
            return ""  # owned by another user
        except OSError as error:
            return f"its disk cannot be written: {(error.strerror or type(error).__name__).lower()}"
        return ""

    def _snapshot(self) -> RegistrySnapshot:
        models = tuple(self._registry.models())
        workers = tuple(self._registry.workers())  # after the models: includes every live model's worker
        backlogs = {queue: self._store.backlog(queue) for queue in QUEUES}
        by_model = {name: load for queue in QUEUES for name, load in self._store.by_model.read(queue).items()}
        guard = self._keyring.guard()
        # An emptied Redis has no keys: this process still requires one until `diptych keys open`.
        guarded = bool(guard.keys) or guard.closed or (self.now.guarded and not guard.open)
        # Read each time: in an emptied Redis the first API process writes its secret, and all others adopt it.
        secret = self._keyring.secret(self.now.secret)
        ahead_s = self._keyring.clock() - time.time()
        paused = frozenset(self._registry.paused_queues())
        names = {name: kind for worker in workers for name, kind in worker.loading.items()}
        live = {model.name for model in models if model.live}
        snapshot = RegistrySnapshot(
            workers, models, backlogs, by_model, paused, guard.keys, guarded, secret, ahead_s, self._names,
            memory=self._store.upkeep.memory(),
            loading={name: kind for name, kind in names.items() if name not in live},
            reliable_shares=self._estimates.reliable_shares(models, by_model),
        )  # fmt: skip
        if self._down or self._looked < 0:  # another Redis may run now
            self._examine()
        images = _image_models(snapshot)
        return replace(snapshot, only_live=images[0] if len(images) == 1 else self.now.only_live)
