"""Serves one Celery message: claims the job, runs it on the engine, stores artifacts, records the outcome.

Runs on a Celery thread that only waits (and encodes results). It raises nothing to Celery: the record holds the
outcome, and a stale message is acknowledged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contract.errors import Invalid
from contract.printable import printable_message
from core import traces
from core.artifacts import ArtifactError, Artifacts
from core.batching.engine import Aborted, Closed, Engine, Expired
from core.batching.runner import OutOfMemory
from core.failures import NotFinite
from core.jobs.broker import Envelope
from core.jobs.record import Claim
from core.jobs.store import JobStore
from core.logs import job_context, request_context
from workers import genai
from workers.artifact_writer import ArtifactWriter
from workers.claims.active_jobs import ActiveJob, ActiveJobs
from workers.claims.publisher import ProgressPublisher
from workers.claims.shared_lock import SharedLock
from workers.claims.store_retry import RetryAbandoned, StoreRetry
from workers.claims.warm_claims import WarmClaims
from workers.job_executor import JobExecutor
from workers.metrics import METER
from workers.stages.stage import JobStage, StageFailed

if TYPE_CHECKING:
    from workers.handlers import JobHandler

log = logging.getLogger(__name__)

_MOST_LOGGED = 300  # characters of an error, which may repeat what a client sent


class WorkerTasks:
    """The tasks that all of a worker's Celery threads run. Thread-safe."""

    def __init__(
        self,
        worker: str,
        store: JobStore,
        store_retry: StoreRetry,
        shared_lock: SharedLock,
        active_jobs: ActiveJobs,
        publisher: ProgressPublisher,
        artifacts: Artifacts,
        engine: Engine,
        handlers: Mapping[str, JobHandler],
        stages: Sequence[JobStage],
        send: Callable[[Envelope], None],
        warm_claims: WarmClaims | None = None,
        storing: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Make the tasks. Without `warm_claims` jobs are claimed whatever files they name. `storing` is the context in
        which results of a job of this queue are stored.
        """
        self._worker = worker
        self._warm_claims = warm_claims
        self._leases = store.leases
        self._store_retry = store_retry
        self._shared_lock = shared_lock
        self._active_jobs = active_jobs
        self._publisher = publisher
        self._engine = engine
        self._handlers = handlers
        self._send = send
        self._storing = storing or (lambda queue: nullcontext())
        keep = lambda key: store_retry.patiently(lambda: store.upkeep.keep(key))  # noqa: E731
        self._executor = JobExecutor(
            engine, handlers, stages, publisher, lambda: ArtifactWriter(artifacts, keep), warm_claims
        )
        self._draining = False

    def drain(self) -> None:
        """Start no more jobs: those still in the engine's queue, and new ones, are handed back."""
        self._draining = True
        self._shared_lock.close()
        for work in self._active_jobs.works():
            if not work.begun:
                work.stop()

    def stop(self) -> None:
        """Stop the running jobs, so that they are handed back too."""
        for work in self._active_jobs.works():
            work.stop()

    def hand_back_all(self) -> None:
        """Hand back all active jobs without waiting. One try each."""
        for work in self._active_jobs.works():
            work.abandon()  # from here on not written by its own thread
            self._active_jobs.remove(work)
            try:
                self._return(work.claim, unless=lambda: True)
            except Exception as error:
                log.warning("job %s: its lease expires by itself (%s)", work.claim.id, type(error).__name__)

    # -- on a Celery thread ------------------------------------------------------------------------------------

    def run(self, envelope: Envelope) -> None:
        """Serve a message. Never raises."""
        id = envelope.id
        try:
            with job_context(id):
                self._serve(envelope)
        except RetryAbandoned:
            pass  # the worker ends while Redis is down: the lease will expire
        except Exception:
            log.exception("job %s: internal error of this worker", id)

    def _serve(self, envelope: Envelope) -> None:
        id = envelope.id
        look = lambda: self._leases.glance(id)  # noqa: E731
        waits, alone, model = self._store_retry.patiently(look, unless=lambda: self._draining)
        handler = self._handlers.get(model)
        envelope = replace(envelope, model=model)
        if waits and (handler is None or handler.modality != envelope.queue):
            # An older version sent it to the queue of all models, or a newer one, whose sweeps send it again, wrote it.
            routed = self._store_retry.patiently(lambda: self._leases.route(id), unless=lambda: self._draining)
            if routed is not None:
                self._post(routed)
            return
        stop = lambda: self._draining  # noqa: E731
        warm = self._warm_claims
        if waits and handler is not None and warm is not None and not alone and warm.leave(envelope, handler, stop):
            return
        if not self._shared_lock.enter(alone=alone):
            self._post(replace(envelope, to=""))  # not started: another worker may take it at once
            return
        try:
            claim = self._claim(envelope)
            if claim is None:
                return
            if claim.suspect and not alone:  # another worker was lost with it in the meantime
                self._return(claim)
                return
            self._work(claim)
        finally:
            self._shared_lock.leave()

    def _claim(self, envelope: Envelope) -> Claim | None:
        unsure = False
        while True:
            if self._draining:
                self._post(replace(envelope, to=""))
                return None
            claim = self._store_retry.once(lambda: (self._leases.claim(envelope.id, self._worker),), None)
            if claim is not None:
                break
            unsure = True  # it may have succeeded, with only the reply lost
            self._store_retry.patiently(lambda: self._leases.glance(envelope.id), unless=lambda: self._draining)
        if claim[0] is None and unsure:
            self._disown(envelope.id)
        return claim[0]

    def _disown(self, id: str) -> None:
        """Hand back a job that was claimed for this worker by a call whose reply was lost."""
        fence = self._store_retry.patiently(lambda: self._leases.fence_of(id, self._worker))
        if fence is not None and id not in self._active_jobs:
            envelope = self._store_retry.patiently(lambda: self._leases.hand_back(id, fence))
            if envelope is not None:
                self._post(envelope)

    def _work(self, claim: Claim) -> None:
        work = ActiveJob(claim, self._engine)
        begun = time.monotonic()
        self._active_jobs.add(work)
        if self._draining:  # after the claim, unseen by `hand_back_all`
            work.stop()
        headers = {"request_id": claim.request_id} if claim.request_id else {}
        try:
            with request_context(claim.request_id), traces.span(
                f"job {claim.modality}", "consumer", claim.trace, genai.request_attributes(claim), job_id=claim.id,
                attempt=claim.attempt, model=claim.model, worker=self._worker, **headers,
            ) as span:  # fmt: skip
                with ExitStack() as stack:
                    try:
                        ended: dict[str, Any] | Exception = self._executor.run(
                            work, lambda: stack.enter_context(self._storing(claim.modality))
                        )
                    except Exception as error:
                        ended = error
                    outcome = self._end(work, ended)
                span.note(outcome=outcome)
                span.set(genai.outcome_attributes(claim, ended))
                if outcome in ("failed", "lost"):
                    span.fail(outcome)
                took_s = time.monotonic() - begun
                log.info("job %s of %s: %s after %.2f s", claim.id, claim.model, outcome, took_s)
            METER.ended(claim.modality, outcome, took_s)
        finally:
            self._active_jobs.remove(work)

    def _end(self, work: ActiveJob, outcome: dict[str, Any] | Exception) -> str:
        """Record the outcome, retrying through any outage, and return it as one word.

        Every write is refused if the job is no longer this worker's.
        """
        claim, leases, patiently = work.claim, self._leases, self._store_retry.patiently
        id, fence = claim.id, claim.fence
        if work.dropped:
            return "dropped"
        match outcome:
            case dict():
                self._publisher.flush()
                patiently(lambda: leases.succeed(id, fence, outcome, work.artifacts))
                return "succeeded"
            case Expired():
                patiently(lambda: leases.expire(id, fence))
                return "expired"
            case Aborted():
                self._return(claim)
                return "handed_back"
            case Closed() if self._engine.alive:
                self._return(claim)
                return "handed_back"
            case _ if not self._engine.alive:
                # The engine cannot be trusted any more: the process exits, and the lease expires.
                return "lost"
            case Invalid():
                log.warning("job %s was rejected: %s", id, printable_message(str(outcome), _MOST_LOGGED))
                patiently(lambda: leases.fail(id, fence, **outcome.to_dict()))
                return "failed"
            case _:
                code, message = _told(outcome)
                reason = printable_message(str(outcome), _MOST_LOGGED)
                log.warning("job %s failed: %s (%s: %s)", id, code, type(outcome).__name__, reason)
                patiently(lambda: leases.fail(id, fence, code, message))
                return "failed"

    def _return(self, claim: Claim, unless: Callable[[], bool] = lambda: False) -> None:
        """Hand back a claimed job and send its message again."""
        envelope = self._store_retry.patiently(lambda: self._leases.hand_back(claim.id, claim.fence), unless=unless)
        if envelope is not None:
            log.info("job %s is handed back", claim.id)
            self._post(envelope)

    def _post(self, envelope: Envelope) -> None:
        try:
            self._send(envelope)
        except Exception as error:  # of kombu or redis: the sweep resends it
            log.info("message of job %s could not be sent; a sweep resends it (%s)", envelope.id, type(error).__name__)


def _told(error: Exception) -> tuple[str, str]:
    """Error code and message of a failure, for the client. Contains nothing of the request."""
    match error:
        case StageFailed():
            return error.code, str(error)
        case OutOfMemory():
            return "out_of_memory", "the device has too little memory for this job"
        case NotFinite():
            return "not_finite", printable_message(str(error), _MOST_LOGGED)
        case ArtifactError():
            reason = printable_message(str(error), _MOST_LOGGED)
            return "artifact_error", f"an artifact could not be kept or read: {reason}"
        case _:
            return "engine_error", f"the engine failed at this job ({type(error).__name__})"
