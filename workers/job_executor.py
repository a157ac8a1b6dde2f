"""Runs a claimed job on the engine: reads its parameters, expands prompts, submits its requests, builds its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contract.content import as_recorded
from contract.errors import Invalid
from core import traces
from core.artifacts import lay_result
from core.batching.engine import Aborted, Engine, Expired
from core.batching.request import Outcome, Request
from core.jobs.record import Claim
from workers import cascades, expand
from workers.active_jobs import ActiveJob
from workers.artifact_writer import ArtifactWriter
from workers.cascades import CascadeProgress, Draft
from workers.publisher import ProgressPublisher
from workers.warm_claims import WarmClaims

if TYPE_CHECKING:
    from contract.cascade import Cascade
    from contract.image import ImageParameters
    from workers.handlers import JobHandler
    from workers.stream_buffer import StreamBuffer


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
        job = handler.read(claim.parameters, claim.checker)
        left_s = math.inf if claim.deadline_left_s is None else claim.deadline_left_s
        with nullcontext() if self.warm_claims is None else self.warm_claims.reading(job, handler):
            parameters = handler.requests(job)
            started, deadline = time.monotonic(), self.engine.clock() + left_s
            if job.expand_prompt:
                parameters = self._expanded(work, parameters, deadline)
            with traces.span("engine", requests=len(parameters)):
                drafts: list[Draft] = []
                # A draft model that is not served here, not yet or not at all, draws nothing: the job's model does.
                drafting = None if job.cascade is None else self.handlers.get(job.cascade.draft)
                if job.cascade is None or drafting is None:
                    tally = handler.tally(parameters)
                    outputs = work.make(self._requests(claim, parameters, tally.take, deadline, tally.written))
                else:
                    outputs, drafts = self._cascaded(work, (drafting, handler), parameters, job.cascade, deadline)
            engine_s = time.monotonic() - started
            on_engine_done()
            if work.dropped:
                raise Aborted("the job was cancelled, handed back or claimed again")
            artifact_writer = self.artifact_writer()
            try:
                result = handler.build_result(
                    job, outputs, artifact_writer, lambda: work.dropped or self.engine.clock() >= deadline
                )
            except Aborted:
                if work.dropped:
                    raise
                raise Expired("the deadline passed while its images were checked") from None
        if job.expand_prompt:
            result = expand.add_prompts(result, parameters)
        if job.cascade is not None and drafts:
            result = cascades.add_drafts(result, drafts, (job.cascade.draft, claim.model), parameters[0])
        result = as_recorded(result)
        if claim.modality == "text" and claim.lays:
            result = lay_result(result, artifact_writer.put)
        work.artifacts = artifact_writer.keys
        return {**result, "engine_s": round(engine_s, 6)}

    def _expanded(self, work: ActiveJob, pictures: list[Any], deadline: float) -> list[Any]:
        """The image parameters with prompts expanded by the text model. Raises as `ActiveJob.make`."""
        claim, handler = work.claim, self._text_handler
        requests = [
            Request(
                f"{claim.id}/{claim.attempt}/prompt-{index}/{claim.incarnation}", "text", parameters,
                priority=claim.priority, deadline=deadline, tenant=claim.owner,
                model="" if handler is None else handler.name,
            )
            for index, parameters in enumerate(expand.expansion_requests(pictures, handler))
        ]  # fmt: skip
        try:
            texts = work.make(requests)
        except Invalid as error:
            raise error.of(expand.FIELD) from error
        return expand.expanded(pictures, [answer.text for answer in texts])

    @property
    def _text_handler(self) -> JobHandler | None:
        """The handler of the first text model, which stays in memory."""
        return next((handler for handler in [*self.handlers.values()] if handler.modality == "text"), None)

    def _cascaded(
        self,
        work: ActiveJob,
        handlers: tuple[JobHandler, JobHandler],
        pictures: list[ImageParameters],
        cascade: Cascade,
        deadline: float,
    ) -> tuple[list[Any], list[Draft]]:
        """The job's pictures, each a kept draft or else drawn by the job's model; and all drafts.

        `handlers` are those of the draft model and of the job's. Raises as `ActiveJob.make`, and `Invalid`.
        """
        claim = work.claim
        requests = cascades.draft_requests(pictures, handlers[0])
        tally = CascadeProgress([request.made for request in requests], [picture.made for picture in pictures])
        drawn = work.make(self._requests(claim, requests, tally.take_draft, deadline, draft=cascade.draft))

        def late() -> bool:
            return self.engine.clock() >= deadline

        drafts = cascades.judge(handlers[1], cascade, drawn, lambda: work.dropped or late())
        if late():
            raise Expired("the deadline passed while its drafts were scored")
        if len(drafts) < len(drawn):
            raise Aborted("the job ended while its drafts were scored")
        for index, draft in enumerate(drafts):
            if draft.kept:
                self.publisher.say(claim.id, claim.fence, tally.keep(index))
        redrawn = self._requests(claim, pictures, tally.take, deadline)
        outputs = iter(work.make([request for request, draft in zip(redrawn, drafts, strict=True) if not draft.kept]))
        return [draft.picture if draft.kept else next(outputs) for draft in drafts], drafts

    def _requests(
        self,
        claim: Claim,
        parameters: list[Any],
        take: Callable[[int, Outcome], dict[str, Any] | None],
        deadline: float,
        written: StreamBuffer | None = None,
        draft: str = "",
    ) -> list[Request]:
        """The engine requests of these parameters, which report what `take` makes of their outcomes.

        `written` has the job's texts so far, if it generates text. `draft` names the model that draws, if it is not the
        job's.
        """
        if written is not None:
            written.followed = claim.followed is True
            written.cumulative = not claim.incarnation

        def listener(index: int) -> Callable[[Request, Outcome], None]:
            def hear(_: Request, outcome: Outcome) -> None:
                data = take(index, outcome)
                if data is not None:
                    self.publisher.say(claim.id, claim.fence, data, outcome.preview, written)

            return hear

        return [
            Request(
                f"{claim.id}/{claim.attempt}/{'draft-' if draft else ''}{index}/{claim.incarnation}",
                claim.modality,
                item,
                priority=claim.priority,
                deadline=deadline,
                listener=listener(index),
                tenant=claim.owner,
                model=draft or claim.model,
            )
            for index, item in enumerate(parameters)
        ]
