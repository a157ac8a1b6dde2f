"""A job between its claim and its result, as its stages see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.batching.engine import Engine
from core.batching.request import Outcome, Request
from core.jobs.record import Claim
from workers.claims.active_jobs import ActiveJob
from workers.claims.publisher import ProgressPublisher

if TYPE_CHECKING:
    from workers.handlers import JobHandler, JobProgress
    from workers.text.stream_buffer import StreamBuffer

Take = Callable[[int, Outcome], dict[str, Any] | None]
"""Returns the progress to report after an iteration of the request with this index; None: nothing."""


@dataclass(slots=True)
class JobRun:
    """A job that is executed. `handler` is its model's, `handlers` are those of all models that are served, by name.

    `job` is what it asks for, as its stages have changed it. Stages may set the `progress` to report in place of the
    handler's, and by a request's index its output, so that it is not run, and `facts`, which its image's result tells.
    `deadline` is a time of the engine's clock.
    """

    job: Any
    work: ActiveJob
    engine: Engine
    publisher: ProgressPublisher
    handler: JobHandler
    handlers: Mapping[str, JobHandler]
    deadline: float
    progress: JobProgress | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def claim(self) -> Claim:
        return self.work.claim

    def late(self) -> bool:
        """Return whether its deadline has passed."""
        return self.engine.clock() >= self.deadline

    def stopped(self) -> bool:
        """Return whether nothing more needs to be done for it."""
        return self.work.dropped or self.late()

    def report(self, progress: dict[str, Any]) -> None:
        """Publish its progress."""
        self.publisher.say(self.claim.id, self.claim.fence, progress)

    def make(
        self,
        requests: Mapping[int, Any],
        handler: JobHandler,
        take: Take | None = None,
        *,
        label: str = "",
        written: StreamBuffer | None = None,
    ) -> dict[int, Any]:
        """Run the requests of these parameters, by index, on the handler's model, and return their outputs.

        `take` is called after each iteration. `label` tells the requests from others of the job. `written` has the
        job's texts so far, if it generates text. Raises as `ActiveJob.make`.
        """
        claim = self.claim
        if written is not None:
            written.followed = claim.followed is True
            written.cumulative = not claim.incarnation

        def listener(index: int) -> Callable[[Request, Outcome], None] | None:
            if take is None:
                return None

            def hear(_: Request, outcome: Outcome) -> None:
                data = take(index, outcome)
                if data is not None:
                    self.publisher.say(claim.id, claim.fence, data, outcome.preview, written)

            return hear

        outputs = self.work.make(
            [
                Request(
                    f"{claim.id}/{claim.attempt}/{label}{index}/{claim.incarnation}", handler.modality, parameters,
                    priority=claim.priority, deadline=self.deadline, listener=listener(index), tenant=claim.owner,
                    model=handler.name,
                )
                for index, parameters in requests.items()
            ]
        )  # fmt: skip
        return dict(zip(requests, outputs, strict=True))
