"""Runs a claimed job on the engine: reads its parameters, expands prompts, submits its requests, builds its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from contract.errors import Invalid
from core import traces
from core.batching.engine import Aborted, Engine
from core.batching.request import Outcome, Request
from core.jobs.record import Claim
from workers import expand
from workers.active_jobs import ActiveJob
from workers.artifact_writer import ArtifactWriter
from workers.publisher import ProgressPublisher
from workers.warm_claims import WarmClaims

if TYPE_CHECKING:
    from workers.handlers import JobHandler, JobProgress


class JobExecutor:
    """Writes nothing to the job's record but its progress. Thread-safe. `handlers` are by modality."""

    def __init__(
        self,
        engine: Engine,
        handlers: Mapping[str, JobHandler],
        publisher: ProgressPublisher,
        artifact_writer: Callable[[], ArtifactWriter],
        warm_claims: WarmClaims | None = None,
    ) -> None:
        self._engine = engine
        self._handlers = handlers
        self._publisher = publisher
        self._artifact_writer = artifact_writer
        self._warm_claims = warm_claims

    def run(self, work: ActiveJob) -> dict[str, Any] | Exception:
        """The job's result, or the reason for its failure."""
        claim = work.claim
        try:
            handler = self._handlers[claim.modality]
            if claim.model != handler.name:
                raise Aborted("the job names another model")
            job = handler.read(claim.parameters)
            with nullcontext() if self._warm_claims is None else self._warm_claims.reading(job, handler):
                return self._make(work, handler, job)
        except Exception as error:
            return error

    def _make(self, work: ActiveJob, handler: JobHandler, job: Any) -> dict[str, Any]:
        claim = work.claim
        wanted = handler.requests(job)
        artifact_writer = self._artifact_writer()
        deadline = self._deadline(claim)
        started = time.monotonic()
        if job.expand_prompt:
            wanted = self._expanded(work, wanted, deadline)
        with traces.span("engine", requests=len(wanted)):
            made = work.make(self._requests(claim, wanted, handler.tally(wanted), deadline))
        engine_s = time.monotonic() - started
        if work.dropped:
            raise Aborted("the job was cancelled, handed back or claimed again")
        result = handler.build_result(job, made, artifact_writer)
        if job.expand_prompt:
            result = expand.add_prompts(result, wanted)
        work.artifacts = artifact_writer.keys
        return {**result, "engine_s": round(engine_s, 6)}

    def _deadline(self, claim: Claim) -> float:
        """The deadline on the engine's clock."""
        left_s = claim.deadline_left_s
        return math.inf if left_s is None else self._engine.clock() + left_s

    def _expanded(self, work: ActiveJob, pictures: list[Any], deadline: float) -> list[Any]:
        """The image parameters with prompts expanded by the text model. Raises as `ActiveJob.make`."""
        claim = work.claim
        requests = [
            Request(
                f"{claim.id}/{claim.attempt}/prompt-{index}/{claim.incarnation}", "text", wanted,
                priority=claim.priority, deadline=deadline, tenant=claim.owner,
            )
            for index, wanted in enumerate(expand.expansion_requests(pictures, self._handlers.get("text")))
        ]  # fmt: skip
        try:
            texts = work.make(requests)
        except Invalid as error:
            raise error.of(expand.FIELD) from error
        return expand.expanded(pictures, [made.text for made in texts])

    def _requests(self, claim: Claim, wanted: list[Any], tally: JobProgress, deadline: float) -> list[Request]:
        if tally.written is not None:
            tally.written.followed = claim.followed is True
            tally.written.cumulative = not claim.incarnation

        def listener(index: int) -> Callable[[Request, Outcome], None]:
            def hear(_: Request, outcome: Outcome) -> None:
                data = tally.take(index, outcome)
                if data is not None:
                    self._publisher.say(claim.id, claim.fence, data, outcome.preview, tally.written)

            return hear

        return [
            Request(
                f"{claim.id}/{claim.attempt}/{index}/{claim.incarnation}",
                claim.modality,
                parameters,
                priority=claim.priority,
                deadline=deadline,
                listener=listener(index),
                tenant=claim.owner,
            )
            for index, parameters in enumerate(wanted)
        ]
