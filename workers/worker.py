"""Assembles a worker from its parts, and starts and ends them in order.

boot.py handles the process: signals, Celery, exit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from contract.card import ModelCard
from core.artifacts import ArtifactError, Artifacts
from core.config import Settings, SettingsError
from core.jobs.broker import QUEUES, Envelope
from core.jobs.cards import WorkerCard
from core.jobs.connection import RedisClient, StoreError
from core.jobs.holders import FileHolders
from core.jobs.placement import ModelPlacement
from core.jobs.reaper import Reaper
from core.jobs.registry import Registry, log_condition_faults
from core.jobs.rights import RedisPermissions, describe_missing
from core.jobs.store import JobStore
from core.threads import compute_threads
from workers.claims.active_jobs import ActiveJobs
from workers.claims.control import ControlListener
from workers.claims.heartbeat import Heartbeat
from workers.claims.model_router import ModelRouter
from workers.claims.prefetch import PrefetchLimiter
from workers.claims.publisher import ProgressPublisher
from workers.claims.shared_lock import SharedLock
from workers.claims.store_retry import StoreRetry
from workers.claims.warm_claims import WarmClaims
from workers.metrics import METER
from workers.tasks import WorkerTasks

if TYPE_CHECKING:
    from workers.handlers import JobHandler
    from workers.serving_runtime import ServingRuntime

log = logging.getLogger(__name__)

_POLL_S = 0.02
_CLOSE_S = 2.0  # Redis blocks for up to a second before it replies that there is no message


class Worker:
    """One worker. Call `open`, `equip`, then `serve` for each message; finally `drain` and `close`."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[[Envelope], None],
        message: Callable[[Envelope], str],
        configured: Mapping[str, str] = {},
    ) -> None:
        """`message` writes one to a worker. `configured` are the modalities of the models that it will serve, by name,
        as far as they are known before they are loaded. Does not connect yet.

        Raises `SettingsError` for settings that no worker can use.
        """
        if not settings.redis_url:
            raise SettingsError("DIPTYCH_REDIS_URL: must be given, a worker finds its jobs there")
        self.settings = settings
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.store_retry = StoreRetry()
        self.active_jobs = ActiveJobs()
        self.shared_lock = SharedLock(on_change=lambda: self.prefetch.wake())
        self.prefetch = PrefetchLimiter(QUEUES, held_up=lambda: self.shared_lock.narrow, worker=self.id)
        self.tasks: WorkerTasks | None = None
        self._send, self._message_to = send, message
        try:
            client = RedisClient(settings.redis_url)
        except ValueError as error:
            raise SettingsError("DIPTYCH_REDIS_URL: is not a Redis URL") from error
        self._store, self._registry = JobStore.of(settings, client), Registry(client)
        self._holders, self._placement = FileHolders(client), ModelPlacement(client)
        self._rights = RedisPermissions(client)
        try:
            # Twice as patient as an API: no client waits at a connection, and what is drawn would be lost.
            self._artifacts = Artifacts(settings.artifacts, 2 * settings.storage_s)
        except ArtifactError as error:
            raise SettingsError(f"DIPTYCH_ARTIFACTS_URL: {error}") from error
        self._lacks: list[str] = []  # as last logged
        self._started = time.time()
        self._state, self._message = "starting", ""
        self._models: list[ModelCard] = []
        self._configured = configured
        self._equipment: ServingRuntime | None = None
        self._publisher: ProgressPublisher | None = None
        self._heartbeat = Heartbeat(
            self._store.leases, self._registry, self.store_retry, self.active_jobs, self.id, self.card, self._beaten,
            lease_s=settings.lease_s, stuck_s=settings.stuck_s,
        )  # fmt: skip
        self._warm_claims: WarmClaims | None = None
        self._router: ModelRouter | None = None
        self._control = ControlListener(self._registry, self.store_retry, self.id, self._cancelled)
        self._reaper = Reaper(self._store.upkeep, send)

    def open(self) -> None:
        """Announce the card with state "starting", and start sweeping. Everything else needs an engine.

        Raises `SettingsError` if metrics cannot be served at their address.
        """
        if self.settings.metrics:
            try:
                METER.serve(self.settings.metrics, self.prefetch.counts)
            except (OSError, OverflowError) as error:
                raise SettingsError("DIPTYCH_METRICS: is no address that can be listened on") from error
        threading.Thread(target=self._examine, name="rights", daemon=True).start()  # Redis may take long to reply
        self._heartbeat.start()
        self._reaper.start()

    def _examine(self) -> None:
        """Log what Redis does not grant, and how it may lose jobs."""
        if self.permitted():
            with contextlib.suppress(StoreError):
                self.store_retry.once(partial(log_condition_faults, self._registry), None)

    def permitted(self) -> bool:
        """Return whether Redis grants all needed rights, as far as it replies. Missing ones are logged once."""
        nothing: list[str] = []
        missing = self.store_retry.once(self._rights.missing, nothing)
        if missing and missing != self._lacks:
            log.error("%s; the worker takes no jobs until then", describe_missing(missing))
        self._lacks = missing
        return not missing

    def say(self, message: str) -> None:
        """Set the current activity, for the card and the log."""
        log.info("%s", message)
        self._message = message
        self._heartbeat.poke()

    def _turn(self, state: str) -> None:
        self._state = state
        self.say(state)

    def equip(self, equipment: ServingRuntime) -> None:
        """Serve messages from now on, of the queues that have a handler."""
        engine, settings = equipment.engine, self.settings
        self._equipment = equipment
        self._publisher = ProgressPublisher(
            self._store.leases, self.store_retry, lambda: engine.ticks, self.active_jobs.abandon
        )
        self._warm_claims = WarmClaims(
            self.id, self._store.leases, self._holders, self.store_retry, self._message_to,
            equipment.handlers.values(),
            wait_s=settings.warm_wait_s, known_s=settings.lease_s,
        )  # fmt: skip
        self.tasks = WorkerTasks(
            self.id, self._store, self.store_retry, self.shared_lock, self.active_jobs, self._publisher,
            self._artifacts, engine, equipment.handlers, equipment.stages, self._send, self._warm_claims,
            self.prefetch.storing,
        )  # fmt: skip
        self._publisher.start()
        self._control.start()
        limits = {"image": settings.image_jobs, "text": settings.text_jobs}
        self.prefetch.serve({handler.modality: limits[handler.modality] for handler in [*equipment.handlers.values()]})
        self._router = ModelRouter(
            self.id, self._placement, self.store_retry, equipment.handlers, self.active_jobs, self.prefetch,
            lambda: {model.name: model.capacity_per_s for model in self._models},
        )  # fmt: skip
        self._router.start()
        self._heartbeat.watch(engine)

    def ready(self) -> None:
        """Called when Celery consumes messages."""
        if self._state == "starting":
            self._turn("ready")

    # -- shutdown ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no more jobs, hand back those not started, and continue the running ones."""
        self._turn("draining")
        self.prefetch.close(_CLOSE_S)
        if self._router is not None:
            self._router.stop()
        if self.tasks is not None:
            self.tasks.drain()

    def idle(self, timeout_s: float) -> bool:
        """Wait until no message is in flight. False: timed out after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while any(self.prefetch.counts().values()):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """End the threads, remove the card, and release the device if nothing runs on it."""
        self._reaper.stop()
        if self._publisher is not None:
            self._control.stop()
            self._publisher.stop()
        self._heartbeat.stop()
        self.deregister()
        if self._equipment is not None and not self.active_jobs.works():
            self._equipment.close()
        self._registry.close()
        self._store.close()

    def deregister(self) -> None:
        """Remove the card, if Redis replies."""
        with contextlib.suppress(StoreError):  # else it expires
            self._registry.deregister(self.id)

    # -- used by the parts --------------------------------------------------------------------------------------

    def _beaten(self, paused: frozenset[str]) -> None:
        """After the card was announced: pause queues, and announce files while jobs are taken."""
        self.prefetch.pause(paused)
        if self._warm_claims is not None:
            self._warm_claims.announce(none=self._state != "ready")

    def card(self) -> WorkerCard:
        if self._equipment is not None:
            self._models = [self._model(handler) for handler in [*self._equipment.handlers.values()]]
        return WorkerCard(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=self._state,
            message=self._message,
            started=self._started,
            models=self._models,
            in_flight=self.prefetch.counts(),
            limits=self.prefetch.limits,
            version=_version(),
            threads=self._threads(),
            loading=self._loading(),
        )

    def _loading(self) -> dict[str, str]:
        """The modalities of the models that are not served yet, by name."""
        if self._equipment is None:
            return dict(self._configured)
        ended = {*self._equipment.handlers, *self._equipment.failed}
        return {name: modality for name, modality in self._configured.items() if name not in ended}

    def _threads(self) -> int:
        """CPU threads that compute; 0 before a model is loaded."""
        gpu = any(model.device.startswith("cuda") for model in self._models)
        return compute_threads(self.settings.threads, gpu=gpu) if self._models else 0

    @staticmethod
    def _model(handler: JobHandler) -> ModelCard:
        with contextlib.suppress(KeyError, RuntimeError):  # a cost changed during the read
            return handler.card()
        return handler.card()

    def _cancelled(self, id: str, fence: str | None) -> None:
        if self.active_jobs.abandon(id, fence):
            log.info("%s was cancelled", id)


def _version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:  # a source checkout without installation
        return ""
