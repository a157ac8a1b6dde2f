"""Runs a claimed job: reads its parameters, and takes it through its stages, the engine and its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contract.content import as_recorded
from contract.image import ImageJob
from core import traces
from core.artifacts import lay_result
from core.batching.engine import Aborted, Engine, Expired
from workers.artifact_writer import ArtifactWriter
from workers.claims.active_jobs import ActiveJob
from workers.claims.publisher import ProgressPublisher
from workers.handlers import JobHandler, Output
from workers.job_run import JobRun
from workers.stages import stage
from workers.stages.stage import JobStage

if TYPE_CHECKING:
    from workers.claims.warm_claims import WarmClaims


@dataclass(frozen=True, slots=True)
class JobExecutor:
    """Writes nothing to a job's record but its progress. Thread-safe. `handlers` are by their models' names."""

    engine: Engine
    handlers: Mapping[str, JobHandler]
    stages: Sequence[JobStage]
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
        stages: Sequence[JobStage] = ()
        if isinstance(job, ImageJob):
            job = stage.check_all(self.stages, job, claim)
            stages = stage.requested(self.stages, job)
        left_s = math.inf if claim.deadline_left_s is None else claim.deadline_left_s
        with nullcontext() if self.warm_claims is None else self.warm_claims.reading(job, handler):
            requests = dict(enumerate(handler.requests(job)))
            started, deadline = time.monotonic(), self.engine.clock() + left_s
            run = JobRun(job, work, self.engine, self.publisher, handler, self.handlers, deadline)
            with traces.span("engine", requests=len(requests)):
                for each in stages:
                    requests = each.before(run, requests)
                progress = run.progress or handler.tally([*requests.values()])
                values = run.outputs | run.make(requests, handler, progress.take, written=progress.written)
            engine_s = time.monotonic() - started
            on_engine_done()
            if work.dropped:
                raise Aborted("the job was cancelled, handed back or claimed again")
            artifact_writer = self.artifact_writer()
            outputs = [Output(values[index], run.facts.get(index, {})) for index in sorted(values)]
            try:
                for each in stages:
                    outputs = each.after(run.job, outputs, run.stopped)
            except Aborted:
                if work.dropped:
                    raise
                raise Expired("the deadline passed while its images were checked") from None
            result = as_recorded(handler.build_result(job, outputs, artifact_writer))
        if claim.modality == "text" and claim.lays:
            result = lay_result(result, artifact_writer.put)
        work.artifacts = artifact_writer.keys
        return {**result, "engine_s": round(engine_s, 6)}
