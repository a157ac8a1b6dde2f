"""Draws a job as a cascade: the draft model draws all its pictures, and its own model those below the gate anew.

Both parts belong to one job, with one record, lease and deadline: a worker that dies in between has both repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from contract.cascade import FIELD, Cascade
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.image_request import draft_of
from core.batching.engine import Aborted, Expired
from core.batching.request import Outcome
from workers.handlers import JobHandler
from workers.images.handler import ImageJobHandler
from workers.stages.stage import JobStage

if TYPE_CHECKING:
    from core.config import Settings
    from workers.job_run import JobRun
    from workers.stages.gate import Gate


class CascadeStage(JobStage):
    """Has drafts drawn, and keeps those that the `gate` scores well enough. Without a gate there are no cascades."""

    field = FIELD

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate

    @classmethod
    def open(cls, settings: Settings, device: str) -> Self:
        """Load the scorer, if there are several models."""
        if len(settings.catalogue) < 2 or not settings.scorer_folder:
            return cls()
        from pipeline.clip_scorer import ClipScorer
        from workers.stages.gate import Gate

        return cls(Gate(ClipScorer(settings.scorer_folder)))

    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()

    def card(self, handler: ImageJobHandler, handlers: Mapping[str, JobHandler]) -> Mapping[str, Any]:
        """Return the models that may draw first, with their tuned gates."""
        if self.gate is None:
            return {}
        drafts = [each for each in [*handlers.values()] if isinstance(each, ImageJobHandler)]
        return {"cascades": {each.name: self._tuned(handler, each) for each in drafts if each.name != handler.name}}

    def _tuned(self, handler: ImageJobHandler, draft: ImageJobHandler) -> float | None:
        """The tuned gate, if it is of this draft model and scorer."""
        tuned = handler.gates.get(draft.name)
        digest = None if self.gate is None else self.gate.digest
        return tuned.gate if tuned is not None and (tuned.draft, tuned.scorer) == (draft.digest, digest) else None

    def before(self, run: JobRun, requests: dict[int, Any]) -> dict[int, Any]:
        cascade: Cascade = run.job.cascade
        handler = run.handlers.get(cascade.draft)
        if handler is None:  # a draft model that is not served here, not yet or not at all: the job's model draws
            return requests
        drafts = draft_requests(requests, handler)
        if self.gate is None:
            raise Invalid(FIELD, "is not offered by this worker, which has no scorer")
        if cascade.gate is None:
            raise Invalid(f"{FIELD}.gate", "is missing")
        progress = CascadeProgress([drafts[k].made for k in requests], [requests[k].made for k in requests])
        drawn = run.make(drafts, handler, progress.take_draft, label="draft-")
        scores = self.gate.scores([(drawn[k].image, drawn[k].parameters.prompt) for k in drawn], run.stopped)
        if run.late():
            raise Expired("the deadline passed while its drafts were scored")
        if len(scores) < len(drawn):
            raise Aborted("the job ended while its drafts were scored")
        run.progress = progress
        for index, score in zip(drawn, scores, strict=True):
            kept = score >= cascade.gate
            names = {"drawn_by": handler.name if kept else run.handler.name, "draft_score": score}
            run.facts.setdefault(index, {}).update(names)
            if kept:
                run.outputs[index] = drawn[index]
                run.report(progress.keep(index))
        return {index: picture for index, picture in requests.items() if index not in run.outputs}


def draft_requests(pictures: Mapping[int, ImageParameters], handler: JobHandler) -> dict[int, ImageParameters]:
    """The parameters of the drafts of this handler's model, one for each picture. Raises `Invalid`."""
    if not isinstance(handler, ImageJobHandler):
        raise Invalid(f"{FIELD}.draft", "draws no images")
    return {index: handler.requests(draft_of(picture, handler.offer))[0] for index, picture in pictures.items()}


class CascadeProgress:
    """Steps done over all images of a job and their drafts. Never decreases: a kept draft ends its image's steps."""

    written: None = None

    def __init__(self, drafts: Sequence[int], steps: Sequence[int]) -> None:
        """`drafts` and `steps` are those of each image's draft, and of the image itself."""
        self._drafts, self._steps = drafts, steps
        self._done = [0] * len(steps)
        self._finished = [False] * len(steps)

    def take_draft(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """The progress to report after an iteration of an image's draft."""
        return None if outcome.progress is None else self._report(index, outcome.progress[0])

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """The progress to report after an iteration of an image whose draft was rejected."""
        if outcome.progress is None:
            return None
        self._finished[index] |= outcome.finished
        return self._report(index, self._drafts[index] + outcome.progress[0])

    def keep(self, index: int) -> dict[str, Any]:
        """The progress to report after an image's draft was kept."""
        self._finished[index] = True
        return self._report(index, self._drafts[index] + self._steps[index])

    def _report(self, index: int, done: int) -> dict[str, Any]:
        self._done[index] = max(self._done[index], done)
        return {
            "steps_done": sum(self._done),
            "steps": sum(self._drafts) + sum(self._steps),
            "image": index,
            "images_done": sum(self._finished),
        }
