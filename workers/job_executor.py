"""Runs a claimed job on the engine: reads its parameters, expands prompts, submits its requests, builds its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class JobExecutor:
    """Writes nothing to a job's record but its progress. Thread-safe. `handlers` are by their models' names."""

    engine: Engine
    handlers: Mapping[str, JobHandler]
    publisher: ProgressPublisher
    artifact_writer: Callable[[], ArtifactWriter]
    warm_claims: WarmClaims | None = None

    def run(self, work: ActiveJob, on_engine_done: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """The job's result. Raises whatever is the reason for its failure.

        `on_engine_done` is called between the end of its last request and the storing of its results.
        """
        claim = work.claim
        handler = self.handlers.get(claim.model)
        if handler is None or handler.modality != claim.modality:
            raise Aborted("the job names another model")
        job = handler.read(claim.parameters)
        left_s = math.inf if claim.deadline_left_s is None else claim.deadline_left_s
        with nullcontext() if self.warm_claims is None else self.warm_claims.reading(job, handler):
            parameters = handler.requests(job)
            started, deadline = time.monotonic(), self.engine.clock() + left_s
            if job.expand_prompt:
                parameters = self._expanded(work, parameters, deadline)
            with traces.span("engine", requests=len(parameters)):
                outputs = work.make(self._requests(claim, parameters, handler.tally(parameters), deadline))
            engine_s = time.monotonic() - started
            on_engine_done()
            if work.dropped:
                raise Aborted("the job was cancelled, handed back or claimed again")
            artifact_writer = self.artifact_writer()
            result = handler.build_result(job, outputs, artifact_writer)
        if job.expand_prompt:
            result = expand.add_prompts(result, parameters)
        work.artifacts = artifact_writer.keys
        return {**result, "engine_s": round(engine_s, 6)}

    def _expanded(self, work: ActiveJob, pictures: list[Any], deadline: float) -> list[Any]:
        """The image parameters with prompts expanded by the text model. Raises as `ActiveJob.make`."""
        claim = work.claim
        requests = [
            Request(
                f"{claim.id}/{claim.attempt}/prompt-{index}/{claim.incarnation}", "text", parameters,
                priority=claim.priority, deadline=deadline, tenant=claim.owner,
            )
            for index, parameters in enumerate(expand.expansion_requests(pictures, self._text_handler))
        ]  # fmt: skip
        try:
            texts = work.make(requests)
        except Invalid as error:
            raise error.of(expand.FIELD) from error
        return expand.expanded(pictures, [answer.text for answer in texts])

    @property
    def _text_handler(self) -> JobHandler | None:
        return next((handler for handler in [*self.handlers.values()] if handler.modality == "text"), None)

    def _requests(self, claim: Claim, parameters: list[Any], tally: JobProgress, deadline: float) -> list[Request]:
        if tally.written is not None:
            tally.written.followed = claim.followed is True
            tally.written.cumulative = not claim.incarnation

        def listener(index: int) -> Callable[[Request, Outcome], None]:
            def hear(_: Request, outcome: Outcome) -> None:
                data = tally.take(index, outcome)
                if data is not None:
                    self.publisher.say(claim.id, claim.fence, data, outcome.preview, tally.written)

            return hear

        return [
            Request(
                f"{claim.id}/{claim.attempt}/{index}/{claim.incarnation}",
                claim.modality,
                item,
                priority=claim.priority,
                deadline=deadline,
                listener=listener(index),
                tenant=claim.owner,
                model=claim.model,
            )
            for index, item in enumerate(parameters)
        ]
